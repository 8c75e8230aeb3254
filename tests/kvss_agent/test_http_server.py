"""What the HTTP server does with peers that are slow on purpose; in this process, with short bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from mmap import mmap
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvss_agent import memory
from kvss_agent.http import pace
from kvss_agent.http.api import guarded, large_body_of
from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.pace import Pace
from kvss_agent.http.server import HttpBounds, HttpPolicy, QuietServer
from kvss_agent.http.websocket import BoundedWebSocket
from kvss_agent.limits.admission import Places
from kvss_agent.process import daemon
from tests.kvss_agent.authority import Authority
from tests.live import wait_until

# As long as a busy machine may need. What a test is about is shorter.
BOUNDS = HttpBounds(
    head_seconds=60, stall_seconds=60, linger_seconds=60, idle_seconds=60, tls_seconds=60
)
LARGE = b"x" * (64 << 20)


async def large(_request: Request) -> Response:
    return Response(LARGE)


async def never(_request: Request) -> Response:
    await asyncio.Event().wait()
    return Response()


async def waits_then_reads(request: Request) -> Response:
    """As a driver does whose org has to wait for its turn."""
    await asyncio.sleep(3)
    return Response(str(len(await request.body())))


def named(request: Request) -> str | None:
    return request.headers.get("authorization")


async def told(_request: Request) -> Response:
    return Response("told")


async def how(request: Request) -> Response:
    client = request.client
    return Response(f"{request.url.scheme} from {client.host if client else 'nowhere'}")


async def digest(request: Request) -> Response:
    return Response(sha256(await request.body()).hexdigest())


async def large_body(request: Request) -> Response:
    """What came of it, and how often there was a piece to copy."""
    place = memoryview(bytearray(int(request.headers["content-length"])))
    request.scope["extensions"][EXTENSION].receive_into(request.scope, place)
    at = pieces = 0
    async for piece in request.stream():
        place[at : at + len(piece)] = piece
        at, pieces = at + len(piece), pieces + bool(piece)
    return JSONResponse({"digest": sha256(place).hexdigest(), "pieces": pieces})


async def kept_of_body(request: Request) -> Response:
    async with large_body_of(request, 1 << 30) as body:
        return Response(sha256(body).hexdigest())


async def reads_a_part(request: Request) -> Response:
    """How many bytes of the body wait here at most, while nobody asks for more and others ask for the
    time of the server."""
    connection = request.scope["extensions"][EXTENSION]
    most = came = 0
    while came < 4 << 20:  # more than an owner has in advance
        connection.policy.pace.asks("globex", time.monotonic())
        came += len((await request.receive())["body"])
    for _ in range(20):
        connection.policy.pace.asks("globex", time.monotonic())
        await asyncio.sleep(0.05)
        most = max(most, len(connection.protocol.cycle.body))
    return Response(str(most))


APPLICATION = Starlette(
    routes=[
        Route("/large", large),
        Route("/never", never),
        Route("/large-body", large_body, methods=["PUT"]),
        Route("/kept-of-body", kept_of_body, methods=["PUT"]),
        Route("/how", how),
        Route("/digest", digest, methods=["PUT"]),
        Route("/waits", waits_then_reads, methods=["PUT"]),
        Route("/told", guarded(told, named, {})),
        Route("/reads-a-part", guarded(reads_a_part, named, {}), methods=["PUT"]),
        Route("/named-body", guarded(kept_of_body, named, {}), methods=["PUT"]),
    ]
)


class Server:
    """In a thread, with an event loop of its own."""

    def __init__(self, policy: HttpPolicy, tls: ssl.SSLContext | None = None) -> None:
        self.policy = policy
        self._listener = daemon.listen(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with daemon.http_server(APPLICATION, self._listener, self.policy, self._tls):
            await self._stop.wait()

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def refused(self, bound: str) -> bool:
        return self.policy.refused[bound] == 1

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join()


class Noted(Pace):
    """A pace that notes who takes what."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.bytes: Counter[str] = Counter()

    def begins(self, owner: str, now: float) -> float:
        self.begun.append(owner)
        return super().begins(owner, now)

    def moved(self, owner: str, size: int, now: float) -> float:
        self.bytes[owner] += size
        return super().moved(owner, size, now)


Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def made(
            places: Places | None = None, tls: ssl.SSLContext | None = None, **bounds: float
        ) -> Server:
            server = Server(HttpPolicy(replace(BOUNDS, **bounds), places), tls)  # type: ignore[arg-type]
            stack.callback(server.close)
            return server

        yield made


def answer(sock: socket.socket) -> bytes:
    said = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            said += piece
    return bytes(said)


def test_who_does_not_read_an_answer_is_hung_up_on(start: Start) -> None:
    server = start(stall_seconds=1)
    with server.connected() as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        wait_until("it is given up", lambda: server.refused("read_seconds"))
        assert len(answer(sock)) < len(LARGE)


@pytest.mark.slow
def test_who_reads_an_answer_slowly_but_reads_gets_all_of_it(start: Start) -> None:
    server = start(stall_seconds=3)
    with server.connected() as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nconnection: close\r\n\r\n")
        got = 0
        for _ in range(35):  # longer than anybody may do nothing
            got += len(sock.recv(65536))
            time.sleep(0.1)
        assert not server.policy.refused
        assert got + len(answer(sock)) > len(LARGE)


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_told_so(start: Start) -> None:
    server = start(request_seconds=1)
    with server.connected() as sock:
        sock.sendall(b"GET /never HTTP/1.1\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 503 ")
    assert server.refused("request_seconds")


def test_an_idle_connection_is_closed_and_counts_as_no_fault(start: Start) -> None:
    server = start(idle_seconds=0)
    with server.connected() as sock:
        sock.sendall(b"GET /how HTTP/1.1\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 200 ")  # and nothing more: it has been closed
    assert not server.policy.refused


class WithWebSockets(Server):
    async def _serve(self) -> None:
        config = uvicorn.Config(
            APPLICATION, http="httptools", ws=BoundedWebSocket, log_config=None, proxy_headers=False
        )
        server = QuietServer(config, self.policy)
        task = asyncio.create_task(server.serve(sockets=[self._listener]))
        await self._stop.wait()
        server.should_exit = True
        await task


def test_an_upgrade_behind_the_last_answer_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with (
        contextlib.closing(WithWebSockets(HttpPolicy(BOUNDS))) as server,
        server.connected() as sock,
    ):
        sock.sendall(b"PUT /how HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 405 ")
        sock.sendall(b"0\r\n\r\nGET /how HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        wait_until("it has ended", lambda: not server.policy.admission._where)
    assert not [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]


SHORT = 64 << 10


@pytest.mark.parametrize("behind", [b"", b"GET /told HTTP/1.1\r\nauthorization: acme\r\n\r\n"])
@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"content-length: %d" % (SHORT + 1), bytes(SHORT + 1)),
        (b"transfer-encoding: chunked", b"1\r\nx\r\n0\r\n\r\n"),
        (b"content-length: 4\r\nexpect: 100-continue", b"abcd"),
        (b"content-length: 4\r\nconnection: close", b"abcd"),
    ],
)
def test_an_answer_before_its_body_is_the_last_one_of_its_connection(
    start: Start, head: bytes, rest: bytes, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read by who still sends, and the connection ends with the body."""
    server = start(linger_seconds=10_000)
    server.policy.pace = noted = Noted()
    with server.connected() as sock:
        sock.sendall(b"PUT /how HTTP/1.1\r\n%s\r\n\r\n" % head)
        said = answer(sock)  # and nothing more
        assert said.startswith(b"HTTP/1.1 405 ")
        assert said.count(b"connection: close") == 1
        assert server.policy.admission._where, "the rest of the body may come"
        sock.sendall(rest + behind)
        wait_until("it has ended", lambda: not server.policy.admission._where)
    assert not server.policy.refused
    assert not noted._asked_at, "the request behind it is not carried out"
    assert "Invalid HTTP request" not in caplog.text


def test_an_answer_before_a_short_body_keeps_the_connection(start: Start) -> None:
    """With TLS another one costs a handshake. What comes of the body is thrown away."""
    with start(linger_seconds=60).connected() as sock:
        for _ in range(2):
            sock.sendall(b"PUT /how HTTP/1.1\r\ncontent-length: %d\r\n\r\nab" % SHORT)
            said = b""
            while not said.endswith(b"Method Not Allowed"):
                said += sock.recv(65536)
            assert b"connection: close" not in said
            sock.sendall(bytes(SHORT - 2) + b"GET /how HTTP/1.1\r\n\r\n")
            assert answers(sock, 1) == ["http from 127.0.0.1"]


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize("length", [b"content-length: 21", b"transfer-encoding: chunked"])
def test_a_body_is_not_taken_for_a_request_where_an_upgrade_is_asked_for(
    start: Start, protocol: bytes, length: bytes
) -> None:
    with start(idle_seconds=1).connected() as sock:
        sock.sendall(
            b"PUT /how HTTP/1.1\r\nconnection: upgrade\r\nupgrade: %s\r\n%s\r\n\r\n" % (protocol, length)
        )
        assert answer(sock).startswith(b"HTTP/1.1 400 ")


def test_a_rest_that_does_not_come_ends_the_connection(start: Start) -> None:
    server = start(linger_seconds=0)
    with server.connected() as sock:
        sock.sendall(b"PUT /how HTTP/1.1\r\ncontent-length: 4\r\n\r\nab")
        assert answer(sock).startswith(b"HTTP/1.1 405 ")
    assert server.refused("body_seconds")


def test_an_answer_after_its_body_ends_no_connection(start: Start) -> None:
    with start().connected() as sock:
        for _ in range(2):
            sock.sendall(b"PUT /digest HTTP/1.1\r\ncontent-length: 4\r\n\r\nabcd")
            assert answers(sock, 1) == [sha256(b"abcd").hexdigest()]


@pytest.mark.parametrize(
    ("head", "rest", "bound"),
    [(b"content-length: 9", b"", "body_seconds"), (b"transfer-encoding: chunked", b"?", "malformed")],
)
def test_what_is_wrong_with_the_body_of_an_answered_request_is_no_second_answer(
    start: Start, head: bytes, rest: bytes, bound: str
) -> None:
    """Its sender would take it for the answer to the next request."""
    server = start(linger_seconds=0 if bound == "body_seconds" else 60)
    with server.connected() as sock:
        sock.sendall(b"PUT /how HTTP/1.1\r\n%s\r\n\r\n" % head)
        said = sock.recv(65536)
        sock.sendall(rest)
        said += answer(sock)
        wait_until("it has ended", lambda: not server.policy.admission._where)
    assert said.startswith(b"HTTP/1.1 405 ")
    assert said.count(b"HTTP/1.1") == 1
    assert server.refused(bound)


@pytest.mark.parametrize("before", [b"", b"GET /how HTTP/1.1\r\n\r\n"])
def test_an_address_that_is_none_is_answered(start: Start, before: bytes) -> None:
    with start().connected() as sock:
        sock.sendall(before)
        said = b""
        while before and not said.endswith(b"from 127.0.0.1"):
            said += sock.recv(65536)
        sock.sendall(b"GET http://a:99999/ HTTP/1.1\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("sizes", [(9,), (5, 4, 3), (100_000, 5, 3)])
def test_a_body_of_pieces_is_put_together(start: Start, sizes: tuple[int, ...]) -> None:
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces)
    with start().connected() as sock:
        sock.sendall(b"PUT /digest HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        sock.sendall(b"0\r\n\r\n")
        assert answers(sock, 1) == [sha256(b"".join(pieces)).hexdigest()]


@pytest.mark.slow
def test_a_body_waits_as_long_as_we_do_not_read_it(start: Start) -> None:
    """Its sender can do nothing about that, and is not blamed."""
    server = start(stall_seconds=2)
    body = b"x" * (8 << 20)
    with server.connected() as sock:
        head = b"PUT /waits HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        assert answer(sock).endswith(b"%d" % len(body))
    assert not server.policy.refused


def put(path: str, length: int) -> bytes:
    return f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def answers(connection: socket.socket, count: int, status: int = 200) -> list[str]:
    """The bodies of so many answers."""
    stream, found = connection.makefile("rb"), []
    for _ in range(count):
        assert b" %d " % status in stream.readline()
        heads = dict(line.split(b": ") for line in iter(stream.readline, b"\r\n"))
        found.append(stream.read(int(heads[b"content-length"])).decode())
    return found


@pytest.mark.parametrize("with_head", [0, 1, 70_000])
def test_a_large_body_goes_straight_to_its_place(start: Start, with_head: int) -> None:
    """Wherever the network has cut it."""
    body = random.Random(with_head).randbytes(3 << 20)
    with start().connected() as connection:
        connection.sendall(put("/large-body", len(body)) + body[:with_head])
        time.sleep(0.1)  # this much comes by itself
        connection.sendall(body[with_head:])
        [answer] = answers(connection, 1)
    assert json.loads(answer) == {"digest": sha256(body).hexdigest(), "pieces": 0}


def test_bodies_of_requests_behind_each_other_are_not_mixed_up(start: Start) -> None:
    """The first has come whole when its place is named; what comes then is another's."""
    first, second = random.Random(1).randbytes(100), random.Random(2).randbytes(1 << 20)
    with start().connected() as connection:
        told = put("/large-body", len(first)) + first + put("/large-body", len(second)) + second[:50]
        connection.sendall(told)
        time.sleep(0.1)
        connection.sendall(second[50:])
        found = [json.loads(answer)["digest"] for answer in answers(connection, 2)]
    assert found == [sha256(first).hexdigest(), sha256(second).hexdigest()]


def test_memory_of_a_body_that_stops_coming_is_given_back_beside_the_loop(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes milliseconds, in which nobody else would be served. Over TLS a connection outlives its
    request by as long as its peer likes."""
    given_back: list[threading.Thread] = []

    class Memory(mmap):
        def __del__(self) -> None:
            given_back.append(threading.current_thread())

    monkeypatch.setattr(memory, "mmap", Memory)
    certificate, key, authorities = Authority.make(tmp_path).issue("agent")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = start(tls=tls, stall_seconds=1)
    context = ssl.create_default_context(cafile=str(authorities))
    with context.wrap_socket(server.connected(), server_hostname="agent") as connection:
        connection.sendall(put("/kept-of-body", 4 << 20) + bytes(1 << 20))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        time.sleep(0.5)  # its request has ended
    wait_until("it is given back", lambda: given_back)
    assert given_back != [server.thread]


def test_bodies_that_nobody_wants_are_read_slowly(start: Start) -> None:
    """All together: a stranger's body costs as much to read and decrypt as anybody's."""
    server, size = start(), pace.UNWANTED_BYTES_PER_SECOND // 8
    body, began = bytes(size), time.monotonic()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connected()) for _ in range(3)]

        def send(connection: socket.socket) -> list[str]:
            head = b"GET /told HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            connection.sendall(head % size)
            refused = answers(connection, 1, status=401)
            connection.sendall(body)
            return refused

        with ThreadPoolExecutor(3) as threads:
            assert len(list(threads.map(send, connections))) == 3
        wait_until("all has been read", lambda: not server.policy.admission._where)
    pieces = 3 * (256 << 10)  # that may have come before the first pause
    assert time.monotonic() - began >= (3 * size - pieces) / pace.UNWANTED_BYTES_PER_SECOND


def test_requests_and_bodies_take_the_time_of_whoever_has_shown_a_credential(start: Start) -> None:
    server, size = start(), 1 << 20
    server.policy.pace = noted = Noted()
    with server.connected() as connection:
        for owner in ("acme", "globex", "acme"):
            head = f"PUT /named-body HTTP/1.1\r\nhost: x\r\nauthorization: {owner}\r\n"
            connection.sendall(f"{head}content-length: {size}\r\n\r\n".encode() + bytes(size))
            assert answers(connection, 1) == [sha256(bytes(size)).hexdigest()]
    assert noted.begun == ["acme", "globex", "acme"]
    with_heads = 2 * (256 << 10)  # what one read brings may have come before anybody knew whose it is
    assert noted.bytes["acme"] >= 2 * size - with_heads
    assert noted.bytes["globex"] >= size - with_heads
    assert noted.bytes.total() == 3 * size


def test_a_body_that_nobody_asks_for_is_not_read_at_the_pace_of_its_owner_either(start: Start) -> None:
    server, size = start(), 32 << 20
    with server.connected() as connection, ThreadPoolExecutor(1) as threads:
        head = f"PUT /reads-a-part HTTP/1.1\r\nhost: x\r\nauthorization: acme\r\ncontent-length: {size}"
        threads.submit(connection.sendall, f"{head}\r\n\r\n".encode() + bytes(size))
        [most] = answers(connection, 1)
        connection.shutdown(socket.SHUT_RDWR)
    assert int(most) <= 1 << 20


def test_a_large_body_that_breaks_off_is_none_and_the_next_is_whole(start: Start) -> None:
    server = start()
    body = random.Random(3).randbytes(4 << 20)
    for sent in (0, 10, 1 << 20):
        with server.connected() as connection:
            connection.sendall(put("/kept-of-body", len(body)) + body[:sent])
    with server.connected() as connection:
        for _ in range(3):
            connection.sendall(put("/kept-of-body", len(body)) + body)
            assert answers(connection, 1) == [sha256(body).hexdigest()]


def test_handshakes_of_tls_that_are_never_done_hold_strangers_places_only(
    start: Start, tmp_path: Path
) -> None:
    certificate, key, authorities = Authority.make(tmp_path).issue("agent")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = start(Places(strangers_max=4, strangers_per_origin=4), tls, tls_seconds=4)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(server.connected())
        wait_until("six have made way", lambda: server.policy.admission.displaced == 6)
        context = ssl.create_default_context(cafile=str(authorities))
        with context.wrap_socket(server.connected(), server_hostname="agent") as sock:
            sock.sendall(b"GET /told HTTP/1.1\r\nconnection: close\r\nauthorization: me\r\n\r\n")
            assert answer(sock).endswith(b"told")
        wait_until("the others are given up", lambda: server.policy.admission.strangers == 0)


def test_headers_do_not_say_how_a_request_came(start: Start, tmp_path: Path) -> None:
    """Over TLS a token is not enough: who could say that it came without would need no certificate."""
    certificate, key, authorities = Authority.make(tmp_path).issue("agent")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server, context = start(tls=tls), ssl.create_default_context(cafile=str(authorities))
    with context.wrap_socket(server.connected(), server_hostname="agent") as sock:
        sock.sendall(
            b"GET http://agent/how HTTP/1.1\r\nhost: agent\r\nconnection: close\r\n"
            b"x-forwarded-proto: http\r\nx-forwarded-for: 10.0.0.1\r\nforwarded: proto=http\r\n\r\n"
        )
        assert answer(sock).endswith(b"https from 127.0.0.1")


def test_connections_of_one_owner_leave_places_to_others(start: Start) -> None:
    server = start(Places(proven_max=4, reserved_per_owner=2))
    server.policy.admission._owners = lambda: ("one", "two")
    request = b"GET /told HTTP/1.1\r\nauthorization: %s\r\n\r\n"
    with contextlib.ExitStack() as stack:
        said = []
        for owner in (b"one", b"one", b"one", b"two", b"two"):
            sock = stack.enter_context(server.connected())
            sock.sendall(request % owner)
            said.append(sock.recv(65536).split()[1])
    assert said == [b"200", b"200", b"503", b"200", b"200"]


def test_a_server_ends_as_soon_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, too. It does not look again and again whether it is to end."""
    monkeypatch.setattr("kvss_agent.http.server.HEADERS_SECONDS", 3600.0)
    config = uvicorn.Config(
        Starlette(), http="httptools", ws="none", log_config=None, lifespan="off", proxy_headers=False
    )
    with contextlib.closing(daemon.listen(("127.0.0.1", 0))) as listener:
        server = QuietServer(config, HttpPolicy())
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        wait_until("it serves", lambda: server.started)
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        server.should_exit = True  # its loop is closed by now
