"""Every process takes the same addresses of Redis, and refuses the same nonsense in a sentence."""

from __future__ import annotations

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import parse_url

from telemetry.credentials import own_url, user_of
from telemetry.redis_address import (
    SENTINELS_MAX,
    RedisAddress,
    WrongAddress,
    parse,
)
from telemetry.redis_clients import async_client, check_options, client


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("redis://h", RedisAddress(places=(("h", 6379),))),
        (
            "redis://h:1/3?protocol=2",
            RedisAddress((("h", 1),), database=3, options=(("protocol", "2"),)),
        ),
        ("redis://h?db=4", RedisAddress((("h", 6379),), database=4)),
        ("redis://:p%2F@h/", RedisAddress((("h", 6379),), password="p/")),
        (
            "rediss://node%3Aax:p@[::1]:7/0",
            RedisAddress((("::1", 7),), is_tls=True, user="node:ax", password="p"),
        ),
        ("unix:///run/r.sock", RedisAddress(path="/run/r.sock")),
        (
            "unix://u:p@/run/r.sock?db=2",
            RedisAddress(path="/run/r.sock", database=2, user="u", password="p"),
        ),
        (
            "redis+sentinel://broker:p@one,two:1,three:26380/work/0",
            RedisAddress(
                (("one", 26380), ("two", 1), ("three", 26380)),
                primary="work",
                user="broker",
                password="p",
            ),
        ),
        (
            "rediss+sentinel://one/work?sentinel_username=s&sentinel_password=t&ssl_ca_certs=%2Fca",
            RedisAddress(
                (("one", 26379),),
                primary="work",
                is_tls=True,
                sentinel_user="s",
                sentinel_password="t",
                options=(("ssl_ca_certs", "/ca"),),
            ),
        ),
    ],
)
def test_an_address_is_taken_apart(text: str, address: RedisAddress) -> None:
    assert parse(text) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "begins with none of redis://"),
        ("h:6379", "begins with none of redis://"),
        ("s3cret:6379", "begins with none of redis://"),
        ("http://h", "begins with none of redis://"),
        ("sentinel://h/x", "begins with none of redis://"),
        ("unix+sentinel:///x", "begins with none of redis://"),
        ("redis:", "A host is missing"),
        ("redis://s3cret@", "A host is missing"),
        ("redis://u:s3cret@h:port", "no port from 1"),
        ("redis://h:0", "no port from 1"),
        ("redis://h:65536", "no port from 1"),
        ("redis://h:1:2", "no port from 1"),
        ("redis://a b", "characters that host names"),
        ("redis://[x]", "It is no URL"),
        ("redis://[::1", "It is no URL"),
        ("redis://u:s3cret/x@h", "%2F for /"),
        ("redis://u:123/s3cret@h:6379/0", "%2F for /"),
        ("redis://u:s3cret?x@h", "not name=value"),
        ("redis://u:[s3cret]@h", "%5B for ["),
        ("redis://u:\u2100s3cret@h/0", "It is no URL"),
        ("redis://s3cret!/0", "characters that host names"),
        ("redis://h/x", "no number from 0 to 1023"),
        ("redis://h/s3cret", "no number from 0 to 1023"),
        ("redis://h/0/1", "no number from 0 to 1023"),
        ("redis://h/1024", "no number from 0 to 1023"),
        ("redis://u:@h", "password before the @ is empty"),
        ("redis://u:s3#cret@h", "write %23"),
        ("redis://a,b", "several hosts, which only redis+sentinel:// may"),
        ("redis://h?x", "not name=value"),
        ("redis://h?x=", "The option x is empty"),
        ("redis://h?x=1&x=2", "given twice"),
        ("redis://h?sentinel_password=s3cret", "is for redis+sentinel:// only"),
        ("unix://", "path of the Unix socket is missing"),
        ("unix://h/run/r.sock", "a path and no host"),
        ("redis+sentinel://h", "by which name they know the primary"),
        ("redis+sentinel://h/", "by which name they know the primary"),
        ("redis+sentinel://h/a b/0", "by which name they know the primary"),
        ("redis+sentinel://h/work/x", "no number from 0 to 1023"),
        ("redis+sentinel://h,/work/0", "A host is missing"),
        ("redis+sentinel://h,h/work/0", "names a Sentinel twice"),
        (
            f"redis+sentinel://{','.join(f'h{n}' for n in range(17))}/work",
            f"{SENTINELS_MAX} are the most",
        ),
    ],
)
def test_nonsense_is_refused_in_a_sentence_without_the_password(text: str, why: str) -> None:
    with pytest.raises(WrongAddress) as caught:
        parse(text)
    assert why in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "s3cret" not in str(caught.value)


@given(st.text(max_size=60))
def test_whatever_it_is_there_is_an_address_or_a_sentence(text: str) -> None:
    for begin in ("", "redis://", "redis+sentinel://", "unix://"):
        try:
            address = parse(begin + text)
        except WrongAddress:
            continue
        # The client takes it, too.
        assert parse_url(address.plain())  # type: ignore[no-untyped-call]


@given(st.text(min_size=1), st.text(min_size=1), st.integers(0, 15))
def test_credentials_come_to_the_client_as_they_are(user: str, password: str, database: int) -> None:
    from urllib.parse import quote

    at = f"{quote(user, safe='')}:{quote(password, safe='')}"
    for url in (f"redis://{at}@h:1/{database}", f"redis+sentinel://{at}@a,b:2/n/{database}"):
        address = parse(url)
        assert (address.user, address.password, address.database) == (user, password, database)
        if database:
            assert parse_url(address.plain())["db"] == database  # type: ignore[no-untyped-call]
        assert parse_url(address.plain())["username"] == user  # type: ignore[no-untyped-call]
        assert parse_url(address.plain())["password"] == password  # type: ignore[no-untyped-call]


def test_the_password_is_not_in_what_is_shown() -> None:
    assert "s3cret" not in repr(parse("redis+sentinel://u:s3cret@h/n?sentinel_password=s3cret2"))


def test_an_agents_own_user_is_put_into_an_address_with_sentinels() -> None:
    url = own_url("redis+sentinel://own@a:1,b:2/numbers/0", "node:ax-1", "t" * 20)
    assert user_of(url) == "node:ax-1"
    address = parse(url)
    assert (address.places, address.primary) == ((("a", 1), ("b", 2)), "numbers")
    assert address.password.startswith("tgt_")


def test_options_that_the_client_does_not_have_are_refused_at_the_start() -> None:
    check_options(parse("rediss+sentinel://h/n?ssl_cert_reqs=none&protocol=2"))
    with pytest.raises(ValueError, match="none of the client's"):
        check_options(parse("redis://h/0?colour=red"))


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "redis+sentinel://127.0.0.1:1/n/0"])
async def test_who_is_away_is_said_at_once_and_nothing_is_tried_twice(url: str) -> None:
    with client(url, answer_seconds=30) as made, pytest.raises(redis.ConnectionError):
        made.ping()
    asking = async_client(url, answer_seconds=30)
    with pytest.raises(redis.ConnectionError):
        await asking.ping()
    await asking.aclose()
