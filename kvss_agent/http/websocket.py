"""A WebSocket on a connection of a bounded server."""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.server import HttpConnection


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's; its place is free when it ends."""

    def __init__(self, connection: HttpConnection, **what: Any) -> None:
        super().__init__(**what)
        self._connection = connection

    async def run_asgi(self) -> None:
        extensions = cast("dict[str, object]", self.scope["extensions"])
        extensions[EXTENSION] = self._connection
        await super().run_asgi()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.leave()
        super().connection_lost(exc)
