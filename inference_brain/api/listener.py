"""Serves the API: granian within our event loop, HTTP/1.1 and HTTP/2, with or without TLS.

Its ASGI interface waits for slow clients, so what is buffered of a stream is bounded; its RSGI interface
takes any amount. Why granian: docs/adr/0087-brain-server.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from granian._granian import SocketHolder
from granian.constants import Interfaces, SSLProtocols
from granian.http import HTTP1Settings, HTTP2Settings
from granian.log import LogLevels
from granian.server.embed import Server

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
HEAD_SECONDS: Final = 15
HEAD_BYTES_MAX: Final = 64 << 10
STREAMS_MAX: Final = 1000  # of one HTTP/2 connection
STOP_SECONDS: Final = 10  # for requests that are being answered
CERTIFICATE_SECONDS: Final = 5.0  # between two looks at whether the certificate has changed


_LOGGERS: Final = {"loggers": {"_granian": {"propagate": True}}}  # to the process's own log


class _Embedded(Server):
    """granian on a socket that is listened on already."""

    def __init__(self, app: Any, listener: socket.socket, **more: Any) -> None:
        super().__init__(
            app,
            interface=Interfaces.ASGINL,
            websockets=False,
            log_dictconfig=_LOGGERS,
            log_level=LogLevels.error,
            http1_settings=HTTP1Settings(
                header_read_timeout=1000 * HEAD_SECONDS, max_buffer_size=HEAD_BYTES_MAX
            ),
            http2_settings=HTTP2Settings(
                max_concurrent_streams=STREAMS_MAX, max_headers_size=HEAD_BYTES_MAX
            ),
            **more,
        )
        self._listener = listener
        self.workers_kill_timeout = STOP_SECONDS

    def end(self) -> None:
        """Take no more connections, and finish requests."""
        self.interrupt_signal = True
        self.main_loop_interrupt.set()

    def _init_shared_socket(self) -> None:
        made: Any = SocketHolder  # granian's types leave out what it takes, and that this is one
        holder: Any = made(os.dup(self._listener.fileno()), False, BACKLOG)
        self._shd = holder


class ApiServer:
    """One listener. `certificate` and `key`: PEM files, read again when they change."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        connections: int,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self._app = app
        self._listener = listener
        self._connections = connections
        self._certificate, self._key = certificate, key
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve for as long as this lasts. Raises OSError for a certificate that is none."""
        self._server = self._start()
        following = asyncio.create_task(self._follow_certificate()) if self._certificate else None
        try:
            yield
        finally:
            if following:
                following.cancel()
            self._server.end()
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)

    def _start(self) -> _Embedded:
        server = _Embedded(
            self._app,
            self._listener,
            backpressure=self._connections,
            ssl_cert=self._certificate,
            ssl_key=self._key,
            ssl_protocol_min=SSLProtocols.tls12,
        )
        task = asyncio.create_task(server.serve())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return server

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("The API's listener has ended", exc_info=error)

    async def _follow_certificate(self) -> None:
        """A new certificate is for new connections; the others go on with what they have."""
        known = self._written_at()
        while True:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            if (now := self._written_at()) in (known, None):
                continue
            try:
                server = self._start()
            except OSError as error:  # it may have been written halfway
                log.warning("The new certificate can't be used: %s", error)
                continue
            known = now
            self._server, earlier = server, self._server
            earlier.end()
            log.info("The API has a new certificate")

    def _written_at(self) -> tuple[int, int] | None:
        if not self._certificate or not self._key:
            return None
        try:
            return self._certificate.stat().st_mtime_ns, self._key.stat().st_mtime_ns
        except OSError:
            return None
