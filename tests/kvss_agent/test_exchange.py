"""One question over HTTP, whatever the other side does with it: an answer or a sentence, in time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator

import msgspec
import pytest

from kvss_agent.http.answers import Budget, Fault, Reply, Unanswered
from kvss_agent.http.exchange import Exchange, run
from telemetry.decoder import Malformed
from tests.hostile.agent import Peer
from tests.hostile.answers import (
    EXHAUSTING,
    OBSERVED,
    Answer,
    Asked,
    bomb,
    garbage,
    head,
    redirects,
    says,
    says_json,
)

SECONDS = 1.0  # of what is late on purpose
PLENTY = Budget(60.0)  # of all else
LATE_SECONDS_MAX = 30.0  # for the machine, which others keep busy; without a deadline it is for ever


class Observed(msgspec.Struct):
    generation: int
    observed_generation: int


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as made:
        yield made


def ask(url: str, budget: Budget | None = None, content: bytes | None = None) -> Reply:
    async def asking() -> Reply:
        async with Exchange(ssl.create_default_context()) as exchange:
            method = "GET" if content is None else "PUT"
            return await exchange.ask(method, url, "token", budget or PLENTY, content)

    return run(asking())


def announces(length: int) -> Answer:
    """And sends nothing of it."""

    def answer(_asked: Asked, connection: socket.socket) -> None:
        connection.sendall(head(200, length=length))

    return answer


def fault_of(peer: Peer, answer: Answer, budget: Budget | None = None) -> Unanswered:
    peer.answer = answer
    with pytest.raises(Unanswered) as caught:
        ask(peer.url, budget)
    return caught.value


def test_a_question_and_its_answer(peer: Peer) -> None:
    peer.answer = says_json({"generation": 3, "observed_generation": 2, "more": [1]})
    reply = ask(f"{peer.url}/v1/observed", content=b'{"a":1}')
    assert reply.read(Observed) == Observed(3, 2)
    [asked] = peer.asked
    assert (asked.method, asked.path, asked.body) == ("PUT", "/v1/observed", b'{"a":1}')
    assert asked.headers["authorization"] == "Bearer token"
    assert asked.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("name", [*OBSERVED, *EXHAUSTING])
def test_whatever_it_answers_there_is_a_value_or_a_sentence_in_time(peer: Peer, name: str) -> None:
    peer.answer = {**OBSERVED, **EXHAUSTING}[name]
    began = time.monotonic()
    sentence = ""
    try:
        ask(peer.url, Budget(SECONDS, 1 << 20)).read(Observed)
    except (Unanswered, Malformed) as error:
        sentence = str(error)
    assert time.monotonic() - began < SECONDS + LATE_SECONDS_MAX
    assert sentence.isprintable()
    assert len(sentence) <= 500


@pytest.mark.parametrize("name", ["drips", "drips headers", "says nothing"])
def test_a_deadline_is_for_all_of_it(peer: Peer, name: str) -> None:
    error = fault_of(peer, EXHAUSTING[name], Budget(SECONDS))
    assert (error.fault, str(error)) == (Fault.LATE, "It has not answered within 1 s.")


def test_a_body_is_received_up_to_its_limit(peer: Peer) -> None:
    error = fault_of(peer, EXHAUSTING["endless text"], Budget(60.0, 1 << 20))
    assert (error.fault, str(error)) == (
        Fault.TOO_LONG,
        "Its answer is longer than what is read of it: at most 1 MiB is read.",
    )
    error = fault_of(peer, announces(64 << 20), Budget(60.0, 1 << 20))
    assert (error.fault, str(error)) == (
        Fault.TOO_LONG,
        "Its answer has 64 MiB; at most 1 MiB is read.",
    )
    peer.answer = says(b"x" * 1000)
    assert len(ask(peer.url, Budget(60.0, 1000)).content) == 1000
    assert fault_of(peer, says(b"x" * 1001), Budget(60.0, 1000)).fault is Fault.TOO_LONG


def test_headers_have_an_end(peer: Peer) -> None:
    assert fault_of(peer, EXHAUSTING["endless headers"], PLENTY).fault is Fault.BROKEN


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x-unheard-of", "gzip, gzip"])
def test_what_is_compressed_is_refused(peer: Peer, encoding: str) -> None:
    error = fault_of(peer, says(b"{}", 200, f"Content-Encoding: {encoding}"))
    assert error.fault is Fault.COMPRESSED
    assert "compressed" in str(error)


def test_a_bomb_costs_nothing(peer: Peer) -> None:
    peer.answer = bomb(256)
    tracemalloc.start()
    try:
        with pytest.raises(Unanswered):
            ask(peer.url)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_redirection_is_not_followed(peer: Peer) -> None:
    for target in (f"{peer.url}/again", "http://[", "http://a..b/", "nowhere"):
        peer.asked.clear()
        peer.answer = redirects(target)
        assert ask(peer.url).refusal == "It answered 307. Redirections are not followed."
        assert len(peer.asked) == 1


def test_a_cookie_is_not_kept(peer: Peer) -> None:
    async def twice() -> None:
        async with Exchange(ssl.create_default_context()) as exchange:
            for _ in range(2):
                await exchange.ask("GET", peer.url, "token", PLENTY)

    peer.answer = says(b"{}", 200, "Set-Cookie: a=b; Path=/")
    run(twice())
    assert [asked.headers.get("cookie") for asked in peer.asked] == [None, None]


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b:80",
        f"http://{'x' * 70}.example:80",
        "http://[::1",
        "http://",
        "ftp://a",
        "http://127.0.0.1:65536",
        "https://[::1]:99999",
        "http://127.0.0.1:-1",
        "http://127.0.0.1:0",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(Unanswered) as caught:
        ask(url)
    assert caught.value.fault is Fault.UNREACHED


def test_a_name_that_no_certificate_has(peer: Peer) -> None:
    async def asking() -> Reply:
        async with Exchange(ssl.create_default_context()) as exchange:
            url = peer.url.replace("http:", "https:")
            return await exchange.ask("GET", url, "t", PLENTY, server_name=".of.nobody")

    with pytest.raises(Unanswered) as caught:
        run(asking())
    assert caught.value.fault is Fault.UNREACHED


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Unanswered, match=r"^It does not answer: "):
        ask(f"http://127.0.0.1:{port}")


def test_it_does_not_read_what_it_is_told() -> None:
    """A document that does not fit into the sockets' buffers."""
    deaf = socket.create_server(("127.0.0.1", 0), backlog=1)
    with deaf, pytest.raises(Unanswered) as caught:
        ask(f"http://127.0.0.1:{deaf.getsockname()[1]}", Budget(SECONDS), b" " * (32 << 20))
    assert caught.value.fault is Fault.LATE


def test_garbage_is_broken(peer: Peer) -> None:
    assert fault_of(peer, garbage).fault is Fault.BROKEN


def early_hints_for_ever(_asked: Asked, connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 100)


def test_informational_answers_without_an_end(peer: Peer) -> None:
    assert fault_of(peer, early_hints_for_ever, Budget(SECONDS)).fault is Fault.LATE


def test_a_refusal_is_a_short_line(peer: Peer) -> None:
    peer.answer = says_json({"detail": "no\x00\n" * 1000}, 422)
    refusal = ask(peer.url).refusal
    assert refusal.startswith("It answered 422. no  no")
    assert refusal.isprintable()
    assert len(refusal) == 500
    for body in (b"<html>", b'{"detail": 7}', b"[" * 5000, b"\xff", b""):
        peer.answer = says(body, 503)
        assert ask(peer.url).refusal == "It answered 503."


def test_a_name_that_is_being_looked_up_holds_nobody() -> None:
    """The system's look-up can't be cancelled: `asyncio.run` would wait for its thread."""
    looked_up, began = threading.Event(), time.monotonic()

    async def asking() -> str:
        loop = asyncio.get_running_loop()
        look_up = loop.run_in_executor(None, looked_up.wait)
        try:
            await asyncio.wait_for(look_up, 0.1)
        except TimeoutError:
            return "late"
        return "in time"

    try:
        assert run(asking()) == "late"
        assert time.monotonic() - began < LATE_SECONDS_MAX
    finally:
        looked_up.set()


def test_a_head_without_a_body_is_not_an_answer(peer: Peer) -> None:
    def only_head(_asked: Asked, connection: socket.socket) -> None:
        connection.sendall(head(200, length=10))

    assert fault_of(peer, only_head).fault is Fault.BROKEN
