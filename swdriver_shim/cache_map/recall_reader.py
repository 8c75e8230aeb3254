"""The driver's side of recalls: reads what brains ask for."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import redis

from swdriver_shim.cache_map.codec import FIELD
from swdriver_shim.cache_map.recalls import (
    LATE_SECONDS_MAX,
    STREAM_LENGTH_MAX,
    Allowances,
    Recalled,
    decode,
)
from swdriver_shim.keys import KEY_BYTES
from telemetry.decoder import Malformed
from telemetry.outages import Outage
from telemetry.records import RECALL_STREAM
from telemetry.redis_clients import client

log = logging.getLogger(__name__)

START: Final = b"0-0"
BLOCK_MS: Final = 1000
REDIS_SECONDS_MAX: Final = 3.0  # for an answer
RETRY_SECONDS: Final = 3.0
REFUSED_SECONDS: Final = 60.0  # until the next attempt where Redis does not let this user do it
AT_ONCE: Final = 16
A_SECOND: Final = 64  # requests that are read; those that wait for longer than they may are ignored
Recall = Callable[[bytes, Sequence[bytes], str], Recalled]


class RecallReader:
    """Reads what brains ask one driver for, in a thread, until `stop`."""

    def __init__(
        self,
        redis_url: str,
        topic: str,
        recall: Recall,
        counts: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`recall`: of a space, keys and a sibling, empty for tier 2. `counts`: what became of requests.
        Raises ValueError for an address that can't be used."""
        self._counts = counts
        self._allowances = Allowances(clock)
        self._key = f"{RECALL_STREAM}{topic}"
        self._recall = recall
        self._wall_clock = wall_clock
        self._last = START
        self._has_begun = False
        self._outage = Outage(log, "Brains can't ask this driver to recall prompts yet")
        self._redis = client(redis_url, answer_seconds=REDIS_SECONDS_MAX)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recalls", daemon=True)

    def start(self) -> RecallReader:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * REDIS_SECONDS_MAX)
        self._redis.close()

    def take(self, raw: bytes) -> Recalled:
        """Do what one request asks for."""
        try:
            asked = decode(raw)
        except Malformed:
            return Recalled.MALFORMED
        if abs(self._wall_clock() - asked.at) > LATE_SECONDS_MAX:
            return Recalled.LATE
        if not self._allowances.take(asked.space):
            return Recalled.TOO_MANY
        keys = [asked.keys[at : at + KEY_BYTES] for at in range(0, len(asked.keys), KEY_BYTES)]
        return self._recall(asked.space, keys, asked.sibling)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                if not self._has_begun:
                    self._pass_over()
                    self._has_begun = True
                self._read()
                self._outage.ends()
            except redis.RedisError as error:
                is_refused = isinstance(error, redis.exceptions.NoPermissionError)
                self._outage.goes_on(error, time.monotonic())
                self._stopped.wait(REFUSED_SECONDS if is_refused else RETRY_SECONDS)
            except Exception:
                log.exception("A request to recall a prompt has failed")
                self._stopped.wait(RETRY_SECONDS)

    def _pass_over(self) -> None:
        """What was asked before is for nobody any more. Which that is, no clock of ours may say."""
        for _ in range(2 * STREAM_LENGTH_MAX // AT_ONCE):
            if not (entries := self._entries(None)):
                return
            self._last = entries[-1][0]
            self._remove()

    def _read(self) -> None:
        if not (entries := self._entries(BLOCK_MS)):
            self._last = START  # nothing is left there: names may begin anew, in another Redis
            return
        for entry, fields in entries:
            self._last = entry
            self._counts[self.take(fields.get(FIELD, b""))] += 1
        self._remove()
        self._stopped.wait(len(entries) / A_SECOND)

    def _entries(self, block: int | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """What follows the last one that was read."""
        answer: Any = self._redis.xread({self._key: self._last}, count=AT_ONCE, block=block)
        return [entry for _, entries in answer or () for entry in entries]

    def _remove(self) -> None:
        """What was read: keys of prompts have no business in Redis."""
        self._redis.xtrim(self._key, minid=_after(self._last), approximate=False)


def _after(entry: bytes) -> str:
    milliseconds, _, number = entry.decode().partition("-")
    return f"{milliseconds}-{int(number) + 1}"
