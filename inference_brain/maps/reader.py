"""Follows the streams of cache maps in Redis.

A stream that has to be read from its start is read by itself, a few messages at a time; all that are up
to date wait for news together. Without Redis the brain keeps what it knows, which grows old.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import RedisError

from inference_brain.cancellation import raise_if_cancelled, say_why_it_ended
from inference_brain.maps.cache_maps import CacheMaps
from swdriver_shim.cache_map.codec import FIELD
from telemetry.decoder import Malformed
from telemetry.outages import Outage
from telemetry.records import MAP_STREAM
from telemetry.redis_clients import async_client
from telemetry.units import counted

log = logging.getLogger(__name__)

BLOCK_MS: Final = 500
ANSWER_SECONDS: Final = 3.0
RETRY_SECONDS: Final = 1.0
START: Final = b"0-0"
MESSAGES_AT_ONCE: Final = 4  # of one stream that is read from its start
NEWS_AT_ONCE: Final = 2  # of each stream
READ_AGAIN_SECONDS: Final = 2.0  # at least so long between two reads from the start of one stream
SILENT_SECONDS: Final = 30.0  # a stream without news for so long may have begun anew
SILENT_SECONDS_MAX: Final = 600.0  # between two such attempts
HOUSE_SECONDS: Final = 600.0
TIME_SECONDS: Final = 10.0  # between two looks at Redis's clock


class _Stream:
    """Where the reader is in the stream of one driver."""

    def __init__(self, driver: str, topic: str) -> None:
        self.driver = driver
        self.key = f"{MAP_STREAM}{topic}".encode()
        self.last = START
        self.is_behind = True
        self.begin_at = 0.0  # not before, once it has to be read from its start
        self.news_at = 0.0
        self.silent_seconds = SILENT_SECONDS


class MapReader:
    """Feeds the maps with what drivers report, while `run` runs."""

    def __init__(
        self,
        maps: CacheMaps,
        redis_url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ValueError for an address that can't be used."""
        self.is_connected = False
        self._outage = Outage(log, "Redis is away, and cache maps grow old")
        self._maps = maps
        self._clock = clock
        self._wall_clock = wall_clock
        self._streams: dict[str, _Stream] = {}
        self._house_at = 0.0
        self._ahead = 0.0  # seconds by which Redis's clock is ahead of ours
        self._time_at = -math.inf  # when it was looked at
        self._redis = async_client(redis_url, answer_seconds=ANSWER_SECONDS)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    await self._round()
                    self._note_connected()
                except (RedisError, OSError, Malformed) as error:
                    self.is_connected = False
                    self._outage.goes_on(error, asyncio.get_running_loop().time())
                    self._time_at = -math.inf  # it may be another server
                    await asyncio.sleep(RETRY_SECONDS)
                raise_if_cancelled()
        finally:
            await self._redis.aclose()

    async def _round(self) -> None:
        self._follow()
        now = self._clock()
        if now - self._house_at > HOUSE_SECONDS:
            self._house_at = now
            self._maps.keep_house(self._wall_clock())
        if now - self._time_at > TIME_SECONDS:
            seconds, microseconds = await self._redis.time()
            self._ahead = seconds + microseconds / 1e6 - self._clock()
            self._time_at = now
        behind = [one for one in self._streams.values() if one.is_behind and one.begin_at <= now]
        for stream in behind:
            await self._read_some(stream)
        await self._read_news(wait=not behind)

    def _follow(self) -> None:
        """Streams of the drivers that are followed now."""
        places = self._maps.places
        for name in self._streams.keys() - places.keys():
            del self._streams[name]
        now = self._clock()
        for name, place in places.items():
            stream, mirror = self._streams.get(name), self._maps.mirror(name)
            if stream is None or stream.key != f"{MAP_STREAM}{place.topic}".encode():
                stream = self._streams[name] = _Stream(name, place.topic)
                stream.news_at = now
            if stream.is_behind or mirror is None:
                continue
            if mirror.wants_all:
                self._begin(stream, now)
            elif now - stream.news_at > stream.silent_seconds:
                stream.news_at = now
                stream.silent_seconds = min(2 * stream.silent_seconds, SILENT_SECONDS_MAX)
                self._begin(stream, now)

    def _begin(self, stream: _Stream, now: float) -> None:
        """Read it from its start, soon."""
        stream.last, stream.is_behind = START, True
        stream.begin_at = now + READ_AGAIN_SECONDS

    async def _read_some(self, stream: _Stream) -> None:
        mirror = self._maps.mirror(stream.driver)
        if stream.last == START and mirror:
            mirror.start_over()
        messages = await self._xread({stream.key: stream.last}, MESSAGES_AT_ONCE, None)
        found = messages.get(stream.key, [])
        await self._apply(stream, found)
        stream.is_behind = len(found) == MESSAGES_AT_ONCE

    async def _read_news(self, *, wait: bool) -> None:
        current = {one.key: one for one in self._streams.values() if not one.is_behind}
        if not current:
            await asyncio.sleep(BLOCK_MS / 1000 if wait else 0)
            return
        asked = {key: one.last for key, one in current.items()}
        messages = await self._xread(asked, NEWS_AT_ONCE, BLOCK_MS if wait else None)
        for key, found in messages.items():
            if key in current:
                await self._apply(current[key], found)

    async def _xread(
        self, streams: dict[bytes, bytes], count: int, block: int | None
    ) -> dict[bytes, list[tuple[bytes, bytes]]]:
        """The messages by stream, with their ids. Raises Malformed."""
        asked: Any = streams
        answer: Any = await self._redis.xread(asked, count=count, block=block)
        try:
            return {
                key: [(entry, (fields or {}).get(FIELD, b"")) for entry, fields in entries]
                for key, entries in (answer.items() if isinstance(answer, dict) else answer or ())
            }
        except (AttributeError, TypeError, ValueError):
            raise Malformed("Redis answered something else") from None

    async def _apply(self, stream: _Stream, found: list[tuple[bytes, bytes]]) -> None:
        for entry, raw in found:
            stream.last = entry
            mirror = self._maps.mirror(stream.driver)
            if mirror and mirror.read(raw, self._sent_at(entry)):
                stream.news_at = self._clock()
                stream.silent_seconds = SILENT_SECONDS
            await asyncio.sleep(0)  # requests come in between

    def _sent_at(self, entry: bytes) -> float:
        """When Redis got it, by our clock. So a driver whose clock is wrong reports as any other, and
        one that has ended does not report when its stream is read again."""
        now = self._clock()
        try:
            return min(now, int(entry.partition(b"-")[0]) / 1000 - self._ahead)
        except ValueError:
            raise Malformed("Redis answered something else") from None

    def _note_connected(self) -> None:
        self._outage.ends()
        if not self.is_connected:
            log.info("Reading the cache maps of %s", counted(len(self._streams), "driver"))
        self.is_connected = True


class ReaderTask:
    """A reader in the running event loop, until `stop`, which any thread may call."""

    def __init__(self, reader: MapReader) -> None:
        self.reader = reader
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(reader.run(), name="cache maps")
        self._task.add_done_callback(say_why_it_ended)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)

    async def ended(self) -> None:
        """Until it has closed its connection, after `stop`."""
        await asyncio.gather(self._task, return_exceptions=True)
