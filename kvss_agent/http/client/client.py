"""HTTP to engines. One client for all of them; connections are kept and used again.

    async with client.open("POST", url, headers, body) as answer:
        while piece := await answer.piece():
            ...

To leave the context aborts the connection of an answer that is not at its end, at once: so an engine
stops computing for a client that has left. What is received and not taken yet is bounded. HTTP/1.1,
written here: it costs a quarter of what ready-made clients do (docs/adr/0087-brain-server.md).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

from kvss_agent.http.client.connection import Connection, Incoming
from kvss_agent.http.client.failures import Late, Lost, TooLong, Unreachable

IDLE_SECONDS: Final = 55.0  # that a connection is kept; engines close theirs after 5 to 75
IDLE_MAX: Final = 512  # connections to one replica that are kept
WHOLE_BYTES_MAX: Final = 64 << 20  # of an answer that is not a stream
PLACES_KEPT: Final = 8192
UNUSABLE: Final = "The replica's address can't be used: its host or its port is none."


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: until there is a connection, until an answer begins, between two pieces of it."""

    connect: float = 2.0
    first: float = 600.0
    between: float = 60.0


class Answer:
    """An answer whose head has come."""

    __slots__ = ("_incoming", "_timeouts", "first_until", "status")

    def __init__(self, incoming: Incoming, timeouts: Timeouts, sent_at: float) -> None:
        self.status = incoming.status
        self.first_until = sent_at + timeouts.first  # by the event loop's clock: it has to have begun
        self._incoming = incoming
        self._timeouts = timeouts

    def header(self, name: str) -> str:
        """Empty if there is none."""
        return self._incoming.headers.get(name.lower().encode(), b"").decode("latin-1")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names in lower case. Of those that come several times, the last one."""
        return list(self._incoming.headers.items())

    def begun(self) -> None:
        """What has come is a beginning of it, not only a head or comments: it is given up no more."""
        self._incoming.has_begun = True

    async def piece(self, *, is_first: bool = False) -> bytes | None:
        """What has come since the last piece, or the next that comes; None at the end. Raises
        UpstreamFailed."""
        timeouts = self._timeouts
        return await self._incoming.piece(timeouts.first if is_first else timeouts.between)

    async def whole(
        self, most: int = WHOLE_BYTES_MAX, take: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """All of it. Raises UpstreamFailed; TooLong where it is longer than allowed; and whatever `take`
        raises, which is asked for memory for each piece."""
        pieces: list[bytes] = []
        size = 0
        while (piece := await self.piece(is_first=not pieces)) is not None:
            take(len(piece))
            pieces.append(piece)
            if (size := size + len(piece)) > most:
                raise TooLong(f"The replica's answer has more than {most} bytes.")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@cache
def _system() -> ssl.SSLContext:
    return ssl.create_default_context()


def _trusting(authorities: Path) -> ssl.SSLContext:
    """Raises OSError."""
    trusted = ssl.create_default_context()
    trusted.load_verify_locations(authorities)
    return trusted


class Client:
    """Connections to all replicas of a brain. Used from one event loop."""

    def __init__(
        self,
        timeouts: Timeouts | None = None,
        authorities: Path | None = None,
        unix: Path | None = None,
    ) -> None:
        """`authorities`: PEM, whom to believe beside those of the system. `unix`: a socket to which all
        requests go, whatever host they name. Raises OSError."""
        self.timeouts = timeouts or Timeouts()
        self.unix = unix
        self.tls = _trusting(authorities) if authorities else _system()
        self._places: dict[str, _Place] = {}

    async def close(self) -> None:
        for place in self._places.values():
            place.close()

    def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        seconds: float | None = None,
    ) -> Sent:
        """A request; entering it gives the answer once its head has come, within so many seconds. Raises
        Unreachable for an address that can't be used."""
        origin, target = _split(url)
        try:
            place = self._places.get(origin) or self._add_place(origin)
            first = f"{method} {target} HTTP/1.1\r\nhost: {place.host_header}\r\n".encode("latin-1")
        except ValueError:
            raise Unreachable(UNUSABLE) from None
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body:
            lines.append(f"content-length: {len(body)}\r\n")
        lines.append("\r\n")
        head = first + "".join(lines).encode("latin-1")
        return Sent(place, head, body, self.timeouts.first if seconds is None else seconds)

    def _add_place(self, origin: str) -> _Place:
        """Raises ValueError for none."""
        place = _Place(origin, self)
        if len(self._places) >= PLACES_KEPT:
            self._places.pop(next(iter(self._places))).close()
        self._places[origin] = place
        return place


class Sent:
    """A request that is sent when it is entered. Raises UpstreamFailed."""

    __slots__ = ("_body", "_connection", "_head", "_place", "_seconds")

    def __init__(self, place: _Place, head: bytes, body: bytes, seconds: float) -> None:
        self._place = place
        self._head = head
        self._body = body
        self._seconds = seconds
        self._connection: Connection | None = None

    def give_up(self, why: str) -> None:
        """Fail it, unless its answer has begun."""
        if self._connection:
            self._connection.give_up(why)

    async def __aenter__(self) -> Answer:
        sent_at, may_be_kept = asyncio.get_running_loop().time(), True
        while True:
            connection = self._place.kept() if may_be_kept else None
            is_kept = connection is not None
            if connection is None:
                connection = await self._place.connect()
            self._connection = connection
            incoming = connection.send(self._head, self._body)
            try:
                await incoming.begin(self._seconds)
            except Lost:
                self._leave(connection)
                if is_kept and not incoming.has_bytes:
                    may_be_kept = False
                    continue  # the other side was closing it, and has not seen the request
                raise
            except BaseException:
                self._leave(connection)
                raise
            return Answer(incoming, self._place.client.timeouts, sent_at)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection:
            self._leave(self._connection)

    def _leave(self, connection: Connection) -> None:
        """Keep the connection if its answer has come to the end, otherwise abort it."""
        self._connection = None
        if connection.is_free:
            self._place.keep(connection)
        else:
            connection.abort()


class _Place:
    """Where a replica is, and its idle connections, the last used first."""

    def __init__(self, origin: str, client: Client) -> None:
        parts = urlsplit(origin)
        self.client = client
        self._host = parts.hostname or ""
        self._tls = client.tls if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self.host_header = parts.netloc.rpartition("@")[2]
        self._idle: deque[tuple[float, Connection]] = deque()

    def kept(self) -> Connection | None:
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle and self._idle[0][0] < oldest:
            self._idle.popleft()[1].abort()
        while self._idle:
            connection = self._idle.pop()[1]
            if connection.is_open:
                return connection
        return None

    def keep(self, connection: Connection) -> None:
        self._idle.append((time.monotonic(), connection))
        if len(self._idle) > IDLE_MAX:
            self._idle.popleft()[1].abort()

    async def connect(self) -> Connection:
        """Raises Unreachable, Late."""
        loop = asyncio.get_running_loop()
        seconds = self.client.timeouts.connect
        try:
            async with asyncio.timeout(seconds):
                if self.client.unix:
                    _, connection = await loop.create_unix_connection(
                        lambda: Connection(loop), str(self.client.unix)
                    )
                else:
                    _, connection = await loop.create_connection(
                        lambda: Connection(loop),
                        self._host,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
        except TimeoutError:
            # Not as sure as a refusal: it may be us who are late.
            raise Late(f"No connection to the replica within {seconds:g} s.") from None
        except ssl.SSLError as error:
            raise Unreachable(f"The replica's certificate was refused: {error.reason}.") from None
        except (OSError, ValueError) as error:  # ValueError: of what is no name
            raise Unreachable(f"No connection to the replica: {_why(error)}.") from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].abort()


def _why(error: Exception) -> str:
    """In the system's words; those of asyncio have the address in them."""
    if isinstance(error, socket.gaierror | ValueError):
        return "its name is not known"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else "refused"


def _split(url: str) -> tuple[str, str]:
    """Origin and target of an address that a document has been checked to have."""
    at = url.find("/", url.index("://") + 3)
    return (url, "/") if at < 0 else (url[:at], url[at:])
