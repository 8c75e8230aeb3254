"""One HTTP request and its answer, over ASGI: bounded bodies, streams, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from itertools import pairwise
from types import TracebackType
from typing import Any, Final

from inference_brain.api.errors import RATE_LIMITED, ApiError, too_large, unavailable
from inference_brain.body_room import BodyRoom
from kvss_agent.http.api import SMALL_BYTES, connection_of
from kvss_agent.http.server import HttpConnection

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON: Final = b"application/json"
EVENTS: Final = b"text/event-stream; charset=utf-8"
PIECE_BYTES: Final = 64 << 10  # of an answer that is no stream
# Of its end, in small pieces: granian takes five of an answer whether or not its client does.
END_BYTES: Final = 4 << 10
END_PIECE_BYTES: Final = 512


class ClientLeft(Exception):
    """The client has closed its connection, or reset its stream."""


class ClientTooSlow(ClientLeft):
    """It takes nothing of its answer any more."""


class Exchange:
    """One request. `head` is answered at most once. What it takes of memory it has until `give_back`."""

    __slots__ = (
        "_client_seconds",
        "_receive",
        "_room",
        "_send",
        "_watch",
        "has_begun",
        "headers",
        "held",
        "method",
        "org",
        "path",
        "scope",
        "status",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, room: BodyRoom, client_seconds: float
    ) -> None:
        """`client_seconds`: until the client takes the next piece of an answer."""
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of each wins
        self.has_begun = False
        self.status = 0
        self.org = ""  # for which memory is taken from the room
        self.held = 0  # bytes of that
        self._room = room
        self._client_seconds = client_seconds
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None

    async def prove(self, owner: str) -> None:
        """Whose connection this is has been shown: it keeps its place. Raises ApiError if the owner has
        too many."""
        connection = connection_of(self.scope)
        if connection is None:
            return
        if not connection.prove(owner):
            raise ApiError(
                429,
                "Too many connections with keys of this organization: close some, or use them again.",
                kind=RATE_LIMITED,
                code="connections",
                headers={"retry-after": "1", "connection": "close"},
            )
        await connection.turn()

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    # Memory

    def take(self, size: int) -> None:
        """Take so much more of it. Raises ApiError where there is none."""
        if not self._room.take(self.org, size):
            raise unavailable(
                "There are too many long requests and answers at once. Try again.", "bodies"
            )
        self.held += size

    def give_back(self, kept: int = 0) -> None:
        """All of it but so much."""
        self._room.give_back(self.org, self.held - kept)
        self.held = kept

    # What comes

    async def body(self, most: int, seconds: float) -> bytes | memoryview:
        """All of it, for which memory is taken. Raises ApiError, ClientLeft."""
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > most:
            raise too_large(most)
        connection = connection_of(self.scope)
        if connection and (whole := connection.take_body(self.scope)) is not None:
            if len(whole) > most:
                raise too_large(most)
            self.take(len(whole))
            return whole
        if connection and announced.isdigit() and int(announced) > SMALL_BYTES:
            return await self._receive_into(connection, int(announced))
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(seconds):
                await self._receive_body(pieces, most)
        except TimeoutError:
            message = f"The body did not come within {seconds:g} s."
            raise ApiError(408, message, code="body_too_slow") from None
        if announced.isdigit() and int(announced) != sum(map(len, pieces)):
            raise ClientLeft
        return b"".join(pieces) if len(pieces) != 1 else bytes(pieces[0])

    async def _receive_into(self, connection: HttpConnection, size: int) -> memoryview:
        """A long body, straight to where it stays. Whoever sends it too slowly is cut off by the
        connection."""
        self.take(size)
        place = memoryview(bytearray(size))
        connection.receive_into(self.scope, place)
        at = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientLeft
            if piece := message.get("body", b""):
                place[at : at + len(piece)] = piece
                at += len(piece)
            if not message.get("more_body"):
                return place

    async def _receive_body(self, pieces: list[bytes], most: int) -> None:
        size, is_whole = 0, False
        while not is_whole:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientLeft
            is_whole = not message.get("more_body")
            piece = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise too_large(most)
            self.take(len(piece))
            pieces.append(piece)

    @property
    def has_left(self) -> bool:
        """Whether the client's connection has ended. One over HTTP/2 says so where it is watched."""
        connection = connection_of(self.scope)
        return bool(connection and connection.transport and connection.transport.is_closing())

    def watched(self) -> Watch:
        """Cancel what happens in this context when the client leaves, and raise ClientLeft instead. Only
        after the body."""
        return Watch(connection_of(self.scope), self._receive)

    # What goes

    async def answer(
        self, status: int, body: bytes, headers: Iterable[Header] = (), kind: bytes = JSON
    ) -> None:
        """The client gets more of a long one when it has taken the last piece: until then its memory is
        taken. Raises ClientTooSlow."""
        headers = [(b"content-type", kind), *headers]
        connection = connection_of(self.scope)
        if (
            len(body) <= PIECE_BYTES
            and connection
            and connection.answer(self.scope, status, headers, body)
        ):
            self.has_begun, self.status = True, status
            return
        await self._head(status, [(b"content-length", b"%d" % len(body)), *headers])
        end = len(body) - END_BYTES
        starts = [0]
        if end > 0:
            starts = [*range(0, end, PIECE_BYTES), *range(end, len(body), END_PIECE_BYTES)]
        for first, last in pairwise([*starts, len(body)]):
            message = {"type": "http.response.body", "body": body[first:last]}
            await self._taken({**message, "more_body": last < len(body)})

    async def fail(self, error: ApiError, headers: Iterable[Header] = ()) -> None:
        """Answer with an error."""
        own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self.answer(error.status, error.body(), [*headers, *own])

    async def abort(self) -> None:
        """Close the connection, in the middle of an answer."""
        connection = connection_of(self.scope)
        if connection and connection.transport:
            connection.transport.abort()
            await asyncio.sleep(0)  # until the server knows

    async def begin_stream(self, headers: Iterable[Header] = ()) -> None:
        await self._head(200, [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), *headers])

    async def send(self, piece: bytes) -> None:
        """Part of a stream. Waits for a slow client. Raises ClientTooSlow."""
        await self._taken({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self) -> None:
        await self._taken({"type": "http.response.body", "body": b"", "more_body": False})

    async def _taken(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._client_seconds):
                await self._send(message)
        except TimeoutError:
            raise ClientTooSlow from None

    async def _head(self, status: int, headers: list[Header]) -> None:
        self.has_begun = True
        self.status = status
        await self._taken({"type": "http.response.start", "status": status, "headers": headers})


class Watch:
    """While it is entered, what the current task does is cancelled when the client leaves. A connection
    of ours says so; of others, ASGI is asked."""

    __slots__ = ("_asking", "_connection", "_has_left", "_receive", "_task")

    def __init__(self, connection: HttpConnection | None, receive: Receive) -> None:
        self._connection = connection
        self._receive = receive
        self._has_left = False
        self._task: asyncio.Task[Any] | None = None
        self._asking: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if self._connection:
            self._connection.watch(self._left)
        else:
            self._asking = asyncio.create_task(self._ask())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection:
            self._connection.unwatch(self._left)
        if self._asking:
            self._asking.cancel()
        is_ours = isinstance(error, asyncio.CancelledError) and self._has_left
        if is_ours and self._task and self._task.uncancel() == 0:
            raise ClientLeft from None

    def _left(self) -> None:
        if not self._has_left and self._task:
            self._has_left = True
            self._task.cancel()

    async def _ask(self) -> None:
        while (await self._receive())["type"] == "http.request":
            pass  # an empty one; the body has been read
        self._left()
