"""Where replicas are, as the leader writes it: to a real Redis, as the leader's user, beside brains that
may have been taken over and clocks that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
import redis

from console.stack import redis as redis_server
from console.stack import redis_users
from console.workloads.leader.endpoints import Document, EndpointWriter, Written
from console.workloads.leader.world import Endpoint
from inference_brain.endpoints import read
from telemetry.credentials import own_url, rules, users
from telemetry.records import ENDPOINTS, ENDPOINTS_BEFORE, ENDPOINTS_SECONDS
from tests.embedded import running

TOKEN: Final = "token-of-the-control-api"
NOW: Final = 1_796_000_000.0
YEARS: Final = 10 * 365 * 86_400.0
MODEL: Final = "example/chat-8b"
EVIL: Final = Written("chat-0", "http://evil:80", "ready", 0.0, "evil")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    made = redis_server.prepare(
        tmp_path_factory.mktemp("redis") / "t", users=redis_users.TELEMETRY, durable=False, strict=True
    )
    with running(made, made.home.parent / "log"):
        yield made


@pytest.fixture
def admin(server: redis_server.RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        for user in users("brain:b"):
            client.execute_command("ACL", "SETUSER", user, *rules(user, TOKEN))
        yield client


@pytest.fixture
def brain(server: redis_server.RedisServer, admin: redis.Redis) -> Iterator[redis.Redis]:
    """As the user by which brains count, and brains of the version before read endpoints."""
    url = own_url(server.url_of("own", ""), "brain:b", TOKEN)
    with redis.Redis.from_url(url, driver_info=None) as client:
        yield client


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def writer(server: redis_server.RedisServer, clock: Clock) -> EndpointWriter:
    return EndpointWriter(server.url_of("leader"), clock)


def replica(url: str) -> list[tuple[str, Endpoint]]:
    made = Endpoint(ordinal=0, instance="chat-0-r1", url=url, is_draining=False, since=NOW)
    return [("chat-0", made)]


def document(version: int, at: float = NOW) -> bytes:
    return msgspec.json.encode(Document(version, at, (EVIL,)))


def urls(raw: Any) -> list[str]:
    """As brains read them."""
    return [one.url for one in read(raw).endpoints]


def test_what_a_brain_has_written_to_the_key_of_the_version_before_is_overwritten(
    server: redis_server.RedisServer, admin: redis.Redis, brain: redis.Redis, clock: Clock
) -> None:
    """With the largest version, and no TTL. It is not taken for what brains were told either."""
    brain.set(ENDPOINTS_BEFORE + MODEL, document((1 << 63) - 1))
    leader = writer(server, clock)
    leader.read([MODEL])
    assert leader.published(MODEL) == {}
    assert leader.write(MODEL, replica("http://good:80"), clock.now)
    for key in (ENDPOINTS + MODEL, ENDPOINTS_BEFORE + MODEL):
        assert urls(admin.get(key)) == ["http://good:80"]
        assert 0 < int(admin.ttl(key)) <= ENDPOINTS_SECONDS
    assert urls(brain.mget([ENDPOINTS_BEFORE + MODEL])[0]) == ["http://good:80"]
    brain.set(ENDPOINTS_BEFORE + MODEL, document((1 << 63) - 1))
    clock.now += 31.0
    assert not leader.write(
        MODEL, replica("http://good:80"), clock.now
    )  # no news, and time to write it again
    assert urls(admin.get(ENDPOINTS_BEFORE + MODEL)) == ["http://good:80"]
    leader.forget(MODEL)
    assert admin.keys("*") == []
    leader.close()


@pytest.mark.parametrize("version", [int((NOW + YEARS) * 1000), (1 << 63) - 1])
def test_a_version_of_the_future_does_not_stand_in_the_way(
    version: int, server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    """As of a leader whose clock was wrong, and without a TTL."""
    admin.set(ENDPOINTS + MODEL, document(version, NOW + YEARS))
    leader = writer(server, clock)
    leader.read([MODEL])
    leader.write(MODEL, replica("http://good:80"), clock.now)
    written = read(admin.get(ENDPOINTS + MODEL))  # type: ignore[arg-type]
    assert [one.url for one in written.endpoints] == ["http://good:80"]
    assert written.version == int(NOW * 1000)
    assert 0 < int(admin.ttl(ENDPOINTS + MODEL)) <= ENDPOINTS_SECONDS
    leader.close()


def test_a_leader_whose_clock_is_ahead_leaves_no_key_that_runs_out(
    server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    """Within what clocks may differ by, the next version follows on the last."""
    clock.now = NOW + 3600.0
    first = writer(server, clock)
    first.write(MODEL, replica("http://good:80"), clock.now)
    before = read(admin.get(ENDPOINTS + MODEL)).version  # type: ignore[arg-type]
    clock.now = NOW
    second = writer(server, clock)
    second.read([MODEL])
    admin.expire(ENDPOINTS + MODEL, 5)
    assert not second.write(MODEL, replica("http://good:80"), clock.now)
    assert int(admin.ttl(ENDPOINTS + MODEL)) > 60
    assert read(admin.get(ENDPOINTS + MODEL)).version == before + 1  # type: ignore[arg-type]
    first.close()
    second.close()


def test_an_older_version_never_replaces_a_newer_one(
    server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    """A former leader wakes up with what it knew."""
    former, leader = writer(server, clock), writer(server, clock)
    former.write(MODEL, replica("http://former:80"), clock.now)
    clock.now += 5.0
    leader.read([MODEL])
    leader.write(MODEL, replica("http://good:80"), clock.now)
    clock.now -= 4.0
    former.write(MODEL, replica("http://other:80"), clock.now)
    for key in (ENDPOINTS + MODEL, ENDPOINTS_BEFORE + MODEL):
        assert urls(admin.get(key)) == ["http://good:80"]
    former.close()
    leader.close()


def test_what_was_decided_before_another_one_led_never_replaces_what_that_has_written(
    server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    """The machine of a leader stands still between its decision and its write."""
    former, leader = writer(server, clock), writer(server, clock)
    former.write(MODEL, replica("http://former:80"), clock.now)
    decided_at = clock.now
    clock.now += 10.0
    leader.read([MODEL])
    leader.write(MODEL, replica("http://good:80"), clock.now)
    clock.now += 5.0
    former.write(MODEL, replica("http://drained:80"), decided_at)
    assert urls(admin.get(ENDPOINTS + MODEL)) == ["http://good:80"]
    former.close()
    leader.close()


REFUSALS: Final = {
    "console": "EVAL with GET and SET of tidegate:endpoints:",
    "observer": "EVAL with GET and SET of tidegate:endpoints:",
    "nobody": "",  # whom Redis does not know
}


@pytest.mark.parametrize("user", REFUSALS)
def test_a_user_that_may_not_write_endpoints_is_named_with_what_it_lacks(
    user: str, server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    """Such as that of telemetry, which is used where no other is given."""
    leader = EndpointWriter(server.url_of(user, None if user in server.passwords else "x" * 20), clock)
    with pytest.raises(redis.RedisError):
        leader.write(MODEL, replica("http://good:80"), clock.now)
    assert not leader.is_connected
    assert REFUSALS[user] in leader.refusal
    assert f"to the user {user}: " in leader.refusal
    assert "TIDEGATE_ENDPOINTS_URL needs the user `leader`" in leader.refusal
    leader.close()


@pytest.mark.parametrize(
    ("rules_of_it", "lacks"),
    [
        ("~tidegate:endpoints:* &tidegate:endpoints -@all +ping +get +mget +publish +eval", "SET"),
        ("~tidegate:endpoints:* -@all +ping +get +mget +set +publish +eval", "PUBLISH"),
        ("~other &tidegate:endpoints -@all +ping +get +mget +set +publish +eval", "tidegate:endpoints:"),
    ],
)
def test_what_a_script_may_not_do_is_told_from_a_redis_that_is_away(
    rules_of_it: str, lacks: str, server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    rights = ("reset", "on", ">half", "resetchannels", *rules_of_it.split())
    admin.execute_command("ACL", "SETUSER", "half", *rights)  # type: ignore[no-untyped-call]
    leader = EndpointWriter(server.url_of("half", "half"), clock)
    with pytest.raises(redis.RedisError):
        leader.write(MODEL, replica("http://good:80"), clock.now)
    assert lacks in leader.refusal
    more = ("allkeys", "allchannels", "+set")
    admin.execute_command("ACL", "SETUSER", "half", *more)  # type: ignore[no-untyped-call]
    assert leader.write(MODEL, replica("http://good:80"), clock.now)
    assert leader.is_connected
    assert not leader.refusal
    leader.close()


def test_a_redis_that_is_away_refuses_nothing(clock: Clock) -> None:
    leader = EndpointWriter("unix:///nowhere/redis.sock", clock)
    with pytest.raises(redis.ConnectionError):
        leader.write(MODEL, replica("http://good:80"), clock.now)
    assert not leader.is_connected
    assert not leader.refusal
    leader.close()


def test_no_name_of_a_model_is_the_key_of_another_one(
    server: redis_server.RedisServer, admin: redis.Redis, clock: Clock
) -> None:
    leader = writer(server, clock)
    leader.write("chat", replica("http://good:80"), clock.now)
    leader.write(":chat", replica("http://other:80"), clock.now)
    assert urls(admin.get(ENDPOINTS + "chat")) == ["http://good:80"]
    assert urls(admin.get(ENDPOINTS + ":chat")) == ["http://other:80"]
    leader.forget(":chat")
    assert admin.exists(ENDPOINTS + "chat")
    leader.close()
