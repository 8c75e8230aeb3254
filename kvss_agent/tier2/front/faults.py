"""Faults of a front and of the store behind it, counted and logged."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvss_agent.tier2.backend import Failed

log = logging.getLogger(__name__)

# Whose faults they are, in the log.
FRONT: Final = "The front of tier 2"
BEHIND: Final = "Copying behind the front of tier 2"
LOOKING: Final = "Looking behind the front of tier 2"
SAID_SECONDS: Final = 600.0  # in which the log has a fault once


class Faults:
    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._counts: Counter[str] = Counter()
        self._said: dict[tuple[str, str], float] = {}  # when the log had a fault last

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def note(self, failed: Failed, where: str = FRONT) -> None:
        """The log has one of a kind in ten minutes: a store that is full is so for each column."""
        now, kind = time.monotonic(), (where, failed.fault)
        with self._lock:
            self._counts[failed.fault] += 1
            is_new = now - self._said.get(kind, -math.inf) >= SAID_SECONDS
            if is_new:
                self._said[kind] = now
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", where, failed)
