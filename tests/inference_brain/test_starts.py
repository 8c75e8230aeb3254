"""Requests that came at once start one by one."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from inference_brain.api import requests
from inference_brain.api.app import LONG_BYTES, Api
from inference_brain.api.requests import Tokenize
from inference_brain.api.starts import Starts
from inference_brain.brain import Brain, Options
from tests.inference_brain.brains import KEY, RunningBrain, told
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until


def request(size: int) -> bytes:
    """With a body of so many bytes."""
    return post(b"/tokenize", b'{"prompt": "%b"}' % (b"a" * (size - 14)))


def post(path: bytes, body: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
    return head % (path, KEY.encode(), len(body)) + body


async def started(starts: Starts, name: str, order: list[str], org: str = "acme") -> None:
    await starts.turn(org)
    order.append(name)
    asyncio.get_running_loop().call_soon(order.append, f"after {name}")


def test_what_follows_a_start_goes_before_the_next_start() -> None:
    order: list[str] = []

    async def run() -> None:
        starts = Starts()
        await asyncio.gather(*(started(starts, name, order) for name in "abc"))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert order == ["a", "after a", "b", "after b", "c", "after c"]


def test_one_that_comes_while_others_wait_does_not_overtake_them() -> None:
    order: list[str] = []

    async def run() -> None:
        starts = Starts()
        first = asyncio.gather(*(started(starts, name, order) for name in "abc"))
        await asyncio.sleep(0)
        assert order == ["a"]
        await asyncio.gather(first, started(starts, "d", order))

    asyncio.run(run())
    assert [one for one in order if len(one) == 1] == ["a", "b", "c", "d"]


def test_an_org_that_sends_many_at_once_waits_for_itself() -> None:
    order: list[str] = []

    async def run() -> None:
        starts = Starts()
        many = (started(starts, name, order) for name in "abcd")
        few = (started(starts, name, order, "globex") for name in "xy")
        await asyncio.gather(*many, *few)

    asyncio.run(run())
    assert [one for one in order if len(one) == 1] == ["a", "b", "x", "c", "y", "d"]


def test_one_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    order: list[str] = []

    async def run() -> None:
        starts = Starts()
        tasks = [asyncio.create_task(started(starts, name, order)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await started(starts, "d", order)

    asyncio.run(run())
    assert [one for one in order if len(one) == 1] == ["a", "c", "d"]


@contextmanager
def stopped(brain: RunningBrain) -> Iterator[None]:
    """Its loop reads nothing meanwhile."""
    is_stopped, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        is_stopped.set()
        goes_on.wait(60)

    brain._loop.call_soon_threadsafe(stop)
    assert is_stopped.wait(60)
    try:
        yield
    finally:
        goes_on.set()


@contextmanager
def connected(brain: RunningBrain, count: int) -> Iterator[list[socket.socket]]:
    """So many clients, each of which has been served."""
    with ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(("127.0.0.1", brain.port), 60))
            for _ in range(count)
        ]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b" 200 " in client.recv(1000)
        yield clients


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Bodies that are decoded, and the rounds of the event loop in between."""
    order: list[str] = []
    decode = requests.tokenize

    def decoded(raw: bytes) -> Tokenize:
        order.append("decoded")
        asyncio.get_running_loop().call_soon(order.append, "others")
        return decode(raw)

    monkeypatch.setattr(requests, "tokenize", decoded)
    return order


@pytest.mark.parametrize("size", [LONG_BYTES, LONG_BYTES + 1])
def test_long_bodies_that_are_read_at_once_are_decoded_in_rounds_of_their_own(
    size: int, order: list[str]
) -> None:
    with RunningBrain(told([])) as brain, connected(brain, 4) as clients:
        with stopped(brain):
            for client in clients:
                client.sendall(request(size))
        for client in clients:
            assert client.recv(1000)
    if size > LONG_BYTES:
        assert order == ["decoded", "others"] * len(clients)
    else:
        assert order == ["decoded"] * len(clients) + ["others"] * len(clients)


def test_all_listeners_of_a_brain_share_their_turns(order: list[str]) -> None:
    async def asked(api: Api | None) -> None:
        assert api
        authorization = (b"authorization", b"Bearer " + KEY.encode())
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": [authorization]}
        body = b'{"prompt": "%b"}' % (b"a" * LONG_BYTES)

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": body}

        async def send(_message: object) -> None:
            pass

        await api(scope, receive, send)

    async def run() -> None:
        brain = Brain("b", None, options=Options(trusted_org="acme"))
        brain.set_desired(told([]))
        apis = [brain.api, brain.trusted_api, brain._gateway_api]
        await asyncio.gather(*map(asked, apis))

    asyncio.run(run())
    assert order == ["decoded", "others"] * 3


def test_one_whose_client_leaves_while_it_waits_is_not_started() -> None:
    """Nobody would tell it later, and a replica would answer it to its end."""
    body = b'{"model": "m", "prompt": "%b"}' % (b"a" * LONG_BYTES)
    with FakeEngine() as engine, RunningBrain(told([engine.url])) as brain:
        with connected(brain, 12) as clients:
            with stopped(brain):
                for client in clients:
                    client.sendall(post(b"/v1/completions", body))
                clients[-1].close()
            for client in clients[:-1]:
                assert b" 200 " in client.recv(1000)
        wait_until("all memory is given back", lambda: not brain.brain.api.room.used)
        assert len(engine.asked) == len(clients) - 1
