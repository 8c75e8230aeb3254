"""Faults of a front and of the store behind it, counted and logged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.fault_log import FaultLog

# Whose faults they are, in the log.
FRONT: Final = "The front of tier 2"
BEHIND: Final = "Copying behind the front of tier 2"
LOOKING: Final = "Looking behind the front of tier 2"


class Faults:
    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._counts: Counter[str] = Counter()
        self._log = FaultLog()

    def counts(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def note(self, failed: Failed, where: str = FRONT) -> None:
        with self._lock:
            self._counts[failed.fault] += 1
        self._log.note(where, failed)
