"""One WebSocket: its principal, its topics, and its frames. Called by Channels."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import Error as DatabaseError

from console.live import access
from console.live.counts import Counts
from console.live.hub import Hub
from console.live.messages import (
    REASONS,
    Closing,
    Frame,
    NotUnderstood,
    Subscribe,
    Unsubscribe,
    error,
    read,
)
from console.live.outbox import Outbox
from console.shell.request_context import note_known

VIEWERS_MAX: Final = 2000  # of a process
VIEWERS_OF_ONE_MAX: Final = 100  # of those, of one person
SUBSCRIPTIONS_MAX: Final = 64  # of a viewer
MESSAGES_MAX: Final = 2 * SUBSCRIPTIONS_MAX  # at once, and
MESSAGES_A_SECOND: Final = 10.0  # from then on
STALL_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 15.0  # between checks of access to the subscribed topics

COUNTS: Final = Counts()
_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = weakref.WeakKeyDictionary()


def hub() -> Hub:
    """The hub of this event loop. A process has one for each loop."""
    loop = asyncio.get_running_loop()
    if loop not in _hubs:
        _hubs[loop] = Hub(COUNTS)
    return _hubs[loop]


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]
    """Frames are put into an outbox, from which one task sends them. Making a frame never blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = ""  # of the connection; empty until authenticated, then the connection is counted
        self._outbox = Outbox()
        self._topics: set[str] = set()
        self._wake = asyncio.Event()
        self._check = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False
        self._allowance, self._allowed_at = float(MESSAGES_MAX), time.monotonic()

    # Channels

    async def connect(self) -> None:
        if not access.is_ours(self.scope):
            COUNTS.refused["origin"] += 1
            await self.close()  # before it is accepted: the upgrade is answered with 403
            return
        await self.accept(access.subprotocol_of(self.scope))
        COUNTS.viewers += 1
        self._is_open = True
        self._credential = access.credential_of(self.scope)
        if COUNTS.viewers > VIEWERS_MAX:
            await self._close(Closing.NOT_NOW)
        elif await self._refused(()) is not None:
            note_known(self.scope, self.owner)
            COUNTS.viewers_of[self.owner] += 1
            if COUNTS.viewers_of[self.owner] > VIEWERS_OF_ONE_MAX:
                await self._close(Closing.TOO_MANY_CONNECTIONS)
                return
            self._tasks = [
                asyncio.create_task(work()) for work in (self._keep_sending, self._keep_checking)
            ]

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:  # noqa: ARG002
        if not self._is_open:
            return
        if not self._may_send():
            await self._close(Closing.TOO_MANY_MESSAGES)
            return
        try:
            message = read(text_data)
        except NotUnderstood as problem:
            self._refuse("NotUnderstood", str(problem))
            return
        if isinstance(message, Unsubscribe):
            self._unsubscribe(message.topic)
        else:
            await self._subscribe(message)

    async def disconnect(self, _code: int) -> None:
        self._leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Messages from the client

    def _may_send(self) -> bool:
        now = time.monotonic()
        grown = self._allowance + (now - self._allowed_at) * MESSAGES_A_SECOND
        self._allowance, self._allowed_at = min(MESSAGES_MAX, grown) - 1, now
        return self._allowance >= 0

    async def _subscribe(self, message: Subscribe) -> None:
        topic = message.topic
        if topic not in self._topics and len(self._topics) >= SUBSCRIPTIONS_MAX:
            detail = f"A connection has at most {SUBSCRIPTIONS_MAX} topics. Unsubscribe from some first."
            self._refuse("TooManyTopics", detail, topic)
            return
        if not hub().has_room(topic, self.owner):
            self._refuse("TooManyTopics", "This process, or you, are at the limit of topics.", topic)
            return
        refused = await self._refused((topic,))
        if refused:
            self._refuse("NotFound", "There is no such topic, or you may not see it.", topic)
        elif self._is_open:
            self._topics.add(topic)
            hub().watch(self, topic, message.since)

    def _unsubscribe(self, topic: str) -> None:
        if topic in self._topics:
            self._topics.remove(topic)
            hub().leave(self, [topic])
            self._outbox.drop(topic)

    def _refuse(self, reason: str, detail: str, topic: str = "") -> None:
        COUNTS.refused[reason] += 1
        self.offer([error(reason, detail, topic, time.time())])

    # Frames to the client

    def offer(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self._outbox.put([frame])
            if frame.concerns_access:
                self.check()
        self._wake.set()

    def check(self) -> None:
        self._check.set()

    def end(self, why: Closing) -> None:
        self._tasks.append(asyncio.create_task(self._close(why)))

    async def _keep_sending(self) -> None:
        try:
            while self._is_open:
                await self._wake.wait()
                self._wake.clear()
                await self._send_all()
        except TimeoutError:
            await self._close(Closing.STALLED)
        except OSError:
            return  # the client has disconnected; Channels reports it next

    async def _send_all(self) -> None:
        for frame in self._outbox.take():
            if not self._is_open:
                return
            async with asyncio.timeout(STALL_SECONDS):
                await self.send(frame.text)
            COUNTS.sent += 1
        COUNTS.skipped += self._outbox.skipped
        self._outbox.skipped = 0

    async def _keep_checking(self) -> None:
        while self._is_open:
            with contextlib.suppress(TimeoutError):
                # Not all at the same moment, after a restart to which all came back.
                async with asyncio.timeout(CHECK_SECONDS * random.uniform(0.8, 1.2)):  # noqa: S311
                    await self._check.wait()
            self._check.clear()
            if await self._refused(tuple(self._topics)):
                await self._close(Closing.FORBIDDEN)

    async def _refused(self, topics: tuple[str, ...]) -> frozenset[str] | None:
        """The topics that the viewer may not see. None if the connection had to be closed: the
        credential is no longer valid, or the database can't be asked."""
        ask: Any = database_sync_to_async(access.standing, thread_sensitive=False)
        try:
            standing: access.Standing | None = await ask(self._credential, topics)
        except DatabaseError:
            await self._close(Closing.NOT_NOW)
            return None
        if standing is None:
            await self._close(Closing.UNKNOWN)
            return None
        self.owner = standing.owner
        return standing.refused

    # The end

    async def _close(self, why: Closing) -> None:
        if self._is_open:
            self._leave()
            COUNTS.closed[str(int(why))] += 1
            with contextlib.suppress(OSError):  # disconnected, or not reading (TimeoutError is one)
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.close(int(why), REASONS[why])

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            COUNTS.viewers -= 1
            if self.owner:
                COUNTS.viewers_of -= Counter([self.owner])  # which drops those that have none left
            hub().leave(self, self._topics)
            self._topics = set()
            for ending in (self._wake, self._check):
                ending.set()


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
