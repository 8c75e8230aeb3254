"""An evil engine, or anybody who reaches a port: requests and frames that never end, floods, garbage.

It has no credential. Everything here is said before anybody could know who says it.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self

import httpx

from kvss_agent.data_plane import handshake, wire

LINK_BYTES_PER_SECOND: Final = 125_000_000  # of an attacker's machine: a gigabit
HALF_REQUEST: Final = b"POST /v1/load HTTP/1.1\r\nHost: x\r\nContent-Len"
GARBAGE_BYTES: Final = 4096


def unverified() -> ssl.SSLContext:
    """Who attacks believes everybody, and has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


UNVERIFIED: Final = (
    unverified()
)  # made once: to load the system's authorities takes longer than a request


def connect(address: str) -> socket.socket:
    """`tcp:HOST:PORT`, `HOST:PORT`, `tls:HOST:PORT` or `unix:PATH`."""
    if address.startswith("tls:"):
        plain = connect(address.removeprefix("tls:"))
        try:
            return UNVERIFIED.wrap_socket(plain)
        except OSError:
            plain.close()
            raise
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        try:
            connection.connect(address.removeprefix("unix:"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


class Link:
    """What an attacker reaches others by. On one machine it would be as fast as memory."""

    def __init__(self, bytes_per_second: int = LINK_BYTES_PER_SECOND) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until so many bytes may follow."""
        with self._lock:
            now = time.monotonic()
            begins = max(now, self._free_at)
            self._free_at = begins + count / self._rate
        time.sleep(begins - now)


LINK: Final = Link()  # of this process


@dataclass
class Flood:
    """Some threads that do one thing again and again until the block ends. `done` counts it."""

    deed: Callable[[], object]
    threads: int = 4
    pause_seconds: float = 0.0
    done: int = 0
    failed: int = 0
    _ends: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._running = [threading.Thread(target=self._run, daemon=True) for _ in range(self.threads)]
        for thread in self._running:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._running:
            thread.join(40)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self.deed()
                self.done += 1
            except (OSError, ValueError, httpx.HTTPError):
                self.failed += 1
                self._ends.wait(0.05)
            if self.pause_seconds:
                self._ends.wait(self.pause_seconds)


class Hoard:
    """Connections that are opened, told the beginning of something, and kept."""

    def __init__(self, address: str, count: int, beginning: bytes = b"") -> None:
        self.kept: list[socket.socket] = []
        for _ in range(count):
            try:
                connection = connect(address)
            except OSError:
                continue
            self.kept.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(beginning)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.kept:
            connection.close()

    def still_open(self) -> int:
        """Those that the other side has not ended."""
        count = 0
        for connection in self.kept:
            connection.setblocking(False)
            try:
                count += connection.recv(1 << 16) != b""
            except BlockingIOError:
                count += 1
            except OSError:
                continue
        return count


def endless_headers(address: str, megabytes: int) -> int:
    """Headers of one request, up to so many megabytes. How many bytes were taken."""
    sent = 0
    with contextlib.suppress(OSError), connect(address) as connection:
        connection.sendall(b"GET /-/health HTTP/1.1\r\nHost: x\r\n")
        line = b"X-%d: " + b"y" * 4000 + b"\r\n"
        while sent < megabytes << 20:
            piece = b"".join(line % number for number in range(16))
            LINK.take(len(piece))
            connection.sendall(piece)
            sent += len(piece)
    return sent


def one_long_header(address: str, megabytes: int) -> int:
    """One header line without an end. How many bytes were taken."""
    sent = 0
    with contextlib.suppress(OSError), connect(address) as connection:
        connection.sendall(b"GET /-/health HTTP/1.1\r\nHost: x\r\nX: ")
        piece = b"y" * (1 << 16)
        while sent < megabytes << 20:
            LINK.take(len(piece))
            connection.sendall(piece)
            sent += len(piece)
    return sent


def body_without_token(address: str, path: str, megabytes: int, method: str = "POST") -> int:
    """A body that nobody has asked for, without a credential. How many bytes were taken."""
    sent, length = 0, megabytes << 20
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with contextlib.suppress(OSError), connect(address) as connection:
        connection.sendall(head.encode())
        piece = b" " * (1 << 16)
        while sent < length:
            LINK.take(len(piece))
            connection.sendall(piece)
            sent += len(piece)
    return sent


def garbage(address: str, seed: int, *, http: bool = False) -> bytes:
    """Random bytes, and what was answered."""
    told = random.Random(seed).randbytes(GARBAGE_BYTES)
    if http:
        told = b"GET /" + told.replace(b"\n", b"") + b" HTTP/1.1\r\n" + told
    with contextlib.suppress(OSError), connect(address) as connection:
        connection.sendall(told)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1 << 16)
    return b""


def half_frame(seed: int) -> bytes:
    """The beginning of a frame that was one: sometimes all but its last byte."""
    chosen = random.Random(seed)
    said = handshake.hello(
        chosen.choice(list(wire.Role)), "job-good", "job-good.full.0", versions=(1, 2), software="evil"
    )
    whole = said.encode()
    return whole[: chosen.randrange(1, len(whole))]


def guess_secret(address: str, driver: str, shard: str, secret: bytes) -> bool:
    """Whether a driver of that name with that secret is welcome. One try."""
    from kvss_agent.client import Credentials, Lost
    from kvss_agent.client import connect as to_shard

    try:
        client = to_shard(address, shard, Credentials(driver, secret, stall_seconds=5))
    except (Lost, OSError, ValueError):
        return False
    client.close()
    return True


def seconds_until_closed(connection: socket.socket, seconds_max: float) -> float | None:
    """How long the other side kept it; None if longer than so many seconds."""
    began = time.monotonic()
    connection.settimeout(seconds_max)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return None
    except OSError:
        pass
    return time.monotonic() - began
