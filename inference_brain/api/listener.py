"""Serves the API: HTTP/1.1 and HTTP/2 on one port, with or without TLS.

HTTP/1.1 is served as the control APIs are (`kvss_agent.http.server`), with bounds for everything that a
client may do. A connection that begins as HTTP/2 is passed on to granian, on a socket within this
process. Both ask the same ASGI application. Why two: docs/adr/0087-brain-server.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, Final

import uvicorn

from inference_brain.api.http2 import PREFACE, Http2Server, Splice
from kvss_agent.http.server import (
    BoundedProtocol,
    HttpBounds,
    HttpConnection,
    HttpPolicy,
    QuietServer,
)
from kvss_agent.limits.admission import Places

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 60  # between two requests on a connection
STOP_SECONDS: Final = 10  # for requests that are being answered
STRANGERS_MAX: Final = 4096
READ_BYTES_PER_SECOND_MIN: Final = 64  # by a client, of what is there for it
CERTIFICATE_SECONDS: Final = 5.0  # between two looks at whether the certificate has changed


def policy(
    connections: int, answer_seconds: float, owners: Callable[[], Collection[str]] = tuple
) -> HttpPolicy:
    """Bounds of a listener: for so many clients with keys, and answers that take so long. `owners`: for
    whom places are reserved."""
    bounds = HttpBounds(
        request_seconds=answer_seconds,
        idle_seconds=IDLE_SECONDS,
        read_bytes_per_second_min=READ_BYTES_PER_SECOND_MIN,
    )
    return HttpPolicy(bounds, Places(STRANGERS_MAX, STRANGERS_MAX // 2, connections), owners)


class ApiServer:
    """One listener. `certificate` and `key`: PEM files, read again when they change."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        bounds: HttpPolicy,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        """Raises OSError, also for files that hold no certificate or key."""
        self._listener = listener
        self._files = (certificate, key) if certificate and key else None
        self._tls: ssl.SSLContext | None = None
        if self._files:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.set_alpn_protocols(["h2", "http/1.1"])
            self._tls.load_cert_chain(*self._files)
        self._app = app
        self._policy = bounds

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve for as long as this lasts."""
        with tempfile.TemporaryDirectory(prefix="tidegate-brain-") as folder:
            connections = self._policy.admission.places.proven_max
            http2 = Http2Server(self._app, Path(folder) / "http2", connections)
            config = uvicorn.Config(
                self._app,
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                lifespan="off",
                timeout_graceful_shutdown=STOP_SECONDS,
            )
            server = _Server(config, self._policy, self._tls, http2)
            async with http2.running():
                task = asyncio.create_task(server.serve(sockets=[self._listener]))
                following = asyncio.create_task(self._follow_certificate())
                try:
                    yield
                finally:
                    following.cancel()
                    server.should_exit = True
                    await task

    async def _follow_certificate(self) -> None:
        """A new certificate is for new connections; the others keep what they have."""
        known = self._written_at()
        while self._tls and self._files:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            if (now := self._written_at()) == known:
                continue
            try:
                self._tls.load_cert_chain(*self._files)
            except OSError as error:  # of ssl, too: it may have been written halfway
                log.warning("The new certificate can't be used yet: %s", error)
                continue
            known = now
            log.info("The API has a new certificate")

    def _written_at(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [file.stat().st_mtime_ns for file in self._files or ()]
        return []


class _Server(QuietServer):
    def __init__(
        self,
        config: uvicorn.Config,
        bounds: HttpPolicy,
        tls: ssl.SSLContext | None,
        http2: Http2Server,
    ) -> None:
        super().__init__(config, bounds, tls)
        self._http2 = http2

    def _protocol(self, connection: HttpConnection, loop: asyncio.AbstractEventLoop) -> BoundedProtocol:
        state = self.lifespan.state
        return _Protocol(self._http2, connection, self.config, self.server_state, state, loop)


class _Protocol(BoundedProtocol):
    """HTTP/1.1, unless it begins as HTTP/2."""

    def __init__(self, http2: Http2Server, connection: HttpConnection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._http2: Http2Server | None = http2
        self._own = connection

    def data_received(self, data: bytes) -> None:
        http2, self._http2 = self._http2, None
        if http2 is None or not data.startswith(PREFACE[:4]):
            super().data_received(data)
            return
        self._upgraded = True  # its bounds are those of HTTP/2 from here on
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        transport: Any = self.transport
        Splice(transport, self._own, data).connect(http2)
