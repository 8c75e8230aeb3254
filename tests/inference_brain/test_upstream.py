"""Connections to replicas, and what becomes of replicas that fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_brain.upstream.budget import RESERVE, RetryBudget
from inference_brain.upstream.fleet import Fleet
from inference_brain.upstream.health import (
    EJECTED_SECONDS,
    EJECTED_SECONDS_MAX,
    FAILURES_MAX,
    FORGOTTEN_SECONDS,
    SERVED_SECONDS,
    SLOW_START_SECONDS,
    Health,
    State,
)
from kvss_agent.http.client.client import Client, Timeouts
from kvss_agent.http.client.connection import HELD_BYTES_MAX, Connection, Incoming
from kvss_agent.http.client.failures import Late, Lost, Unreachable, UpstreamFailed
from tests.inference_brain.brains import RunningBrain, told
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@asynccontextmanager
async def serving(handler: Handler, between: float = 60.0) -> AsyncIterator[tuple[str, Client]]:
    """A server that does with each connection what the handler says, and a client, which waits so long
    for each piece."""
    running: set[asyncio.Task[None] | None] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        try:
            await handler(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    client = Client(Timeouts(60.0, 60.0, between))
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", client
    finally:
        await client.close()
        server.close()
        await asyncio.gather(*filter(None, running))
        await asyncio.sleep(0)  # for transports to close


async def ask(client: Client, url: str, body: bytes = b"{}") -> bytes:
    async with client.open("POST", url, {"a": "b"}, body) as answer:
        return await answer.whole()


def answering(raw: bytes, *, closes: bool = True) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        if closes:
            writer.close()
            await writer.wait_closed()
        else:
            await reader.read()

    return handle


async def test_a_socket_is_asked_whatever_host_is_named(tmp_path: Path) -> None:
    running: list[asyncio.Task[None] | None] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.append(asyncio.current_task())
        await answering(WHOLE)(reader, writer)

    server = await asyncio.start_unix_server(connected, tmp_path / "engine.sock")
    client = Client(unix=tmp_path / "engine.sock")
    try:
        assert await ask(client, "http://engine.invalid/v1/models") == b"hi"
    finally:
        await client.close()
        server.close()
        await asyncio.gather(*filter(None, running))
    gone = Client(unix=tmp_path / "nowhere.sock")
    with pytest.raises(Unreachable):
        await ask(gone, "http://engine.invalid/v1/models")


async def test_a_connection_is_used_again() -> None:
    connections = 0
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while not reader.at_eof():
            try:
                heads.append(await reader.readuntil(b"{}"))
            except asyncio.IncompleteReadError:
                break
            writer.write(WHOLE)
        writer.close()

    async with serving(handle) as (url, client):
        for _ in range(3):
            assert await ask(client, url) == b"hi"
        assert connections == 1
        host = url.split("/")[2].encode()
        assert (
            heads[2] == b"POST /x HTTP/1.1\r\nhost: " + host + b"\r\na: b\r\ncontent-length: 2\r\n\r\n{}"
        )


async def test_a_connection_that_the_replica_has_closed_costs_no_request() -> None:
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"{}")
        writer.write(WHOLE)
        await reader.readuntil(b"{}")  # and then it goes without a word
        writer.transport.abort()

    async with serving(handle) as (url, client):
        assert await ask(client, url) == b"hi"
        assert await ask(client, url) == b"hi"
        assert connections == 2


async def test_what_is_given_up_is_not_sent_again_to_a_replica_that_hangs() -> None:
    requests, hangs = 0, asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while await reader.readuntil(b"{}"):
            requests += 1
            if requests > 1:
                hangs.set()
                await reader.read()  # until it is closed
                return
            writer.write(WHOLE)

    async with serving(handle) as (url, client):
        assert await ask(client, url) == b"hi"
        sent = client.open("POST", url, {}, b"{}", seconds=20.0)
        entering = asyncio.ensure_future(sent.__aenter__())
        await asyncio.wait_for(hangs.wait(), 20)
        sent.give_up("It hangs.")
        with pytest.raises(Late, match="It hangs"):
            await entering
        assert requests == 2


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n", b"hi!"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, b"hi"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil it closes", b"until it closes"),
    ],
)
async def test_answers(raw: bytes, body: bytes) -> None:
    async with serving(answering(raw)) as (url, client):
        assert await ask(client, url) == body


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxx\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
    ],
)
async def test_what_is_no_answer(raw: bytes) -> None:
    async with serving(answering(raw)) as (url, client):
        with pytest.raises(Lost):
            await ask(client, url)


async def test_nobody_listens() -> None:
    client = Client(Timeouts(60.0, 60.0, 60.0))
    with pytest.raises(Unreachable, match="refused"):
        await ask(client, "http://127.0.0.1:1/x")
    with pytest.raises(Unreachable):
        await ask(client, "http://no-such-host.invalid/x")
    with pytest.raises(Unreachable, match="its name is not known"):
        await ask(client, "http://a\0b/x")


UNUSABLE = (
    "http://127.0.0.1:99999",
    "http://r:abc/x",
    "http://[::1/x",
    "http://r\u200b/x",
    "http://r/\u200b",
)


@pytest.mark.parametrize("url", UNUSABLE)
async def test_nobody_is_at_an_address_that_can_not_be_used(url: str) -> None:
    client = Client(Timeouts(0.5, 1.0, 1.0))
    for _ in range(2):
        with pytest.raises(Unreachable, match="can't be used"):
            await ask(client, url)


def test_a_replica_at_an_address_that_can_not_be_used_is_left_out() -> None:
    """Others serve its requests, and those of engines without a driver go on being asked for their
    load."""
    with FakeEngine() as engine, RunningBrain(told([UNUSABLE[0], engine.url])) as brain:
        numbers = itertools.count()

        def is_left_out() -> bool:
            """It is, once it was chosen: it may be so for any of them."""
            body = {"model": "m", "prompt": f"{next(numbers)}", "max_tokens": 1}
            answer = httpx.post(
                f"{brain.url}/v1/completions", headers=brain.headers, json=body, timeout=60
            )
            assert answer.status_code == 200, answer.text
            replica, _ = brain.brain.observed()["models"][0]["replicas"]
            return (replica["state"], "can't be used" in replica["reason"]) == ("unreachable", True)

        wait_until("it is left out", is_left_out, 60)
        engines, keys = brain.brain.engines, [("m", "r0"), ("m", "r1")]

        def were_asked() -> bool:
            return all(engines.problem(one) or engines.age(one) is not None for one in keys)

        wait_until("both were asked", were_asked)


async def test_each_answer_on_a_connection_has_its_own_time() -> None:
    """Its timer is that of the answer before, which had more time."""
    comes = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(4):
            await reader.readuntil(b"\r\n\r\n")
            if number == 2:
                await comes.wait()
            writer.write(WHOLE)
        await reader.read()

    async with serving(handle) as (url, client):
        for seconds in (60.0, 0.05):
            async with client.open("GET", url, {}, seconds=seconds) as answer:
                assert await answer.whole() == b"hi"
        asyncio.get_running_loop().call_later(0.3, comes.set)  # long after the timer has rung
        async with client.open("GET", url, {}, seconds=60.0) as answer:
            assert await answer.whole() == b"hi"
        for seconds in (0.1, 0.4):  # the timer of the first rings while the second is waited for
            with pytest.raises(Late, match=f"{seconds:g} s") if seconds > 0.1 else nullcontext():
                async with client.open("GET", url, {}, seconds=seconds) as answer:
                    assert await answer.whole() == b"hi"


async def test_what_came_before_the_timer_rings_is_not_late() -> None:
    """A process that stood still finds both at once: what has come, and that its time is over."""
    loop = asyncio.get_running_loop()
    incoming = Incoming(Connection(loop), loop)
    waiting = loop.create_task(incoming.piece(60.0))
    await asyncio.sleep(0)
    incoming.feed(b"hi")
    incoming.rung(loop.time() + 61)
    assert await waiting == b"hi"
    incoming.finish()
    assert await incoming.piece(60.0) is None


async def test_nothing_comes() -> None:
    async with serving(answering(b"", closes=False)) as (url, client):
        with pytest.raises(Late, match=r"0\.1 s"):
            async with client.open("POST", url, {}, seconds=0.1):
                pass
    begun = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi"
    async with (
        serving(answering(begun, closes=False), between=0.3) as (url, client),
        client.open("GET", url, {}) as answer,
    ):
        assert await answer.piece() == b"hi"
        with pytest.raises(Late):
            await answer.piece()


@pytest.mark.parametrize("begun", [False, True])
async def test_to_leave_closes_the_connection(begun: bool) -> None:  # noqa: FBT001
    asked, closed = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if begun:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi")
        asked.set()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        closed.set()
        writer.close()

    async def leave(client: Client, url: str) -> None:
        async with client.open("GET", url, {}) as answer:
            await answer.piece()
            await answer.piece()

    async with serving(handle) as (url, client):
        task = asyncio.create_task(leave(client, url))
        await asyncio.wait_for(asked.wait(), 60)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 60)


async def test_what_nobody_takes_is_bounded() -> None:
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        except ConnectionError:
            writer.close()

    async with serving(handle) as (url, client), client.open("GET", url, {}) as answer:
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        piece = await answer.piece()
        assert piece is not None
        assert len(piece) <= HELD_BYTES_MAX + (256 << 10)
        await answer.piece()
        async with asyncio.timeout(60):  # it goes on when it is taken
            while sent == before:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)


# Health


def fail(health: Health, now: float, org: str = "acme") -> bool:
    return health.failed(org, now, is_proven=False)


def test_who_keeps_failing_is_ejected_for_longer_each_time() -> None:
    health, now, last = Health(0.0), 100.0, 0.0
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            assert not fail(health, now)
        assert fail(health, now)
        assert health.state(now) is State.EJECTED
        seconds = 0.0
        while health.state(now + seconds) is State.EJECTED:
            seconds += 0.5
        assert max(last, EJECTED_SECONDS) <= seconds <= EJECTED_SECONDS_MAX
        last, now = seconds, now + seconds
        assert health.state(now) is State.SLOW_START
        assert health.has_room(0, now)
        assert not health.has_room(1, now)
        assert health.has_room(7, now + 3.0)
        assert health.state(now + SLOW_START_SECONDS) is State.READY
    assert last == EJECTED_SECONDS_MAX


def test_a_success_in_between_counts() -> None:
    health = Health(0.0)
    for _ in range(20):
        fail(health, 50.0)
        fail(health, 50.0)
        health.succeeded("acme", 50.0)
    assert health.state(50.0) is State.READY


def test_requests_that_no_engine_can_answer_eject_nobody_who_serves_others() -> None:
    health = Health(0.0)
    health.succeeded("globex", 50.0)
    for _ in range(20):
        assert not fail(health, 51.0)
    assert not fail(health, 51.0, org="initech"), "the second one that counts"
    assert fail(health, 51.0, org="globex"), "those who were served fail as well"


def test_failures_of_one_org_count_where_nobody_else_is_served_or_others_could() -> None:
    for is_proven, at in ((True, 51.0), (False, 51.0 + SERVED_SECONDS)):
        health = Health(0.0)
        health.succeeded("globex", 50.0)
        health.succeeded("acme", 50.0)
        failed = [health.failed("acme", at, is_proven=is_proven) for _ in range(FAILURES_MAX)]
        assert failed == [False] * (FAILURES_MAX - 1) + [True]


def test_what_one_org_is_refused_speaks_against_a_replica_as_often_as_what_others_are() -> None:
    now = 1000.0
    fleet = Fleet(lambda: now)
    fleet.follow(told(["http://a", "http://b"]))
    first, second = fleet.of("m")
    fleet.begun("m", "acme")
    assert [fleet.refused(first, "acme") for _ in range(3)] == [True] * 3, "nobody else asks"
    fleet.begun("m", "globex")
    fleet.begun("m", "globex")
    assert [fleet.refused(first, "acme") for _ in range(3)] == [False] * 3
    refused = ["globex", "acme", "acme", "globex", "globex", "initech"]
    assert [fleet.refused(first, org) for org in refused] == [True] * 6, "it serves nobody meanwhile"
    now += 1
    fleet.succeeded(first, "globex")
    fleet.succeeded(first, "acme")
    assert [fleet.refused(first, org) for org in refused] == [True, True, False, True, False, True]
    assert not fleet.refused(second, "acme"), "another replica"
    now += FORGOTTEN_SECONDS
    fleet.begun("m", "acme")
    fleet.begun("m", "globex")
    assert not fleet.refused(second, "globex"), "what acme was refused is long ago"
    now += FORGOTTEN_SECONDS / 2
    fleet.begun("m", "acme")
    fleet.follow(told(["http://a", "http://b"], 2))
    assert not fleet.refused(first, "globex")


def test_what_a_replica_refuses_speaks_against_it_though_most_is_one_orgs() -> None:
    now = 1000.0
    fleet = Fleet(lambda: now)
    fleet.follow(told(["http://a", "http://b"]))
    first, _ = fleet.of("m")
    fleet.begun("m", "globex")
    fleet.begun("m", "acme")
    assert [fleet.refused(first, "acme") for _ in range(5)] == [False] * 5
    assert fleet.refused(first, "globex")
    assert [fleet.refused(first, "acme") for _ in range(5)] == [True] * 5
    now += 1
    fleet.succeeded(first, "acme")
    assert fleet.refused(first, "acme"), "it serves nobody else"
    fleet.succeeded(first, "globex")
    assert not fleet.refused(first, "acme")


def test_who_cannot_be_reached_is_out_until_it_answers() -> None:
    health = Health(0.0)
    assert health.lost("nobody listens")
    assert not health.lost("nobody listens")
    assert health.state(1e9) is State.UNREACHABLE
    health.probed(1e9)
    assert health.state(1e9) is State.SLOW_START


@given(st.lists(st.tuples(st.sampled_from(["fail", "ok", "lose", "probe"]), st.floats(0, 100))))
def test_a_replica_always_returns(happened: list[tuple[str, float]]) -> None:
    health, now = Health(0.0), 0.0
    for what, after in happened:
        now += after
        if what == "fail":
            fail(health, now)
        elif what == "ok":
            health.succeeded("acme", now)
        elif what == "lose":
            health.lost("gone")
        else:
            health.probed(now)
    health.probed(now)
    assert health.has_room(0, now + EJECTED_SECONDS_MAX)
    assert health.state(now + EJECTED_SECONDS_MAX + SLOW_START_SECONDS) is State.READY


@given(st.integers(0, 1000), st.floats(0, 1000))
def test_retries_are_a_share_of_requests(requests: int, seconds: float) -> None:
    budget = RetryBudget(0.0)
    for _ in range(requests):
        budget.request()
    taken = 0
    while budget.take(seconds) and taken < 10_000:
        taken += 1
    assert taken <= 2 * RESERVE + 0.2 * requests + 1
    assert taken >= min(RESERVE, 1)


def test_failures_are_sentences_without_addresses() -> None:
    for kind in (Late, Lost, Unreachable, UpstreamFailed):
        assert kind.reason
