"""Which faults of tier 2 the log has: a store that is full is so for each column."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Final

from kvss_agent.tier2.backend import Failed, Fault

log = logging.getLogger(__name__)

SAID_SECONDS: Final = 600.0  # in which the log has a fault of a kind once


class FaultLog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[tuple[str, Fault], float] = {}  # when the log had a fault last

    def note(self, where: str, failed: Failed) -> None:
        """Log it, as a warning if it is the first of its kind in ten minutes."""
        now, kind = time.monotonic(), (where, failed.fault)
        with self._lock:
            is_new = now - self._said.get(kind, -math.inf) >= SAID_SECONDS
            if is_new:
                self._said[kind] = now
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", where, failed)
