"""Being part of a fleet: whatever the console answers, an agent goes on, and calls again in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvss_agent.joining import (
    AGAIN_SECONDS_MAX,
    ANSWER_BYTES_MAX,
    BEAT_SECONDS,
    BEAT_SECONDS_MAX,
    BEAT_SECONDS_MIN,
    REFUSED_SECONDS,
    Console,
    Identity,
    Member,
    Standing,
    credential,
    member,
)
from kvss_agent.options import WrongSettings
from kvss_agent.settings import parse
from tests.live import wait_until

TOKEN = "t" * 32
IDENTITY = Identity("nodes", "node:ax-1", "ax-1", TOKEN, {"cpus": 4}, {"nics": []})
OURS = credential(TOKEN, "node:ax-1")
Answer = Callable[[httpx.Request], httpx.Response]


async def once(
    answer: Answer, join_token: str = "", standing: Standing | None = None
) -> tuple[float, Standing]:
    standing = standing or Standing()
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        return await Member(Console("http://console", join_token), IDENTITY, standing).once(
            client
        ), standing


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

    seconds, standing = await once(answer, "tgj_x")
    assert (seconds, standing.state, standing.calls) == (2, "joined", {"joined": 1})
    [request] = asked
    assert request.url.path == "/api/v1/nodes/ax-1/heartbeat"
    assert request.headers["authorization"] == f"Bearer {OURS}"
    assert json.loads(request.content) == {"cpus": 4}


async def test_who_is_unknown_joins_if_it_may() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200 if request.url.path.endswith("/join") else 401, json={})

    _, standing = await once(answer, "tgj_x")
    assert standing.state == "joined"
    assert asked[1].headers["authorization"] == "Bearer tgj_x"
    assert json.loads(asked[1].content) == {"cpus": 4, "nics": [], "control_token": TOKEN}
    seconds, standing = await once(answer)
    assert (seconds, standing.state) == (REFUSED_SECONDS, "refused")
    assert "--join-token" in standing.reason


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
        us = Member(Console("http://console", "tgj_x"), new, Standing())
        await us.once(client)
        await us.once(client)
    assert asked[:2] == ["join", then]


def test_a_token_that_was_made_just_now_is_known_to_nobody(tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path)]
    assert parse(options, {}).is_new
    assert not parse(options, {}).is_new


def broken(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("nobody there")


def torn(_request: httpx.Request) -> httpx.Response:
    raise httpx.RemoteProtocolError("cut off")


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
    ],
)
async def test_whatever_it_answers_we_go_on(answer: Answer, state: str, seconds: float) -> None:
    got, standing = await once(answer)
    assert (got, standing.state) == (seconds, state)


async def test_who_is_away_is_asked_less_and_less_but_never_given_up() -> None:
    standing = Standing()
    transport = httpx.MockTransport(broken)
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        us = Member(Console("http://console"), IDENTITY, standing)
        waits = [await us.once(client) for _ in range(50)]
    assert waits[:3] == [0.5, 1, 2]
    assert waits[-1] == AGAIN_SECONDS_MAX
    assert standing.calls["away"] == 50


async def test_who_has_no_console_is_alone_and_who_ends_does_not_wait_for_it() -> None:
    standing = Standing()
    async with member(None, IDENTITY, standing):
        assert standing.state == "alone"
    async with member(Console("http://127.0.0.1:1"), IDENTITY, standing):
        await asyncio.to_thread(wait_until, "it noticed", lambda: standing.state == "away")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--console", "ftp://x"], "--console is 'ftp://x'"),
        (["--console", "http://10.0.0.1:8400"], "could be read on the way"),
        (["--join-token", "tgj_x"], "--join-token needs --console"),
        (["--console", "https://c", "--join-token", "secret"], "--join-token is (hidden)"),
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
