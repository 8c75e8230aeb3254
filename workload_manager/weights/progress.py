"""How far weights are, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

REPORT_SECONDS: Final = 0.2  # between two reports
BYTES: Final = "bytes"


class Progress(NamedTuple):
    done: int
    total: int
    unit: str
    seconds: float


class Counter:
    """Bytes of any number of threads, reported a few times a second."""

    def __init__(
        self,
        report: Callable[[Progress], None],
        total: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._total, self._clock = report, total, clock
        self._began = clock()
        self._reported_at = -REPORT_SECONDS
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Negative for what has to be brought anew."""
        with self._lock:
            self._done += count
            now = self._clock()
            if now < self._reported_at + REPORT_SECONDS and self._done < self._total:
                return
            self._reported_at = now
            self._report(Progress(self._done, self._total, BYTES, now - self._began))

    def show(self, done: int) -> None:
        """What another process has done."""
        self.add(done - self._done)
