"""Evil answers to an HTTP request, as raw bytes on a socket.

An `Answer` gets what was asked and a socket, and may do anything with it. Each of them ends by itself
when the other side closes, or after `SECONDS_MAX`.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

SECONDS_MAX: Final = 600.0
PIECE: Final = b" " * (1 << 16)
DRIP_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


Answer = Callable[[Asked, socket.socket], None]


def head(status: int, *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", "Connection: close", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def says(body: bytes, status: int = 200, *headers: str) -> Answer:
    """A complete answer with this body."""

    def answer(_asked: Asked, connection: socket.socket) -> None:
        connection.sendall(head(status, *headers, length=len(body)) + body)

    return answer


def says_json(value: object, status: int = 200) -> Answer:
    return says(json.dumps(value).encode(), status)


def sends_forever(pieces: Callable[[], Iterator[bytes]], pause_seconds: float = 0.0) -> Answer:
    """A body without an end, one piece after another."""

    def answer(_asked: Asked, connection: socket.socket) -> None:
        ends = time.monotonic() + SECONDS_MAX
        connection.sendall(head(200))
        for piece in pieces():
            if time.monotonic() > ends:
                return
            connection.sendall(piece)
            if pause_seconds:
                time.sleep(pause_seconds)

    return answer


def _endless() -> Iterator[bytes]:
    yield b'{"generation": 1, "x": "'
    while True:
        yield PIECE


def _endless_list() -> Iterator[bytes]:
    yield b'{"generation": 1, "observed_generation": 1, "shards": ['
    while True:
        yield b'{"name": "x", "reason": "y"},' * 1000


def _drip() -> Iterator[bytes]:
    yield b'{"generation": 1,'
    while True:
        yield b" "


def drips_head(_asked: Asked, connection: socket.socket) -> None:
    """Headers without an end, one byte at a time."""
    ends = time.monotonic() + SECONDS_MAX
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while time.monotonic() < ends:
        connection.sendall(b"a")
        time.sleep(DRIP_SECONDS)


def endless_head(_asked: Asked, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for number in range(10_000_000):
        connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 1000))


def holds(_asked: Asked, connection: socket.socket) -> None:
    """Say nothing, and keep the connection until the other side gives up."""
    connection.settimeout(SECONDS_MAX)
    while connection.recv(1 << 16):
        pass


def closes_at_once(_asked: Asked, connection: socket.socket) -> None:
    del connection


def closes_midway(_asked: Asked, connection: socket.socket) -> None:
    connection.sendall(head(200, length=1000) + b'{"generation": 1, "observed_gen')


def garbage(_asked: Asked, connection: socket.socket) -> None:
    connection.sendall(random.Random(7).randbytes(4096))


def bomb(mebibytes: int = 512) -> Answer:
    """A small compressed body that becomes a large one."""
    packed = gzip.compress(b" " * (mebibytes << 20), compresslevel=9)
    return says(packed, 200, "Content-Encoding: gzip")


def redirects(to: str) -> Answer:
    return says(b"{}", 307, f"Location: {to}")


# What an agent or a driver says of itself, each with something in it that it must not have.
OBSERVED: Final[dict[str, Answer]] = {
    "shards are texts": says_json({"generation": 1, "observed_generation": 1, "shards": ["x"]}),
    "shards are a number": says_json({"generation": 1, "observed_generation": 1, "shards": 7}),
    "generation is infinite": says(b'{"generation": 1e999, "observed_generation": 1e999}'),
    "generation is a list": says_json({"generation": [1], "observed_generation": {}}),
    "generation has 4,000 digits": says(b'{"generation": %s, "observed_generation": 1}' % (b"9" * 4000)),
    "generation is beyond 64 bits": says_json({"generation": 1 << 64, "observed_generation": 1 << 64}),
    "generation is negative": says_json({"generation": -1, "observed_generation": -1}),
    "deep": says(b'{"generation": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep and open": says(b"[" * 1_000_000),
    "NUL in a reason": says_json(
        {"generation": 1, "observed_generation": 0, "shards": [{"name": "x", "reason": "\x00"}]}
    ),
    "half a surrogate": says(
        b'{"generation": 1, "observed_generation": 0, "shards": [{"name": "x", "reason": "\\ud800"}]}'
    ),
    "not UTF-8": says(b'{"generation": 1, "observed_generation": "\xff\xfe"}'),
    "null": says(b"null"),
    "empty": says(b""),
    "garbage": garbage,
    "closes at once": closes_at_once,
    "closes midway": closes_midway,
    "404": says_json({"detail": "no such thing"}, 404),
    "409 with a number": says_json({"detail": 7}, 409),
    "500": says(b"<html>", 500),
    "status 99999": says(b"{}", 99999),
    "redirects": redirects("http://127.0.0.1:1/"),
}
# Those that take time or memory while they last.
EXHAUSTING: Final[dict[str, Answer]] = {
    "endless text": sends_forever(_endless),
    "endless list": sends_forever(_endless_list),
    "endless headers": endless_head,
    "drips": sends_forever(_drip, DRIP_SECONDS),
    "drips headers": drips_head,
    "says nothing": holds,
}
