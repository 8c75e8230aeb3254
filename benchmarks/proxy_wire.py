"""Both ends of `benchmarks.proxy`: an engine that answers at once, and clients that send at once.

Nothing but the standard library, sockets and epoll, so that what is measured is between them.

    python -m benchmarks.proxy_wire engine PORT CHUNKS INTERVAL_SECONDS
    python -m benchmarks.proxy_wire load '{"port": 8080, "connections": 16, "seconds": 1.0, …}'

An engine answers `/v1/completions` whole, and as a stream when the body has `"stream": true`: each event
carries when it was sent, by a clock that all processes of a machine share.
"""

from __future__ import annotations

import heapq
import json
import random
import re
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

RECEIVE_BYTES: Final = 1 << 18
HEAD_END: Final = b"\r\n\r\n"
CHUNKED_END: Final = b"0\r\n\r\n"
STREAM: Final = re.compile(rb'"stream": ?true')
LOOKED_INTO_BYTES: Final = 8192  # of a body
SENT_AT: Final = b'"sent_at": '
LATE_SECONDS: Final = 0.005  # until a full socket is tried again
TEXT: Final = "a" * 400


def _json(told: object) -> bytes:
    body = json.dumps(told)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


ANSWER: Final = _json(
    {
        "id": "x",
        "object": "text_completion",
        "choices": [{"index": 0, "text": TEXT, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 100, "total_tokens": 200},
    }
)
# What routers ask of an engine: health, models, what it is.
ABOUT: Final = _json(
    {
        "object": "list",
        "data": [{"id": "m", "object": "model", "max_model_len": 1 << 20}],
        "model_path": "m",
        "served_model_name": "m",
        "is_generation": True,
        "version": "1",
    }
)
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT: Final = (
    b'data: {"sent_at": %.9f, "id": "cmpl-0123456789", "object": "text_completion", '
    b'"choices": [{"index": 0, "text": " word", "finish_reason": null}]}\n\n'
)
LAST: Final = b"e\r\ndata: [DONE]\n\n\r\n" + CHUNKED_END


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


@dataclass(slots=True)
class _Asking:
    """A connection of an engine: what is read of a request."""

    sock: socket.socket
    head: bytearray = field(default_factory=bytearray)
    left: int = -1  # of the body; -1 before it, -2 while it comes in chunks
    tail: bytes = b""
    is_stream: bool = False


class Engine:
    """`chunks` events in each stream, `interval` seconds apart."""

    def __init__(self, port: int, chunks: int, interval: float) -> None:
        self._chunks, self._interval = chunks, interval
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._open: dict[int, _Asking] = {}
        self._due: list[tuple[float, int, int, socket.socket]] = []  # time, number, events left
        self._count = 0

    def run(self) -> None:
        while True:
            wait = max(0.0, self._due[0][0] - time.perf_counter()) if self._due else None
            for descriptor, _ in self._epoll.poll(wait):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif asking := self._open.get(descriptor):
                    self._read(asking)
            self._send_due()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open[sock.fileno()] = _Asking(sock)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _read(self, asking: _Asking) -> None:
        try:
            data = asking.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            descriptor = asking.sock.fileno()
            self._epoll.unregister(descriptor)
            del self._open[descriptor]
            asking.sock.close()
            return
        if asking.left == -1:
            asking.head += data
            if (end := asking.head.find(HEAD_END)) < 0:
                return
            head, data = bytes(asking.head[:end]).lower(), bytes(asking.head[end + 4 :])
            asking.head.clear()
            asking.left = _content_length(head)
            asking.is_stream = False
            if not head.startswith(b"post"):
                asking.left = -1
                asking.sock.send(ABOUT)
                return
        asking.is_stream = asking.is_stream or bool(STREAM.search(data, 0, LOOKED_INTO_BYTES))
        if asking.left >= 0:
            asking.left -= len(data)
            is_whole = asking.left == 0
        else:
            asking.tail = (asking.tail + data)[-len(CHUNKED_END) :]
            is_whole = asking.tail == CHUNKED_END
        if is_whole:
            asking.left, asking.tail = -1, b""
            self._answer(asking)

    def _answer(self, asking: _Asking) -> None:
        if not asking.is_stream:
            asking.sock.send(ANSWER)
            return
        asking.sock.send(STREAM_HEAD)
        self._count += 1
        first = time.perf_counter() + self._interval * ((self._count * 0.618) % 1)
        heapq.heappush(self._due, (first, self._count, self._chunks, asking.sock))

    def _send_due(self) -> None:
        while self._due and self._due[0][0] <= time.perf_counter():
            at, number, left, sock = heapq.heappop(self._due)
            try:
                if left:
                    sock.send(_chunk(EVENT % time.perf_counter()))
                    heapq.heappush(self._due, (at + self._interval, number, left - 1, sock))
                else:
                    sock.send(LAST)
            except BlockingIOError:
                heapq.heappush(self._due, (at + LATE_SECONDS, number, left, sock))
            except OSError:
                continue  # the client has left


def _content_length(head: bytes) -> int:
    start = head.find(b"content-length:")
    if start < 0:
        return -2
    end = head.find(b"\r\n", start)
    return int(head[start + 15 : end if end >= 0 else None])


@dataclass(frozen=True)
class Load:
    """`rate`: requests a second, at random times; 0: each connection sends again when it has its answer.
    `body`: of the requests, where `@@@@@@@@` becomes a number. `bodies`: different ones, by turns."""

    port: int
    connections: int
    seconds: float
    bodies: list[str]
    rate: float = 0.0
    key: str = "sk-bench"
    path: str = "/v1/completions"
    seed: int = 1


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    began: float = 0.0
    unsent: memoryview | None = None
    got: bytes = b""
    length: int = -1  # of the answer with its head; -1: not known, -2: chunked


class Clients:
    """Plays a load, and measures it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._epoll = select.epoll()
        self._clients: dict[int, _Client] = {}
        self._idle: list[_Client] = []
        self._took: list[float] = []
        self._delays: list[float] = []
        self._count = 0
        self._rng = random.Random(load.seed)
        self._bodies = [body.encode() for body in load.bodies]
        for _ in range(load.connections):
            sock = socket.create_connection(("127.0.0.1", load.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            client = _Client(sock)
            self._clients[sock.fileno()] = client
            self._idle.append(client)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        ends = began + self._load.seconds
        due = began
        rate = self._load.rate
        while (now := time.perf_counter()) < ends:
            wait = min(0.5, ends - now)
            if rate:
                while due <= now and self._idle:
                    self._begin(self._idle.pop(), due)  # late ones too: who waits for us waits
                    due += self._rng.expovariate(rate)
                if self._idle:
                    wait = min(wait, max(0.0, due - now))
            else:
                while self._idle:
                    self._begin(self._idle.pop(), now)
            # epoll waits for whole milliseconds: requests would be sent late, and several at once.
            select.select((self._epoll,), (), (), wait)
            for descriptor, event in self._epoll.poll(0):
                client = self._clients[descriptor]
                if event & select.EPOLLOUT and client.unsent is not None:
                    self._push(client, client.unsent)
                if event & select.EPOLLIN:
                    self._read(client)
        took = time.perf_counter() - began
        return {
            "rps": len(self._took) / took,
            "requests": len(self._took),
            "chunks": len(self._delays),
            "seconds": took,
            "took": sorted(self._took)[:: max(1, len(self._took) // 20_000)],
            "delays": sorted(self._delays)[:: max(1, len(self._delays) // 20_000)],
        }

    def _begin(self, client: _Client, at: float) -> None:
        self._count += 1
        body = self._bodies[self._count % len(self._bodies)]
        body = body.replace(b"@@@@@@@@", b"%08d" % (self._count % 10**8), 1)
        head = (
            f"POST {self._load.path} HTTP/1.1\r\nhost: engine\r\n"
            f"authorization: Bearer {self._load.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client.began, client.got, client.length = at, b"", -1
        self._push(client, memoryview(head.encode() + body))

    def _push(self, client: _Client, unsent: memoryview) -> None:
        try:
            sent = client.sock.send(unsent)
        except BlockingIOError:
            sent = 0
        if sent < len(unsent):
            client.unsent = unsent[sent:]
            self._epoll.modify(client.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        elif client.unsent is not None:
            client.unsent = None
            self._epoll.modify(client.sock.fileno(), select.EPOLLIN)

    def _read(self, client: _Client) -> None:
        data = client.sock.recv(RECEIVE_BYTES)
        now = time.perf_counter()
        if not data:
            raise SystemExit("A connection was closed.")
        at = data.find(SENT_AT)
        while at >= 0:
            self._delays.append(now - float(data[at + len(SENT_AT) : data.find(b",", at)]))
            at = data.find(SENT_AT, at + 1)
        if client.length == -2:
            client.got = (client.got + data)[-len(CHUNKED_END) :]
        else:
            client.got += data
        if client.length == -1:
            end = client.got.find(HEAD_END)
            if end < 0:
                return
            head = client.got[:end].lower()
            if b" 200 " not in head[:20]:
                raise SystemExit(f"It answers: {client.got[:500]!r}")
            length = _content_length(head)
            client.length = length if length < 0 else end + 4 + length
        is_chunked = client.length == -2
        if client.got.endswith(CHUNKED_END) if is_chunked else len(client.got) >= client.length:
            self._took.append(now - client.began)
            self._idle.append(client)


def main() -> None:
    match sys.argv[1:]:
        case ["engine", port, chunks, interval]:
            Engine(int(port), int(chunks), float(interval)).run()
        case ["load"]:
            print(json.dumps(Clients(Load(**json.loads(sys.stdin.read()))).run()))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
