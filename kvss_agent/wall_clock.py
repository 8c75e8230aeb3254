"""Seconds since 1970 that do not jump with the machine's clock: what expires is gone for good."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

STEP_SECONDS_MAX: Final = 60.0  # what corrections of a synchronized clock amount to
BELIEVED_AFTER_SECONDS: Final = 900.0  # a time server has put a wrong clock right by then

log = logging.getLogger(__name__)


def _elapsed() -> float:
    """Seconds since the machine was started; also those for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WallClock:
    """Follows the machine's clock. A jump is believed once it has lasted: until then time goes on as it
    did before, and what a machine with a wrong clock would expire for all that share a store is kept.

    A clock that is wrong when this begins can't be told from a right one. May be called by all threads.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed
    ) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._offset = wall() - elapsed()
        self._jumped: tuple[float, float] | None = None  # when that was noticed, and the offset since
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            elapsed = self._elapsed()
            self._follow(self._wall() - elapsed, elapsed)
            return elapsed + self._offset

    def _follow(self, offset: float, elapsed: float) -> None:
        jump = offset - self._offset
        if abs(jump) <= STEP_SECONDS_MAX:
            self._offset, self._jumped = offset, None
        elif self._jumped is None or abs(offset - self._jumped[1]) > STEP_SECONDS_MAX:
            self._jumped = elapsed, offset
            log.warning(
                "the clock of this machine was set %s by %.0f s; nothing expires by the new time in the "
                "next %.0f s",
                "forward" if jump > 0 else "back",
                abs(jump),
                BELIEVED_AFTER_SECONDS,
            )
        elif elapsed - self._jumped[0] >= BELIEVED_AFTER_SECONDS:
            self._offset, self._jumped = offset, None
