"""How often requests may be sent again. Pure.

When replicas answer with errors, each retry is more work for the others. So retries are at most a share
of requests. A request whose connection was refused or lost costs nobody anything, and is not counted.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.2  # of requests
RESERVE: Final = 10.0  # that are there without any, and again after so many seconds:
RESERVE_SECONDS: Final = 10.0


class RetryBudget:
    """Of one model."""

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._left = RESERVE
        self._at = now

    def request(self) -> None:
        """A request has come."""
        self._left = min(self._left + SHARE, 10 * RESERVE)

    def take(self, now: float) -> bool:
        """Take one retry. Returns whether there was one."""
        if self._left < RESERVE:
            earned = (now - self._at) * RESERVE / RESERVE_SECONDS
            self._left = min(RESERVE, self._left + max(0.0, earned))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
