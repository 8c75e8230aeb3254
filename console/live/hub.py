"""The hub of a web process: reads changes of all subscribed topics, and sends them to viewers.

A round is one read of all topics, and one frame for each that has changed, encoded once. There is one a
second, and one soon after each hint, which is a notice of PostgreSQL that something changed. Hints only
start a round: its content is always read from the database. A change without a hint is found within the
second, and after a time without hints everything counts as changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

import psycopg
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connection

from console.accounts.names import ACCOUNT
from console.database_address import conninfo
from console.live.counts import Counts
from console.live.feed import HEARTBEAT_SECONDS, Feed
from console.live.messages import Closing, Frame
from console.live.reading import Reading, Wanted, read
from telemetry import hints

log = logging.getLogger(__name__)

ROUND_SECONDS: Final = 1.0
SPACING_SECONDS: Final = 0.25  # rounds are at least so far apart, however many hints there are
PAUSE_AFTER_FAULT_SECONDS: Final = 1.0
UNKNOWN: Final = "unknown"  # kind of a change that we may have missed
TOPICS_MAX: Final = 1000  # that are read in a round
TOPICS_OF_ONE_MAX: Final = 400  # of those, of one person
HINTS_MAX: Final = 10_000  # that wait for a round; beyond it they are only late


class Viewer(Protocol):
    owner: str  # the one who watches; empty until it is known

    def offer(self, frames: Iterable[Frame]) -> None:
        """Queue frames for this viewer. Never blocks and never fails."""

    def check(self) -> None:
        """Check again whether the viewer may still see its topics."""

    def end(self, why: Closing) -> None:
        """Close the connection."""


class Hub:
    """Belongs to one event loop. Runs only while there are viewers."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._viewers: dict[str, set[Viewer]] = {}
        self._topics_of: dict[str, Counter[str]] = {}  # by owner: how many of its viewers watch each
        self._feeds: dict[str, Feed] = {}
        self._event: int | None = None
        self._hints: dict[str, set[str]] = defaultdict(set)
        self._woken = asyncio.Event()
        self._has_tried_to_listen = asyncio.Event()
        self._openings: dict[str, list[tuple[Viewer, int | None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def has_room(self, topic: str, owner: str) -> bool:
        """Whether this person may watch the topic. What others watch is read anyway."""
        if topic in self._viewers:
            return True
        its = len(self._topics_of.get(owner, ()))
        return len(self._viewers) < TOPICS_MAX and its < TOPICS_OF_ONE_MAX

    def watch(self, viewer: Viewer, topic: str, since: int | None) -> None:
        """Send the topic's opening, at once or after the next round, and then each of its frames. Doing
        it again sends another opening."""
        viewers = self._viewers.setdefault(topic, set())
        if viewer not in viewers:
            viewers.add(viewer)
            self._topics_of.setdefault(viewer.owner, Counter())[topic] += 1
        self.counts.topics = len(self._viewers)
        if feed := self._feeds.get(topic):
            viewer.offer(feed.opening(since, time.time()))
            return
        self._openings.setdefault(topic, []).append((viewer, since))
        self._woken.set()
        if not self._tasks:
            self._tasks = [asyncio.create_task(work()) for work in (self._keep_reading, self._listen)]
            self._tasks[0].add_done_callback(self._ended)

    def leave(self, viewer: Viewer, topics: Iterable[str]) -> None:
        for topic in topics:
            viewers = self._viewers.get(topic, set())
            if viewer in viewers:
                viewers.remove(viewer)
                self._topics_of[viewer.owner] -= Counter(
                    [topic]
                )  # which drops those that have none left
                if not self._topics_of[viewer.owner]:
                    del self._topics_of[viewer.owner]
            if not viewers:
                self._viewers.pop(topic, None)
                self._feeds.pop(topic, None)
                self._openings.pop(topic, None)
        self.counts.topics = len(self._viewers)
        if not self._viewers:
            self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._forget()

    def _forget(self) -> None:
        self._event = None
        self._has_tried_to_listen.clear()
        self._feeds.clear()
        self._hints.clear()

    def _ended(self, reading: asyncio.Task[None]) -> None:
        """Close all connections after an internal error, so that no viewer waits for frames in vain."""
        if not reading.cancelled() and (fault := reading.exception()):
            log.error("reading for live viewers failed", exc_info=fault)
            everybody = {viewer for viewers in self._viewers.values() for viewer in viewers}
            self._stop()
            for viewer in everybody:
                viewer.end(Closing.OUR_FAULT)

    # Rounds

    async def _keep_reading(self) -> None:
        # So that there is no time between the first reading and the first hint.
        await self._has_tried_to_listen.wait()
        clock = asyncio.get_running_loop().time
        full_at, beat_at = clock(), clock() + HEARTBEAT_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, full_at - clock())):
                    await self._woken.wait()
            self._woken.clear()
            began = clock()
            is_full = began >= full_at
            try:
                await self._round(is_full=is_full)
            except DatabaseError as error:
                log.warning("live viewers wait for PostgreSQL: %s", error)
                await asyncio.sleep(PAUSE_AFTER_FAULT_SECONDS)
            self.counts.reading.record(clock() - began)
            if is_full:
                full_at = max(full_at + ROUND_SECONDS, clock())
            if clock() >= beat_at:
                self._beat()
                beat_at = clock() + HEARTBEAT_SECONDS
            await asyncio.sleep(max(0.0, began + SPACING_SECONDS - clock()))

    async def _round(self, *, is_full: bool) -> None:
        hinted, self._hints = self._hints, defaultdict(set)
        wanted = Wanted(self._event, list(self._openings), list(self._feeds), hinted, is_full)
        try:
            reading = await _in_a_thread(partial(read, wanted))
        except DatabaseError:
            for topic, kinds in hinted.items():
                self._hints[topic] |= kinds
            raise
        self._tell(reading)

    def _tell(self, reading: Reading) -> None:
        now = time.time()
        self._event = reading.event
        for topic, update in reading.updates.items():
            feed = self._feeds.get(topic)
            frame = feed.advance(update, now) if feed else None
            if frame:
                self._send(frame)
        for topic, feed in reading.begun.items():
            waiting = self._openings.pop(topic, [])
            if topic in self._viewers:
                self._feeds[topic] = feed
            for viewer, since in waiting:
                viewer.offer(feed.opening(since, now))

    def _beat(self) -> None:
        now = time.time()
        for feed in self._feeds.values():
            self._send(feed.heartbeat(now))

    def _send(self, frame: Frame) -> None:
        self.counts.made += 1
        for viewer in self._viewers.get(frame.topic, ()):
            viewer.offer((frame,))

    # Hints

    async def _listen(self) -> None:
        """Listen for hints on a connection of its own, and reconnect after errors."""
        while True:
            try:
                address = conninfo(settings.LISTEN_URL, dbname=connection.settings_dict["NAME"])
                async with await psycopg.AsyncConnection.connect(address, autocommit=True) as listening:
                    await listening.execute(f"LISTEN {hints.CHANNEL}")
                    await self._take_hints(listening.pgconn)
            except psycopg.Error as error:
                log.warning("hints for live viewers don't come in: %s", error)
                self._has_tried_to_listen.set()
            await asyncio.sleep(PAUSE_AFTER_FAULT_SECONDS)

    async def _take_hints(self, wire: psycopg.pq.abc.PGconn) -> None:
        """Until the connection ends. Not by psycopg's `notifies`, which wants no cancelling."""
        loop, readable, reader = asyncio.get_running_loop(), asyncio.Event(), wire.socket
        loop.add_reader(reader, readable.set)
        self.counts.is_listening = True
        self._has_tried_to_listen.set()
        for topic in self._feeds:  # hints may have been missed meanwhile
            self._hint(topic, UNKNOWN)
        try:
            while True:
                await readable.wait()
                readable.clear()
                wire.consume_input()
                while notice := wire.notifies():
                    self._hint(*hints.read(notice.extra.decode()))
        finally:
            self.counts.is_listening = False
            loop.remove_reader(reader)

    def _hint(self, topic: str, kind: str) -> None:
        if topic.startswith(ACCOUNT):
            self._check_all_of(topic)
            return
        if topic in self._viewers and len(self._hints) < HINTS_MAX:
            self._hints[topic].add(kind)
            self._woken.set()

    def _check_all_of(self, account: str) -> None:
        """Check all connections of an account whose credentials have changed, at once."""
        for viewer in {viewer for viewers in self._viewers.values() for viewer in viewers}:
            if viewer.owner == account:
                viewer.check()


async def _in_a_thread(work: Callable[[], Reading]) -> Reading:
    """Run it in a thread, and release its database connection."""
    reading: Reading = await database_sync_to_async(work, thread_sensitive=False)()
    return reading
