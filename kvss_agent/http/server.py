"""The HTTP server of every process of ours: uvicorn, with bounds that it does not have itself.

uvicorn reads heads of any size, waits for ever for the rest of a request, and lets anybody have any
number of connections. Here each connection is admitted before a byte of it is read, also of TLS
(`admission`); line, head, trailers and pipelining are bounded while they are parsed; the head, the body
and whoever reads the answer have to make progress; and no byte of a body is read before the application
asks for it. What hits a bound is refused with a sentence where one can still be sent, and counted by
cause in `HttpPolicy.refused`.

The application finds its connection as `scope["extensions"]["tidegate.connection"]`, and says with
`prove` whose it is once it has checked a credential. A long body can go straight to where it is wanted,
see `receive_into`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import ssl
import sys
import termios
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.pace import Pace
from kvss_agent.limits.admission import Admission, Places
from kvss_agent.limits.origins import origin_of_socket

log = logging.getLogger(__name__)

# So much is decrypted before other connections have their turn; asyncio's own four times as much takes
# milliseconds.
sslproto.SSLProtocol.max_size = 64 << 10
CHECK_SECONDS: Final = 0.5  # between two looks at whether connections make progress
HEADERS_SECONDS: Final = 1.0  # for which answers bear the same time
WAIT_SECONDS: Final = 0.1  # after the system had no descriptor for a connection
_JOINED_BYTES_MAX: Final = 16 << 10  # of a body that is copied, to be sent together with its head
_WITH_BODY: Final = frozenset({b"content-length", b"transfer-encoding"})
_SHORT_BYTES_MAX: Final = 64 << 10  # of a body whose rest is read, so that the connection is kept


class Bound(StrEnum):
    """Why a connection was ended that its peer did not end."""

    LINE = "request_line"  # longer than allowed
    HEAD = "head"  # too many headers, or too many bytes of them; trailers count too
    PIPELINE = "pipeline"  # too many requests at once on one connection
    MALFORMED = "malformed"
    HEAD_SECONDS = "head_seconds"  # the head did not come in time
    BODY_SECONDS = "body_seconds"  # the body came too slowly, or not at all
    READ_SECONDS = "read_seconds"  # the answer was not read
    REQUEST_SECONDS = "request_seconds"  # all of it took too long
    TLS = "tls"  # its handshake failed, or was not done in time
    DISPLACED = "displaced"  # a stranger that made way for another one


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Of one connection."""

    line_bytes_max: int = 16 << 10
    head_bytes_max: int = 32 << 10
    headers_max: int = 100
    pipelined_max: int = 8
    head_seconds: float = 10.0  # from the first byte, or from connecting, to the last header
    body_bytes_per_second_min: int = 16 << 10
    read_bytes_per_second_min: int = 1 << 10
    stall_seconds: float = 10.0  # over which those two are measured
    request_seconds: float = 900.0  # from the last header to the end of the answer
    linger_seconds: float = 2.0  # after an answer that came before its body: for the rest of that
    idle_seconds: int = 5  # between two requests
    tls_seconds: float = 5.0


class HttpPolicy:
    """Bounds and places of one server, and what has hit them."""

    def __init__(
        self,
        bounds: HttpBounds | None = None,
        places: Places | None = None,
        owners: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.bounds = bounds or HttpBounds()
        self.admission: Admission[HttpConnection] = Admission(places, owners)
        self.refused: Counter[str] = Counter()  # by `Bound`
        self.pace = Pace()


class HttpConnection:
    """One connection, from being accepted to its end, whatever protocol it speaks meanwhile."""

    def __init__(self, policy: HttpPolicy, origin: str) -> None:
        self.policy = policy
        self.origin = origin
        self.transport: asyncio.Transport | None = None
        self.protocol: BoundedProtocol | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.owner = ""  # who has proved to be its peer
        self.on_left: Callable[[], None] = lambda: None

    def prove(self, owner: str) -> bool:
        """A request has come with a credential of this owner. False if the owner has no place left."""
        self.owner = owner
        self.policy.pace.asks(owner, time.monotonic())
        return self.policy.admission.prove(self, owner)

    async def turn(self) -> None:
        """Wait until a request of its owner may be carried out."""
        if seconds := self.policy.pace.begins(self.owner, time.monotonic()):
            await asyncio.sleep(seconds)

    async def may_send(self, size: int) -> None:
        """Wait until its owner may have so much of an answer."""
        await asyncio.sleep(self.policy.pace.moved(self.owner, size, time.monotonic()))

    def receive_into(self, scope: Mapping[str, Any], place: memoryview) -> None:
        """The body of this request goes there from its beginning, as far as it has not come already.
        Whoever waits for it is woken once, at its end, and gets no piece of it."""
        if self.protocol is not None:
            self.protocol.receive_into(scope, place)

    def take_body(self, scope: Mapping[str, Any]) -> bytes | None:
        """The body of this request, if all of it has come and nobody has asked for it; else None."""
        return self.protocol.take_body(scope) if self.protocol is not None else None

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call this once the peer has closed the connection, or has been cut off, until `unwatch`. Only
        after the body."""
        self.on_left = on_left
        if self.protocol is not None:
            self.protocol.flow.resume_reading()

    def unwatch(self, on_left: Callable[[], None]) -> None:
        """This one need not be called any more."""
        if self.on_left == on_left:
            self.on_left = lambda: None

    def answer(
        self, scope: Mapping[str, Any], status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """Answer this request at once, in one piece. False if it has to be done by ASGI: nothing has
        been sent then."""
        return self.protocol is not None and self.protocol.answer(scope, status, headers, body)

    def leave(self) -> None:
        self.policy.admission.leave(self)
        self.on_left()

    def end(self, bound: Bound) -> None:
        """At once. What has not been sent is lost."""
        self.policy.refused[bound] += 1
        if self.transport is not None:
            self.transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()


class _Over(Exception):
    """A bound was hit while something was parsed."""


class _Phase(Enum):
    """What a connection waits for."""

    HEAD = auto()  # the rest of a request's head
    BODY = auto()  # the rest of its body
    ANSWER = auto()  # the application
    IDLE = auto()  # the next request


class PacedFlow(FlowControl):
    """uvicorn's, which does not read what nobody asks for. The pace of an owner is a reason of its own:
    nothing is read while there is either."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    @property
    def waits(self) -> bool:
        """Whether it is we who let a body wait."""
        return self.read_paused or self._is_held

    def hold(self) -> None:
        """Read nothing until `release`."""
        if not self.waits:
            self._transport.pause_reading()
        self._is_held = True

    def release(self) -> None:
        was_held, self._is_held = self._is_held, False
        if was_held and not self.read_paused:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        if not self.waits:
            self._transport.pause_reading()
        self.read_paused = True

    def resume_reading(self) -> None:
        was_paused, self.read_paused = self.read_paused, False
        if was_paused and not self._is_held:
            self._transport.resume_reading()


class EarlyAnswers(RequestResponseCycle):
    """uvicorn's, of a request whose body is not known to be short. An answer that begins before that has
    come ends the connection, and says so: whoever sends the rest of it may stop."""

    async def send(self, message: Any) -> None:
        if self.more_body:
            # Closed with bytes that nobody has read, it would be reset, and the answer lost. So it is
            # kept at the end of the answer, for the rest of the body.
            self.keep_alive = self.response_started and not message.get("more_body")
        await super().send(message)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with bounds."""

    flow: PacedFlow

    def __init__(
        self,
        connection: HttpConnection,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.timeout_keep_alive = connection.policy.bounds.idle_seconds
        self._connection = connection
        self._bounds = connection.policy.bounds
        self._extensions = {EXTENSION: connection}
        self._phase = _Phase.HEAD
        self._since = self._request_since = loop.time()
        self._unparsed = 0  # bytes since the parser has last said something
        self._head_bytes = self._head_count = 0
        self._body_bytes = 0
        self._body_mark = (self._since, 0)  # when there were so many
        self._place: memoryview | None = None  # for what is still to come of the body
        self._pausing: asyncio.TimerHandle | None = None  # no more is read of the body until then
        self._write_mark = (self._since, 0)  # when so many were left to send
        self._over: tuple[HTTPStatus, Bound, str] | None = None  # why it ends
        self._upgraded = False
        self._has_body = self._is_short = False
        self._lets_wait = False  # its body, from the end of what is being parsed

    # Bounds while it is parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection.transport, self._connection.protocol = transport, self
        super().connection_made(transport)
        self.flow = PacedFlow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.leave()
        self._place = None
        self._end_pause()
        super().connection_lost(exc)

    @property
    def _has_ended(self) -> bool:
        return self._over is not None or self._upgraded

    @property
    def _request(self) -> RequestResponseCycle | None:
        """The last one whose head is complete."""
        return self.cycle

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        if self._phase is _Phase.IDLE:
            self._phase, self._since = _Phase.HEAD, self.loop.time()
        self._unparsed += len(data)
        super().data_received(data)
        if self._lets_wait:
            self._lets_wait = False
            self.flow.pause_reading()  # until the application asks for it
        if self._unparsed > self._bounds.head_bytes_max and not self._has_ended:
            self._end_head(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, Bound.HEAD, _HEAD_SENTENCE)
            self.send_400_response("")

    def handle_websocket_upgrade(self) -> None:
        """Only where the configuration has `BoundedWebSocket` for them."""
        if self.transport.is_closing():
            return  # the answer before was the last one
        self._upgraded = True
        web_socket: Any = self.config.ws_protocol_class
        self.ws_protocol_class = partial(web_socket, self._connection)  # type: ignore[assignment]
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._unparsed = self._head_bytes = self._head_count = 0
        self._has_body = self._is_short = False
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def on_url(self, url: bytes) -> None:
        self._unparsed = 0
        super().on_url(url)
        if len(self.url) > self._bounds.line_bytes_max:
            self._end_head(HTTPStatus.REQUEST_URI_TOO_LONG, Bound.LINE, "This address is too long.")
            raise _Over

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for trailers, which have no bounds of their own."""
        self._unparsed = 0
        self._head_bytes += len(name) + len(value)
        self._head_count += 1
        bounds = self._bounds
        if self._head_bytes > bounds.head_bytes_max or self._head_count > bounds.headers_max:
            self._end_head(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, Bound.HEAD, _HEAD_SENTENCE)
            raise _Over
        super().on_header(name, value)
        name = self.headers[-1][0]
        if value != b"0" and name in _WITH_BODY:
            self._has_body = True
            self._is_short = name == b"content-length" and int(value) <= _SHORT_BYTES_MAX

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return  # the answer before was the last one
        self._unparsed = 0
        if len(self.pipeline) >= self._bounds.pipelined_max:
            self._end_head(HTTPStatus.TOO_MANY_REQUESTS, Bound.PIPELINE, "Too many requests at once.")
            raise _Over
        if self._has_body and self.parser.should_upgrade():
            # The parser skips this body: its bytes would be taken for the next request.
            self._end_head(HTTPStatus.BAD_REQUEST, Bound.MALFORMED, _UPGRADE_SENTENCE)
            raise _Over
        super().on_headers_complete()  # refuses some addresses: the head has no answer yet
        now = self.loop.time()
        self._phase, self._since, self._request_since = _Phase.BODY, now, now
        self._body_bytes, self._body_mark = 0, (now, 0)
        if self._has_body:
            self._lets_wait = True
            # Who waits for a 100 may never send it.
            keeps = self._is_short and not self.expect_100_continue
            if (request := self._request) and not (keeps and request.keep_alive):
                request.__class__ = EarlyAnswers

    def receive_into(self, scope: Mapping[str, Any], place: memoryview) -> None:
        request = self._request
        if self._phase is not _Phase.BODY or request is None or request.scope is not scope:
            return  # all of it has come
        came = len(request.body)
        place[:came] = request.body
        request.body = bytearray()
        self._place = place[came:]

    def take_body(self, scope: Mapping[str, Any]) -> bytes | None:
        request = self._request
        if request is None or request.scope is not scope or request.more_body or request.disconnected:
            return None
        body, request.body = bytes(request.body), bytearray()
        request.message_event.clear()
        return body

    def answer(
        self, scope: Mapping[str, Any], status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        request = self._request
        if (
            request is None
            or request.scope is not scope
            or request.response_started
            or request.more_body
            or request.disconnected
            or not request.keep_alive
            or self.flow.write_paused
            or scope["method"] == "HEAD"
        ):
            return False
        lines = [STATUS_LINE[status]]
        for name, value in (*request.default_headers, *headers):
            if name == b"connection" or b"\n" in value or b"\r" in value:
                return False  # uvicorn knows what to do
            lines.append(b"%s: %s\r\n" % (name, value))
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        request.response_started = request.response_complete = True
        request.message_event.set()
        if len(body) <= _JOINED_BYTES_MAX:
            lines.append(body)
            self.transport.write(b"".join(lines))
        else:
            self.transport.write(b"".join(lines))
            self.transport.write(body)
        request.on_response()
        return True

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        pace, now = self._connection.policy.pace, time.monotonic()
        if self._request and self._request.response_complete:  # nobody wants it any more
            self._pause(pace.unwanted(len(body), now))
            return
        if self._place is None:
            self._keep_body(body)
        else:
            self._place[: len(body)] = body
            self._place = self._place[len(body) :]
        self._pause(pace.moved(self._connection.owner, len(body), now))

    def _keep_body(self, body: bytes) -> None:
        """As uvicorn does it, without a copy of the first piece, which is mostly the whole."""
        request: Any = self._request
        if request is None or not request.more_body:
            return
        if not request.body:
            request.body = body
        else:
            if isinstance(request.body, bytes):
                request.body = bytearray(request.body)
            request.body += body
        if len(request.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        request.message_event.set()

    def _pause(self, seconds: float) -> None:
        """Read no more of this body for so long."""
        if seconds > 0:
            self._end_pause()
            self.flow.hold()
            self._pausing = self.loop.call_later(seconds, self._end_pause)

    def _end_pause(self) -> None:
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
            self.flow.release()

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._lets_wait = False
        self._place = None
        self._end_pause()
        if self._request is not None and self._request.response_complete:
            if isinstance(self._request, EarlyAnswers):
                self.transport.close()  # as the answer has said
            self._phase, self._since = _Phase.IDLE, self.loop.time()
            return
        self._phase = _Phase.ANSWER
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        # As uvicorn does it, but for its timer of each answer: `check` ends who stays idle.
        if self._phase is _Phase.ANSWER:
            self._phase = _Phase.IDLE
        elif isinstance(self._request, EarlyAnswers) and self.transport.can_write_eof():
            self.transport.write_eof()  # an answer before its body is the last one
        self.server_state.total_requests += 1
        self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._over or (HTTPStatus.BAD_REQUEST, Bound.MALFORMED, msg)))

    def _end_head(self, status: HTTPStatus, bound: Bound, sentence: str) -> None:
        self._over = status, bound, sentence

    # Bounds in time

    def check(self, now: float) -> None:
        """End it if whoever is at the other end makes no progress."""
        if self._upgraded:
            return
        bounds = self._bounds
        if not self._is_read(now):
            self._abort(Bound.READ_SECONDS)
        elif self._over or self.transport.is_closing():
            return
        elif self._phase is _Phase.IDLE and now - self._since > bounds.idle_seconds:
            self.transport.close()
        elif self._phase is _Phase.HEAD and now - self._since > bounds.head_seconds:
            sentence = f"The head of a request has to come within {bounds.head_seconds:g} s."
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, Bound.HEAD_SECONDS, sentence)
        elif self._phase is _Phase.BODY and not self._body_comes(now):
            sentence = f"A body has to come with {bounds.body_bytes_per_second_min} bytes a second."
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, Bound.BODY_SECONDS, sentence)
        elif self._phase in (_Phase.BODY, _Phase.ANSWER) and (
            now - self._request_since > bounds.request_seconds
        ):
            sentence = f"A request is answered within {bounds.request_seconds:g} s, or not at all."
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, Bound.REQUEST_SECONDS, sentence)

    def _body_comes(self, now: float) -> bool:
        if self._request is not None and self._request.response_complete:
            return now - self._since <= self._bounds.linger_seconds
        since, before = self._body_mark
        enough = self._bounds.body_bytes_per_second_min * self._bounds.stall_seconds
        if self.flow.waits or self._body_bytes - before >= enough:  # paused: we let it wait
            self._body_mark = now, self._body_bytes
            return True
        return now - since <= self._bounds.stall_seconds

    def _is_read(self, now: float) -> bool:
        left = self.transport.get_write_buffer_size()
        if left:  # the kernel has megabytes more, and takes new ones in lumps
            left += _unacknowledged(self.transport)
        since, before = self._write_mark
        enough = self._bounds.read_bytes_per_second_min * self._bounds.stall_seconds
        if not left or left > before or before - left >= enough:
            self._write_mark = now, left
            return True
        return now - since <= self._bounds.stall_seconds

    # The end

    def _refuse(self, status: HTTPStatus, bound: Bound, sentence: str) -> None:
        """Say so if an answer can still begin, and none was given; then close."""
        if self.transport.is_closing():
            return
        self._over = status, bound, sentence
        self._place = None  # its owner gives the memory back, beside the loop
        request = self._request
        if request and request.response_complete:
            request = None
        if self.pipeline or (request and request.response_started):
            self._abort(bound)
            return
        self._connection.policy.refused[bound] += 1
        if request is None and self._phase is _Phase.BODY:
            self.transport.close()  # answered: another answer would be taken for that to the next one
            return
        if request:
            request.disconnected = True  # the application sends nothing any more
            request.message_event.set()
            self._connection.on_left()
        body = sentence.encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, status.phrase.encode(), len(body), body)
        )
        self.transport.close()

    def _abort(self, bound: Bound) -> None:
        self._over = HTTPStatus.BAD_REQUEST, bound, ""
        self._connection.end(bound)


_UPGRADE_SENTENCE: Final = (
    "A request that asks for another protocol can't have a body. Send it as HTTP/1.1, without Upgrade."
)
_HEAD_SENTENCE: Final = "The headers of this request are too many or too long."


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has to send, or that the other side's has not acknowledged."""
    raw = bytearray(4)
    with contextlib.suppress(OSError):  # it has been closed meanwhile
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, raw)
    return int.from_bytes(raw, sys.byteorder)


class BoundedServer(uvicorn.Server):
    """Accepts connections itself, so that they are admitted before TLS or HTTP begins."""

    def __init__(
        self, config: uvicorn.Config, policy: HttpPolicy, tls: ssl.SSLContext | None = None
    ) -> None:
        if config.proxy_headers:  # uvicorn's default, for whoever connects from the same machine
            raise ValueError("headers of a request must not say how it came")
        self._should_exit = False
        self._wake_up: Callable[[], object] = lambda: None
        super().__init__(config)
        self.policy = policy
        self._tls = tls
        self._working: list[asyncio.Task[None]] = []
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def should_exit(self) -> bool:
        return self._should_exit

    @should_exit.setter
    def should_exit(self, whether: bool) -> None:
        """From any thread, and from a handler of a signal."""
        self._should_exit = whether
        if whether:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                self._wake_up()

    async def main_loop(self) -> None:
        """As uvicorn's, which looks ten times a second whether it is to end: here it is woken."""
        ending, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake_up = partial(loop.call_soon_threadsafe, ending.set)
        while not await self.on_tick(0):  # which also puts the time into the headers of answers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEADERS_SECONDS):
                    await ending.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`sockets` listen already."""
        await super().startup(sockets=[])
        for listener in sockets or []:
            listener.setblocking(False)
            self._working.append(asyncio.create_task(self._accept(listener)))
        self._working.append(asyncio.create_task(self._keep_checking()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await _cancel([*self._working[:-1], *self._connecting])
        await super().shutdown(sockets)
        await _cancel(self._working)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("Cannot accept a connection yet: %s", error.strerror)
                await asyncio.sleep(WAIT_SECONDS)  # it stays in the backlog; others may end meanwhile
                continue
            try:
                origin = origin_of_socket(sock)
            except OSError:  # it has broken off already
                sock.close()
                continue
            connection = HttpConnection(self.policy, origin)
            displaced = self.policy.admission.enter(connection, origin)
            if displaced:
                displaced.end(Bound.DISPLACED)
            task = loop.create_task(self._connect(connection, sock))
            connection.connecting = task
            self._connecting.add(task)
            task.add_done_callback(partial(self._connected, connection, sock))

    async def _connect(self, connection: HttpConnection, sock: socket.socket) -> None:
        """Until HTTP can begin."""
        loop = asyncio.get_running_loop()

        try:
            await loop.connect_accepted_socket(
                partial(self._protocol, connection, loop),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self.policy.bounds.tls_seconds if self._tls else None,
            )
        except OSError:  # of TLS too
            self.policy.refused[Bound.TLS] += 1

    def _protocol(self, connection: HttpConnection, loop: asyncio.AbstractEventLoop) -> BoundedProtocol:
        """What a connection speaks."""
        state = self.lifespan.state
        return BoundedProtocol(connection, self.config, self.server_state, state, loop)

    def _connected(
        self, connection: HttpConnection, sock: socket.socket, task: asyncio.Task[None]
    ) -> None:
        """Also where it was given up before it began."""
        self._connecting.discard(task)
        if connection.transport is None:
            connection.leave()
            sock.close()

    async def _keep_checking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = loop.time()
            for protocol in list(self.server_state.connections):
                if isinstance(protocol, BoundedProtocol):
                    protocol.check(now)


class QuietServer(BoundedServer):
    """Leaves the signals to us: it still answers while we stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
