"""One connection to a replica: HTTP/1.1, one request at a time."""

from __future__ import annotations

import asyncio
from typing import Final, cast

import httptools

from kvss_agent.http.client.failures import Late, Lost, UpstreamFailed

HEAD_BYTES_MAX: Final = 64 << 10  # also of trailers, and of whatever else is not the body
HELD_BYTES_MAX: Final = 256 << 10  # of an answer that nobody has taken yet; then no more is read
_NO_BODY: Final = frozenset({204, 304})


class Incoming:
    """An answer as it comes."""

    __slots__ = (
        "_connection",
        "_error",
        "_held",
        "_is_done",
        "_loop",
        "_pieces",
        "_seconds",
        "_until",
        "_waiter",
        "has_begun",
        "has_bytes",
        "has_head",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}  # by name in lower case; the last of each
        self.has_head = False
        self.has_bytes = False  # anything at all has come
        self.has_begun = False  # its reader has found a beginning of what was asked for
        self._connection = connection
        self._loop = loop
        self._pieces: list[bytes] = []
        self._held = 0
        self._is_done = False
        self._error: UpstreamFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._seconds = self._until = 0.0

    # For whoever waits for it

    async def begin(self, seconds: float) -> None:
        """Wait for the head. Raises UpstreamFailed."""
        while not self.has_head:
            if self._error:
                raise self._error
            await self._wait(seconds)

    async def piece(self, seconds: float) -> bytes | None:
        """All that has come, or the next that comes; None at the end. Raises UpstreamFailed."""
        while not self._pieces:
            if self._error:
                raise self._error
            if self._is_done:
                return None
            await self._wait(seconds)
        pieces = self._pieces
        self._pieces = []
        if self._held > HELD_BYTES_MAX:
            self._connection.resume()
        self._held = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self, seconds: float) -> None:
        """Until something comes."""
        loop = self._loop
        self._seconds, self._until = seconds, loop.time() + seconds
        self._connection.ring_by(self._until)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # For the connection

    def rung(self, now: float) -> None:
        """Fail it if its reader has waited for long enough, and in vain: what came while the process
        stood still is read just before."""
        if self._waiter is None or self._waiter.done():
            return
        if now < self._until:
            self._connection.ring_by(self._until)
        else:
            self.fail(Late(f"Nothing came from the replica for {self._seconds:g} s."))

    def head(self, status: int) -> None:
        self.status = status
        self.has_head = True
        self._wake()

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        before, self._held = self._held, self._held + len(piece)
        if before <= HELD_BYTES_MAX < self._held:
            self._connection.pause()
        self._wake()

    def finish(self) -> None:
        self._is_done = True
        self._wake()

    def fail(self, error: UpstreamFailed) -> None:
        if not self._is_done and not self._error:
            self._error = error
            self._wake()

    def forget(self) -> None:
        """Nobody waits any more."""
        self._pieces.clear()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """Kept for several requests, one after the other."""

    __slots__ = (
        "_head_bytes",
        "_incoming",
        "_is_paused",
        "_loop",
        "_parser",
        "_timer",
        "_transport",
        "_until_closed",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._incoming: Incoming | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._head_bytes = 0
        self._until_closed = False

    def send(self, head: bytes, body: bytes) -> Incoming:
        """Send a request."""
        self._incoming = incoming = Incoming(self, self._loop)
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._until_closed = True
        if self._transport is None or self._transport.is_closing():
            incoming.fail(Lost("The connection to the replica broke."))
            return incoming
        if len(body) < 16 << 10:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return incoming

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_free(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        if self._incoming is not None or transport is None or transport.is_closing():
            return False
        return transport.get_write_buffer_size() == 0  # it may have answered before it had all

    def abort(self) -> None:
        """Close it at once: the other side notices."""
        incoming, self._incoming = self._incoming, None
        if incoming:
            incoming.forget()
        if self._transport:
            self._transport.abort()

    def give_up(self, why: str) -> None:
        """Fail the request, unless its answer has begun. It is late, not lost: who has lost a kept
        connection sends the request again to the same replica."""
        if self._incoming and not self._incoming.has_begun:
            self._fail(Late(why))

    def ring_by(self, until: float) -> None:
        """Ask whether the answer is late then, or before. One timer serves all waits for all answers: it
        is only looked at when it rings."""
        if self._timer is None or self._timer.when() > until:
            self._end_timer()
            self._timer = self._loop.call_at(until, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._incoming:
            self._incoming.rung(self._loop.time())

    def _end_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def pause(self) -> None:
        if self._transport and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    # Of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        incoming = self._incoming
        if incoming is None or self._parser is None:  # it says something without being asked
            self.abort()
            return
        incoming.has_bytes = True
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(Lost("What the replica sent is no HTTP."))
            return
        if self._incoming is incoming and self._head_bytes > HEAD_BYTES_MAX:
            self._fail(Lost("The head of the replica's answer is too long."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            return
        if exc is None and incoming.has_head and self._until_closed:
            incoming.finish()
        else:
            incoming.fail(Lost("The connection to the replica broke."))

    def _fail(self, error: UpstreamFailed) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming:
            incoming.fail(error)
        if self._transport:
            self._transport.abort()

    # Of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._until_closed = False
        if self._incoming:
            self._incoming.headers[name] = value

    def on_headers_complete(self) -> None:
        incoming, parser = self._incoming, self._parser
        if incoming and parser and (status := parser.get_status_code()) >= 200:
            self._until_closed = self._until_closed and status not in _NO_BODY
            incoming.head(status)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._incoming:
            self._incoming.feed(body)

    def on_message_complete(self) -> None:
        incoming, parser = self._incoming, self._parser
        if incoming is None or parser is None or not incoming.has_head:
            return  # of what is between request and answer, such as 100 Continue
        self._incoming = None
        self.resume()
        if not parser.should_keep_alive() and self._transport:
            self._transport.close()
        incoming.finish()
