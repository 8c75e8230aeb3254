"""One question over HTTP, for a thread: an answer or a sentence, in time. Also where it drips."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from kvss_agent.http.answers import Budget, Fault, Reply, Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from telemetry.decoder import Malformed
from tests.hostile.agent import Peer
from tests.hostile.answers import EXHAUSTING, OBSERVED, Asked, bomb, head, redirects, says, says_json
from tests.live import wait_until

SECONDS = 60.0
BYTES_MAX = 1 << 20


class Observed(msgspec.Struct):
    generation: int
    observed_generation: int


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as made:
        yield made


def ask(url: str, content: bytes | None = None, seconds: float = SECONDS) -> Reply:
    with contextlib.closing(BlockingExchange(url)) as exchange:
        return exchange.ask("POST", "/v1/x", "token", Budget(seconds, BYTES_MAX), content)


def test_a_question_and_its_answer(peer: Peer) -> None:
    peer.answer = says_json({"generation": 3, "observed_generation": 2, "more": [1]})
    assert ask(f"{peer.url}/behind/", b'{"a":1}').read(Observed) == Observed(3, 2)
    [asked] = peer.asked
    assert (asked.method, asked.path, asked.body) == ("POST", "/behind/v1/x", b'{"a":1}')
    assert asked.headers["authorization"] == "Bearer token"
    assert asked.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("name", [*OBSERVED, *EXHAUSTING])
def test_whatever_it_answers_there_is_a_value_or_a_sentence(peer: Peer, name: str) -> None:
    peer.answer = {**OBSERVED, **EXHAUSTING}[name]
    sentence = "a value"
    try:
        ask(peer.url, seconds=1.0).read(Observed)
    except (Unanswered, Malformed) as error:
        sentence = str(error)
    assert sentence
    assert len(sentence) <= 500


def test_who_reads_a_body_in_drips_is_late() -> None:
    """Each of its reads lets something be sent: no wait is long, all of them together are."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    ends = threading.Event()

    def read() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not ends.wait(0.05) and connection.recv(1 << 14):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(Unanswered) as caught:
        ask(f"http://127.0.0.1:{listener.getsockname()[1]}", bytes(64 << 20), 1.0)
    assert caught.value.fault is Fault.LATE
    ends.set()
    reader.join()
    listener.close()


def test_what_is_too_long_compressed_or_nobody_is_none(peer: Peer) -> None:
    for answer, fault in (
        (says(bytes(BYTES_MAX + 1)), Fault.TOO_LONG),
        (EXHAUSTING["endless text"], Fault.TOO_LONG),
        (bomb(1), Fault.COMPRESSED),
        (OBSERVED["closes midway"], Fault.BROKEN),
        (OBSERVED["garbage"], Fault.BROKEN),
    ):
        peer.answer = answer
        with pytest.raises(Unanswered) as caught:
            ask(peer.url)
        assert caught.value.fault is fault
    announced = head(200, length=5 * BYTES_MAX)
    peer.answer = lambda _asked, connection: connection.sendall(announced)
    with pytest.raises(Unanswered, match="has 5 MiB; at most 1 MiB is read"):
        ask(peer.url)  # by what it announces: of its body nothing is waited for
    peer.answer = says(bytes(BYTES_MAX))
    assert len(ask(peer.url).content) == BYTES_MAX
    for url in ("http://127.0.0.1:9", "http://nobody.invalid", f"http://{'a' * 70}.invalid"):
        with pytest.raises(Unanswered) as caught:
            ask(url)
        assert caught.value.fault is Fault.UNREACHED
    for url in ("ftp://x", "http://", "nothing", "http://x:99999"):
        with pytest.raises(ValueError, match=r".+"):
            BlockingExchange(url)


def test_a_redirection_is_an_answer_and_leads_nowhere(peer: Peer) -> None:
    with Peer() as elsewhere:
        peer.answer = redirects(elsewhere.url)
        assert "Redirections are not followed" in ask(peer.url).refusal
        assert not elsewhere.asked


def test_a_token_that_cannot_be_sent_is_a_sentence(peer: Peer) -> None:
    with contextlib.closing(BlockingExchange(peer.url)) as exchange:
        for token in ("a\r\nX: y", "\N{SNOWMAN}"):
            with pytest.raises(Unanswered, match="Cannot reach it"):
                exchange.ask("GET", "/", token, Budget(SECONDS))
        with pytest.raises(Unanswered, match="Cannot reach it"):
            exchange.ask("GET", "/\r\nX: y", "token", Budget(SECONDS))
    assert not peer.asked


def test_connections_are_kept_until_the_other_side_ends_them() -> None:
    came: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            came.append(self.client_address[1])
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
            self.close_connection = self.path == "/last"

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        with contextlib.closing(BlockingExchange(f"http://127.0.0.1:{server.server_port}")) as exchange:
            for path in ("/", "/", "/last"):
                assert exchange.ask("GET", path, "token", Budget(30.0)).content == b"{}"
            wait_until("its end is here", lambda: not exchange._idle[0].is_quiet())
            for path in ("/", "/"):
                assert exchange.ask("GET", path, "token", Budget(30.0)).content == b"{}"
        assert ask_once(server.server_port) == b"{}"
        server.shutdown()
    assert len(set(came[:3])) == 1
    assert len(set(came[3:5])) == 1
    assert len(set(came)) == 3


def ask_once(port: int) -> bytes:
    """By an exchange that was closed before: it answers, and keeps nothing."""
    exchange = BlockingExchange(f"http://127.0.0.1:{port}")
    exchange.close()
    return exchange.ask("GET", "/", "token", Budget(30.0)).content


def test_interim_answers_are_passed_over(peer: Peer) -> None:
    def answer(_asked: Asked, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + head(200, length=2) + b"{}")

    peer.answer = answer
    assert ask(peer.url).content == b"{}"
