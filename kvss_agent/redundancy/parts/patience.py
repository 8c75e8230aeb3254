"""How long a read waits for a holder before parity is asked for, and how often it may be. Pure.

This is the one place where that is stated: a holder is late once it takes longer than the mean of what
it took lately and four times its deviation (as TCP's retransmission timer, RFC 6298), reckoned by the
size of what is asked for, and never before LEAST_SECONDS nor after MOST_SECONDS.
"""

from __future__ import annotations

import threading
from typing import Final

LEAST_SECONDS: Final = 0.15
MOST_SECONDS: Final = 1.0
FIRST_SECONDS: Final = 0.5  # for a holder that nothing is known of
# What a request of this size may be expected to take; a holder's own times are multiples of it.
EXPECTED_SECONDS: Final = 0.005
EXPECTED_BYTES_PER_SECOND: Final = 100e6
DEVIATIONS: Final = 4
MEAN_WEIGHT: Final = 1 / 8  # of the last answer in the mean
DEVIATION_WEIGHT: Final = 1 / 4
# Of 100 files that are read, so many may be asked for twice, and so many at once after a quiet time.
HEDGES_PER_FILE: Final = 0.1
HEDGES_MOST: Final = 32


class Patience:
    """With one holder, for requests of one kind. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mean: float | None = None  # multiples of what is expected
        self._deviation = 0.0

    def seconds(self, size: int) -> float:
        """After which an answer of so many bytes is late."""
        with self._lock:
            if self._mean is None:
                return FIRST_SECONDS
            usual = expected(size) * (self._mean + DEVIATIONS * self._deviation)
        return min(MOST_SECONDS, max(LEAST_SECONDS, usual))

    def took(self, size: int, seconds: float) -> None:
        """An answer came after so long."""
        found = seconds / expected(size)
        with self._lock:
            if self._mean is None:
                self._mean, self._deviation = found, found / 2
                return
            self._deviation += DEVIATION_WEIGHT * (abs(found - self._mean) - self._deviation)
            self._mean += MEAN_WEIGHT * (found - self._mean)


def expected(size: int) -> float:
    return EXPECTED_SECONDS + size / EXPECTED_BYTES_PER_SECOND


class Hedges:
    """The budget of a shard's reads: a cluster that is slow everywhere isn't asked for all of it twice.
    Any thread may use it."""

    def __init__(self) -> None:
        self.begun = 0  # files whose parity was asked for, since a holder was late
        self.over_budget = 0  # files that waited for a late holder instead
        self._left = float(HEDGES_MOST)
        self._lock = threading.Lock()

    def earn(self, files: int) -> None:
        """So many are being read."""
        with self._lock:
            self._left = min(HEDGES_MOST, self._left + HEDGES_PER_FILE * files)

    def take(self) -> bool:
        """Whether parity of one more file may be asked for."""
        with self._lock:
            if self._left < 1:
                self.over_budget += 1
                return False
            self._left -= 1
            self.begun += 1
            return True
