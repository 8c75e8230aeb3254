"""Being part of a fleet: whatever the console answers, an agent goes on, and calls again in time."""

from __future__ import annotations

import asyncio
import json
import ssl
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.authority.issuing import Signer, make_root
from kvss_agent import native
from kvss_agent.process import daemon, membership
from kvss_agent.process.membership import (
    AGAIN_SECONDS_MAX,
    ANSWER_BYTES_MAX,
    BEAT_SECONDS,
    BEAT_SECONDS_MAX,
    BEAT_SECONDS_MIN,
    CERTIFIED_SECONDS,
    REFUSED_SECONDS,
    Console,
    JoiningProcess,
    Member,
    MembershipStatus,
    credential,
    member,
)
from kvss_agent.process.options import WrongSettings
from kvss_agent.process.settings import ProcessSettings
from kvss_agent.security.certificates import Peer, Role
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from kvss_agent.security.trust import Trust
from kvss_agent.settings import parse
from telemetry.credentials import own_url
from telemetry.emit.reporter import Reporter
from telemetry.metrics import LabelLimits
from tests.hostile import agent as hostile
from tests.hostile.answers import EXHAUSTING, bomb, says
from tests.live import wait_until

TOKEN = "t" * 32
IDENTITY = JoiningProcess("nodes", "node:ax-1", "ax-1", TOKEN, {"cpus": 4}, {"nics": []})
OURS = credential(TOKEN, "node:ax-1")
Answer = Callable[[httpx.Request], httpx.Response]


async def once(
    answer: Answer, join_token: str = "", membership_status: MembershipStatus | None = None
) -> tuple[float, MembershipStatus]:
    membership_status = membership_status or MembershipStatus()
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        return await Member(Console("http://console", join_token), IDENTITY, membership_status).once(
            client
        ), membership_status


def test_what_heartbeats_are_known_by_follows_from_token_and_name_and_tells_neither() -> None:
    assert credential(TOKEN, "node:ax-1") == OURS
    assert credential(TOKEN, "driver:ax-1") != OURS
    assert credential("u" * 32, "node:ax-1") != OURS
    assert TOKEN not in OURS
    assert TOKEN not in repr(IDENTITY)
    assert "tgj_x" not in repr(Console("http://console", "tgj_x"))


async def test_who_is_known_only_beats_and_never_shows_its_token() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"heartbeat_seconds": 2})

    seconds, membership_status = await once(answer, "tgj_x")
    assert (seconds, membership_status.state, membership_status.calls) == (2, "joined", {"joined": 1})
    [request] = asked
    assert request.url.path == "/api/v1/nodes/ax-1/heartbeat"
    assert request.headers["authorization"] == f"Bearer {OURS}"
    assert json.loads(request.content) == {"cpus": 4, "mover": native.current().name}


async def test_who_is_unknown_joins_if_it_may() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200 if request.url.path.endswith("/join") else 401, json={})

    _, membership_status = await once(answer, "tgj_x")
    assert membership_status.state == "joined"
    assert asked[1].headers["authorization"] == "Bearer tgj_x"
    assert json.loads(asked[1].content) == {
        "cpus": 4,
        "mover": native.current().name,
        "nics": [],
        "control_token": TOKEN,
    }
    seconds, membership_status = await once(answer)
    assert (seconds, membership_status.state) == (REFUSED_SECONDS, "refused")
    assert "--join-token" in membership_status.reason


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (httpx.Response(200, json={}), "heartbeat"),
        (httpx.ConnectError("it is only just starting"), "join"),
        (httpx.ReadTimeout("who knows whether it has heard us"), "heartbeat"),
        (httpx.Response(401), "heartbeat"),
    ],
)
async def test_who_cannot_be_known_yet_joins_and_sends_no_heartbeat_before(
    first: httpx.Response | httpx.HTTPError, then: str
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path.rpartition("/")[2])
        if len(asked) == 1 and isinstance(first, httpx.HTTPError):
            raise first
        return first if isinstance(first, httpx.Response) else httpx.Response(200, json={})

    new = replace(IDENTITY, is_new=True)
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        us = Member(Console("http://console", "tgj_x"), new, MembershipStatus())
        await us.once(client)
        await us.once(client)
    assert asked[:2] == ["join", then]


def test_a_token_that_was_made_just_now_is_known_to_nobody(tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path)]
    assert parse(options, {}).is_new
    assert not parse(options, {}).is_new


def certifying(issued: dict[str, str], digest: str, asked: list[str]) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        verb = request.url.path.rpartition("/")[2]
        asked.append(verb)
        assert request.headers["authorization"] == f"Bearer {OURS}"
        if verb == "certificate":
            assert set(json.loads(request.content)) == {"certificate_request"}
            return httpx.Response(200 if issued else 409, json=issued)
        return httpx.Response(200, json={"authorities": digest})

    return answer


async def test_it_asks_for_a_certificate_when_the_console_names_other_authorities(
    tmp_path: Path,
) -> None:
    now = datetime.now(UTC)
    root = make_root("one", now)
    trust = Trust.load(ProcessIdentity.load(tmp_path, "node:ax-1"))
    pem = trust.identity.public_key_pem
    peer = Peer(Role.NODE, "ax-1", fingerprint(pem))
    certificate = Signer(root.certificate, root.key).issue(peer, pem, timedelta(days=7), now)
    issued = {"certificate": certificate, "authorities": root.certificate, "digest": "d1"}
    us, asked = replace(IDENTITY, trust=trust), list[str]()
    membership_status = MembershipStatus()

    async def beat(issued: dict[str, str], digest: str) -> None:
        transport = httpx.MockTransport(certifying(issued, digest, asked))
        async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
            await Member(Console("http://console"), us, membership_status).once(client)

    for refused in ({}, {**issued, "certificate": "nonsense"}, {"certificate": certificate}):
        await beat(refused, "d1")
        assert membership_status.state == "joined", "it goes on, and asks again with the next heartbeat"
        assert not trust.client_certificate()
    assert membership_status.calls["not certified"] == 3
    await beat(issued, "d1")
    assert trust.digest == "d1"
    assert asked[-2:] == ["heartbeat", "certificate"]
    await beat(issued, "d1")
    assert asked[-1] == "heartbeat", "nothing is due"
    await beat(issued, "")
    assert asked[-1] == "heartbeat", "a console of the version before"
    await beat({**issued, "digest": "d2"}, "d2")
    assert trust.digest == "d2"


async def test_a_certificate_that_is_old_when_it_comes_is_not_asked_for_all_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the clock here is days ahead of the console's."""
    long_ago = datetime.now(UTC) - timedelta(days=5)
    root = make_root("one", long_ago)
    trust = Trust.load(ProcessIdentity.load(tmp_path, "node:ax-1"))
    pem = trust.identity.public_key_pem
    peer = Peer(Role.NODE, "ax-1", fingerprint(pem))
    certificate = Signer(root.certificate, root.key).issue(peer, pem, timedelta(days=7), long_ago)
    issued = {"certificate": certificate, "authorities": root.certificate, "digest": "d1"}
    asked: list[str] = []
    transport = httpx.MockTransport(certifying(issued, "d1", asked))
    member = Member(Console("http://console"), replace(IDENTITY, trust=trust), MembershipStatus())
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        for _ in range(5):
            seconds = await member.once(client)
    assert asked.count("certificate") == 1
    assert seconds > CERTIFIED_SECONDS
    assert "this clock or the console's is wrong" in caplog.text


def test_a_token_whose_file_is_empty_is_made_anew(tmp_path: Path) -> None:
    """As where the disk was full at the first start."""
    (tmp_path / "token").touch(mode=0o600)
    options = ["--state-dir", str(tmp_path)]
    made = parse(options, {})
    assert made.is_new
    assert parse(options, {}).token == made.token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_token_file_that_is_none_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff" * 64)
    with pytest.raises(WrongSettings, match="Cannot read the token in"):
        parse(["--state-dir", str(tmp_path), "--token-file", str(tmp_path / "t")], {})


def test_a_console_is_believed_by_a_file(tmp_path: Path) -> None:
    authorities = tmp_path / "ca.pem"
    options = ["--state-dir", str(tmp_path), "--console", "https://c", "--console-ca", str(authorities)]
    with pytest.raises(WrongSettings, match="console-ca"):
        parse(options, {})
    authorities.write_text("nonsense")
    with pytest.raises(WrongSettings, match="holds no certificates"):
        parse(options, {})
    authorities.write_text(make_root("one", datetime.now(UTC)).certificate)
    console = parse(options, {}).console
    assert console
    assert isinstance(console.verify(), ssl.SSLContext)


@pytest.mark.parametrize(
    "options",
    [
        ["10.0.0.7:8410", "--plain-control", "yes"],
        ["127.0.0.2:8410"],
        ["[::1]:8410"],
        ["10.0.0.7:8410", "--console", "https://c"],
    ],
)
def test_plain_http_is_loopback_or_loud(tmp_path: Path, options: list[str]) -> None:
    given = ["--state-dir", str(tmp_path), "--control", *options]
    assert parse(given, {}).serves_tls == ("--console" in options)


@pytest.mark.parametrize("control", ["10.0.0.7:8410", "0.0.0.0:8410", "[::]:8410", "ax-1:8410"])
def test_plain_http_is_refused_where_others_listen(tmp_path: Path, control: str) -> None:
    with pytest.raises(WrongSettings, match="tokens and keys could be read"):
        parse(["--state-dir", str(tmp_path), "--control", control], {})


def broken(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("nobody there")


def torn(_request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("cut off")


DEEP = b'{"x": ' + b"[" * 60_000
HUGE = b'{"heartbeat_seconds": %s}' % (b"9" * 4000)


@pytest.mark.parametrize(
    ("answer", "state", "seconds"),
    [
        (broken, "away", 0.5),
        (torn, "away", 0.5),
        (lambda _: httpx.Response(500), "away", 0.5),
        (lambda _: httpx.Response(429), "away", 0.5),
        (lambda _: httpx.Response(301, headers={"location": "http://evil/"}), "away", 0.5),
        (lambda _: httpx.Response(200, content=b"x" * (ANSWER_BYTES_MAX + 1)), "away", 0.5),
        (lambda _: httpx.Response(200, content=b"\xff\xfe"), "joined", BEAT_SECONDS),
        (lambda _: httpx.Response(200, json={"heartbeat_seconds": "x"}), "joined", BEAT_SECONDS),
        (lambda _: httpx.Response(200, json={"heartbeat_seconds": 0}), "joined", BEAT_SECONDS_MIN),
        (lambda _: httpx.Response(200, json={"heartbeat_seconds": 1e9}), "joined", BEAT_SECONDS_MAX),
        (lambda _: httpx.Response(409, json={"detail": "No."}), "refused", REFUSED_SECONDS),
        (lambda _: httpx.Response(422, content=b"["), "refused", REFUSED_SECONDS),
        (lambda _: httpx.Response(200, content=DEEP), "joined", BEAT_SECONDS),
        (lambda _: httpx.Response(422, content=DEEP), "refused", REFUSED_SECONDS),
        (lambda _: httpx.Response(422, content=b'{"detail": "\xff"}'), "refused", REFUSED_SECONDS),
        (lambda _: httpx.Response(200, content=b'{"heartbeat_seconds": 1e999}'), "joined", BEAT_SECONDS),
        (lambda _: httpx.Response(200, content=HUGE), "joined", BEAT_SECONDS),
    ],
)
async def test_whatever_it_answers_we_go_on(answer: Answer, state: str, seconds: float) -> None:
    got, membership_status = await once(answer)
    assert (got, membership_status.state) == (seconds, state)


async def test_who_is_away_is_asked_less_and_less_but_never_given_up() -> None:
    membership_status = MembershipStatus()
    transport = httpx.MockTransport(broken)
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        us = Member(Console("http://console"), IDENTITY, membership_status)
        waits = [await us.once(client) for _ in range(50)]
    assert waits[:3] == [0.5, 1, 2]
    assert waits[-1] == AGAIN_SECONDS_MAX
    assert membership_status.calls["away"] == 50


async def test_a_heartbeat_that_fails_inside_is_not_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is raised: a process that beats no more is lost, and its own page says all is well."""
    facts: dict[str, object] = {"what can't be sent": object()}
    membership_status = MembershipStatus()
    with hostile.Peer(says(b"{}")) as console:
        async with member(Console(console.url), replace(IDENTITY, facts=facts), membership_status):
            await asyncio.to_thread(
                wait_until, "one has failed", lambda: membership_status.calls["away"] > 1
            )
            assert "A heartbeat failed with an internal error" in caplog.text
            facts.clear()
            await asyncio.to_thread(
                wait_until, "it goes on", lambda: membership_status.state == "joined"
            )


@pytest.mark.parametrize("name", ["drips", "drips headers", "endless text", "bomb"])
async def test_a_console_that_takes_its_time_is_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ANSWER_SECONDS_MAX", 0.5)
    membership_status = MembershipStatus()
    answer = bomb(64) if name == "bomb" else EXHAUSTING[name]
    with hostile.Peer(answer) as console:
        async with httpx.AsyncClient(base_url=console.url, timeout=60) as client, asyncio.timeout(60):
            await Member(Console(console.url), IDENTITY, membership_status).once(client)
    assert membership_status.state == "away"


async def test_who_has_no_console_is_alone_and_who_ends_does_not_wait_for_it() -> None:
    membership_status = MembershipStatus()
    async with member(None, IDENTITY, membership_status):
        assert membership_status.state == "alone"
    async with member(Console("http://127.0.0.1:1"), IDENTITY, membership_status):
        await asyncio.to_thread(wait_until, "it noticed", lambda: membership_status.state == "away")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--console", "ftp://x"], "--console is 'ftp://x'"),
        (["--console", "http://10.0.0.1:8400"], "could be read on the way"),
        (["--join-token", "tgj_x"], "--join-token needs --console"),
        (["--console", "https://c", "--join-token", "secret"], "--join-token is (hidden)"),
        (["--console", "https://c", "--join-token", "tgj_x\n"], "--join-token is (hidden)"),
        (["--nics", "eth0"], "--nics is 'eth0'"),
        (["--data-address", "here"], "--data-address is 'here'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    options: list[str], said: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state_dir = tmp_path_factory.mktemp("a")
    with pytest.raises(WrongSettings) as raised:
        parse(["--state-dir", str(state_dir), *options], {})
    assert said in str(raised.value)


def test_a_console_elsewhere_is_https_or_said_to_be_plain(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    state_dir = str(tmp_path_factory.mktemp("a"))
    for url, more in (
        ("https://console", []),
        ("http://127.0.0.1:8400", []),
        ("http://10.0.0.1:8400", ["--plain-console", "yes"]),
    ):
        found = parse(["--state-dir", state_dir, "--console", url, *more, "--nics", "e0=l1,e1=l2"], {})
        assert found.console == Console(url)
        assert found.nics == (("e0", "l1"), ("e1", "l2"))


async def test_an_address_for_telemetry_that_no_client_takes_is_not_the_last_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one wrong setting of the console ends the telemetry of all its fleet until they restart."""
    reported: list[str | None] = []

    class Noted(Reporter):
        def __init__(self, redis_url: str | None, *given: Any, **more: Any) -> None:
            super().__init__(redis_url, *given, **more)
            reported.append(redis_url)

    monkeypatch.setattr(daemon, "Reporter", Noted)
    status = MembershipStatus()
    settings = ProcessSettings(
        name="ax-1",
        state_dir=Path(),
        control=("127.0.0.1", 0),
        token="t" * 20,
        console=Console("http://127.0.0.1:9"),
    )
    given = settings, "agent", "node:ax-1", lambda _: None, LabelLimits(), status
    async with daemon.reporting(*given):
        status.telemetry_url = "redis://own@127.0.0.1:9?socket_timeout=soon"
        status.has_telemetry.set()
        await asyncio.to_thread(wait_until, "it was refused", lambda: "can't be used" in caplog.text)
        status.telemetry_url = "redis://own@127.0.0.1:9/0"
        status.has_telemetry.set()
        await asyncio.to_thread(wait_until, "it is used", lambda: len(reported) == 2)
    assert reported == [None, own_url("redis://own@127.0.0.1:9/0", "node:ax-1", "t" * 20)]
    assert "can't be used: Invalid value for 'socket_timeout'" in caplog.text
    assert "tgt_" not in caplog.text
