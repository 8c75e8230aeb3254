"""The control API under peers that have not proved who they are: a real agent, real sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kvss_agent.process import AgentProcess, agent
from tests.live import wait_until

MIB = 1 << 20


@pytest.fixture
def one(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "agent") as made:
        yield made


def connected(one: AgentProcess) -> socket.socket:
    url = one.http.base_url
    return socket.create_connection((url.host, url.port or 80), timeout=60)


def resident(one: AgentProcess) -> int:
    return int(psutil.Process(one.process.pid).memory_info().rss)


def send(sock: socket.socket, piece: bytes, most: int) -> int:
    """As long as the agent takes it; how many bytes it took."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most:
            sock.sendall(piece)
            sent += len(piece)
    return sent


def send_slowly(sock: socket.socket, piece: bytes, most: int) -> int:
    """How many pieces went before the agent hung up."""
    for sent in range(most):
        try:
            sock.send(piece)
        except ConnectionError:
            return sent
        time.sleep(0.01)
    return most


def answer(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            said += piece
    return said


def refusals(one: AgentProcess) -> dict[str, float]:
    lines = one.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("kvss_http_refused_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


@pytest.mark.parametrize(
    ("begin", "endless", "bound"),
    [
        (b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 4000 + b"\r\n", "head"),
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 4000, "head"),
        (b"GET / HTTP/1.1\r\n", b"y" * 4000, "head"),
        (b"GET /", b"y" * 4000, "request_line"),
        (
            b"PUT /v1/desired HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
            b"x: " + b"y" * 4000 + b"\r\n",
            "head",
        ),
        (
            b"PUT /v1/desired HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5;",
            b"y" * 4000,
            "head",
        ),
        (b"", b"GET /-/health HTTP/1.1\r\n\r\n", "pipeline"),
    ],
    ids=["headers", "value", "name", "line", "trailers", "chunk", "requests"],
)
def test_what_has_no_end_is_refused_early(
    one: AgentProcess, begin: bytes, endless: bytes, bound: str
) -> None:
    before = resident(one)
    with connected(one) as sock:
        sock.sendall(begin)
        assert send(sock, endless, 64 * MIB) < 16 * MIB, "the agent goes on taking it"
    assert resident(one) - before < 32 * MIB
    assert refusals(one)[bound] == 1


def test_a_head_that_is_too_long_is_told_so(one: AgentProcess) -> None:
    with connected(one) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n")
        said = answer(sock)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert b"The headers of this request are too many or too long." in said


@pytest.mark.slow
def test_nothing_of_a_body_is_read_before_its_sender_is_known(one: AgentProcess) -> None:
    before = resident(one)
    head = (
        b"PUT /v1/desired HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
    )
    with connected(one) as sock:
        sock.sendall(head % (b"wrong" * 10, 1 << 40))
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")
        # What comes after the answer is thrown away, for a while.
        assert send_slowly(sock, b"x" * 65536, 6000) < 6000, "it is read for ever"
    assert resident(one) - before < 32 * MIB


@pytest.mark.slow
def test_half_requests_and_drips_end_after_a_while(one: AgentProcess) -> None:
    """Drips are no progress."""
    authorization = b"authorization: " + one.http.headers["authorization"].encode()
    halves = [
        b"",
        b"GET /-/hea",
        b"GET /v1/observed HTTP/1.1\r\nhost: x\r\n",
        b"PUT /v1/desired HTTP/1.1\r\n%s\r\ncontent-length: 9\r\n\r\n{" % authorization,
    ]
    dripping = [
        b"GET / HTTP/1.1\r\n",
        b"PUT /v1/desired HTTP/1.1\r\n%s\r\ncontent-length: 9999\r\n\r\n" % authorization,
    ]
    with contextlib.ExitStack() as stack:
        socks = {stack.enter_context(connected(one)): half for half in halves}
        drips = {stack.enter_context(connected(one)): head for head in dripping}
        for sock, begin in (*socks.items(), *drips.items()):
            sock.sendall(begin)

        def are_ended() -> bool:
            for sock in list(drips):
                try:
                    sock.sendall(b"x")
                except OSError:
                    del drips[sock]
            return not drips

        wait_until("nobody waits for drips", are_ended)
        answers = [answer(sock) for sock in socks]  # which ends when the agent closes
    assert all(said.startswith(b"HTTP/1.1 408 ") for said in answers), answers
    assert refusals(one) == {"head_seconds": 3 + 1, "body_seconds": 1 + 1}


def test_who_knows_the_token_gets_in_while_strangers_hold_all_of_their_places(
    one: AgentProcess,
) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connected(one)) for _ in range(600)]
        for _ in range(20):
            with connected(one) as sock:  # a new connection each time
                head = b"GET /v1/observed HTTP/1.1\r\nconnection: close\r\nauthorization: %s\r\n\r\n"
                sock.sendall(head % one.http.headers["authorization"].encode())
                assert answer(sock).startswith(b"HTTP/1.1 200 ")
        # One for which there was no room in the backlog is accepted later.
        wait_until("all the others had to make way", lambda: refusals(one)["displaced"] >= 600 - 128)
        process = psutil.Process(one.process.pid)
        wait_until("few of them are kept", lambda: len(process.net_connections()) < 200)
        del crowd
