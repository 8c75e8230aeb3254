from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from console.live.consumer import LiveConsumer

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

PATH: Final = "/ws/v1/live"
_live: Final = LiveConsumer.as_asgi()


async def websockets(scope: Scope, receive: Receive, send: Send) -> None:
    """All WebSockets of the console: there is one address. An upgrade elsewhere is answered with 403."""
    if scope["path"] == PATH:
        await _live(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close"})
