"""Adds the messages of a driver's cache map to its stream in Redis, about twice a second, from a thread
of its own.

Without Redis what changes is kept as changes of entries, of which there are no more than entries; when
it is back, the stream begins anew with a snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis

from swdriver_shim.cache_map.codec import FIELD
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.messages import MessageLog, Written
from telemetry.outages import Outage
from telemetry.records import MAP_STREAM
from telemetry.redis_clients import client

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.5
PERIOD_SECONDS_MIN: Final = 0.05  # after a purge, which is reported at once
BUSY_PART: Final = 0.2  # of the time is spent on it, at most
REDIS_SECONDS_MAX: Final = 2.0  # for an answer
RETRY_SECONDS: Final = 3.0
REFUSED_SECONDS: Final = 60.0  # until the next attempt where Redis does not let this user do it
MESSAGES_AT_ONCE: Final = 8


@dataclass(slots=True)
class MapCounts:
    """Since the start."""

    messages: int = 0
    bytes: int = 0
    snapshots: int = 0


class MapPublisher:
    """Publishes the map of one driver until `stop`."""

    def __init__(self, redis_url: str, topic: str, follower: Callable[[], Follower | None]) -> None:
        """`follower` is asked for until there is one. Raises ValueError for an address that can't be
        used."""
        self.counts = MapCounts()
        self.log: MessageLog | None = None
        self._key = f"{MAP_STREAM}{topic}"
        self._follower = follower
        self._wall_clock = time.time
        self._outage = Outage(log, "Brains do not get this driver's cache map, waiting for Redis")
        self._retry_at = 0.0
        self._redis = client(redis_url, answer_seconds=REDIS_SECONDS_MAX)
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache map", daemon=True)

    def start(self) -> MapPublisher:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._woken.set()
        self._thread.join(timeout=2 * REDIS_SECONDS_MAX)
        self._redis.close()

    def publish(self) -> bool:
        """Add what there is to report. Whether Redis has it."""
        if self.log is None:
            found = self._follower()
            if found is None:
                return False
            found.on_purge = self._woken.set
            self.log = MessageLog(found)
        written = self.log.write(time.monotonic(), self._wall_clock())
        if not written.messages:
            return True
        try:
            is_there = self._add(written)
        except redis.RedisError:
            self.log.follower.wants_snapshot = True  # nobody knows what has arrived
            raise
        self._outage.ends()
        if not is_there:
            self.log.follower.wants_snapshot = True  # Redis was emptied
        return is_there

    # Inside

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            self._publish_or_wait(is_due=began >= self._retry_at)
            took = time.monotonic() - began
            self._stopped.wait(max(PERIOD_SECONDS_MIN, took / BUSY_PART - took))
            self._woken.wait(max(0.0, PERIOD_SECONDS - (time.monotonic() - began)))
            self._woken.clear()

    def _publish_or_wait(self, *, is_due: bool) -> None:
        try:
            if is_due:
                self.publish()
            elif self.log:  # what is noted must not become more and more
                self.log.follower.follow(time.monotonic(), self._wall_clock())
        except redis.RedisError as error:
            is_refused = isinstance(error, redis.exceptions.NoPermissionError)
            now = time.monotonic()
            self._retry_at = now + (REFUSED_SECONDS if is_refused else RETRY_SECONDS)
            self._outage.goes_on(error, now)
        except Exception:
            log.exception("The cache map could not be reported; it is reported anew")
            if self.log:
                self.log.follower.start_over()
            self._retry_at = time.monotonic() + RETRY_SECONDS

    def _add(self, written: Written) -> bool:
        """Whether the stream was there, unless it begins with this."""
        messages, ids = written.messages, list[bytes]()
        for at in range(0, len(messages), MESSAGES_AT_ONCE):
            pipe: Any = self._redis.pipeline(transaction=False)
            for number, message in enumerate(messages[at : at + MESSAGES_AT_ONCE], at):
                pipe.xadd(self._key, {FIELD: message}, nomkstream=number != written.snapshot_at)
            added = pipe.execute()
            if None in added:
                return False
            ids += added
            self.counts.messages += len(added)
            self.counts.bytes += sum(map(len, messages[at : at + MESSAGES_AT_ONCE]))
        if written.snapshot_at is not None:
            minid: Any = ids[written.snapshot_at]
            self._redis.xtrim(self._key, minid=minid, approximate=False)
            self.counts.snapshots += 1
        return True
