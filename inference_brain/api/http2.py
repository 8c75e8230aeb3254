"""HTTP/2: granian on a Unix socket within this process, and connections that are passed on to it.

Its ASGI interface waits for slow clients, so what is buffered of a stream is bounded; its RSGI interface
takes any amount.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, cast

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP2Settings
from granian.log import LogLevels
from granian.server.embed import Server

from kvss_agent.http.server import HttpConnection

log = logging.getLogger(__name__)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # how every such connection begins
OWNER: Final = "http/2"  # whose places these connections take
HEAD_BYTES_MAX: Final = 64 << 10
# Of one connection. A client that takes none of its answers may leave so many open: docs/adr/0087.
STREAMS_MAX: Final = 100
STOP_SECONDS: Final = 10
_LOGGERS: Final = {"loggers": {"_granian": {"propagate": True}}}  # to the process's own log


class Http2Server:
    """granian, at `path`."""

    def __init__(self, app: Any, path: Path, connections: int) -> None:
        self.path = path
        self.places = max(1, connections // 2)  # free ones: strangers have them, too
        self._server = Server(
            app,
            uds=path,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http2,
            websockets=False,
            backpressure=connections,
            log_dictconfig=_LOGGERS,
            log_level=LogLevels.error,
            http2_settings=HTTP2Settings(
                max_concurrent_streams=STREAMS_MAX,
                max_headers_size=HEAD_BYTES_MAX,
                keep_alive_interval=30_000,
            ),
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve for as long as this lasts."""
        task = asyncio.create_task(self._server.serve())
        try:
            yield
        finally:
            self._server.interrupt_signal = True
            self._server.main_loop_interrupt.set()
            _, late = await asyncio.wait([task], timeout=STOP_SECONDS)
            for one in late:
                one.cancel()


class Splice(asyncio.Protocol):
    """A client's connection, of which each byte is passed on. What the other side does not take is not
    read."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection, first: bytes) -> None:
        self._transport = transport
        self._connection = connection
        self._first = first
        self._inner: asyncio.Transport | None = None
        self._is_over = False
        self._server: Http2Server | None = None  # of whose places it has one

    def connect(self, server: Http2Server) -> None:
        """From here on the connection is granian's."""
        self._transport.set_protocol(self)
        self._transport.pause_reading()
        if not server.places or not self._connection.prove(OWNER):
            self._transport.abort()
            return
        server.places -= 1
        self._server = server
        self._connecting = asyncio.get_running_loop().create_task(self._connect(server.path))

    async def _connect(self, path: Path) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: _Inner(self), str(path))
        except OSError:
            log.exception("HTTP/2 is not served")
            self._transport.abort()

    def connected(self, inner: asyncio.Transport) -> None:
        """There is a connection to granian."""
        self._inner = inner
        if self._is_over:
            inner.abort()
            return
        inner.write(self._first)
        self._first = b""
        self._transport.resume_reading()

    # Of the client's connection

    def data_received(self, data: bytes) -> None:
        if self._inner:
            self._inner.write(data)

    def eof_received(self) -> bool:
        if self._inner:
            self._inner.write_eof()
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self._is_over = True
        if self._server:
            self._server.places += 1
        self._connection.leave()
        if self._inner:
            self._inner.abort()

    def pause_writing(self) -> None:
        if self._inner:
            self._inner.pause_reading()

    def resume_writing(self) -> None:
        if self._inner and not self._inner.is_closing():
            self._inner.resume_reading()

    # Of granian's

    def answered(self, data: bytes) -> None:
        self._transport.write(data)

    def ended(self) -> None:
        self._transport.close()

    def hold(self, *, is_full: bool) -> None:
        """granian takes no more for now, or does again."""
        if self._transport.is_closing():
            return
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class _Inner(asyncio.Protocol):
    """The connection to granian."""

    def __init__(self, splice: Splice) -> None:
        self._splice = splice

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._splice.connected(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._splice.answered(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._splice.ended()

    def pause_writing(self) -> None:
        self._splice.hold(is_full=True)

    def resume_writing(self) -> None:
        self._splice.hold(is_full=False)
