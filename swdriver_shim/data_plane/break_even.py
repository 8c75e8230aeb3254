"""The number of tokens from which fetching is faster than computing, learned from measurements.

Both are modeled as a constant plus a part that grows with size, estimated from measurements of which the
recent ones count most. Without measurements, fetching is tried. Where it was slower, it is tried again
after a while, since disks and networks recover.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FADE: Final = 0.97  # what a measurement still counts after the next one
MEASURED_MIN: Final = 4  # before there is an opinion
AGAIN_SECONDS: Final = 30.0
TOKENS_MAX: Final = 1 << 20


class LinearFit:
    """Seconds for a size: `wait + each * size`, by least squares over fading measurements."""

    def __init__(self) -> None:
        self.count = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        more = (1.0, size, seconds, size * size, size * seconds)
        n, x, y, xx, xy = (sum_ * FADE + one for sum_, one in zip(self._sums, more, strict=True))
        self._sums = n, x, y, xx, xy

    @property
    def each(self) -> float:
        """Seconds per unit of size. If all sizes were equal, all time is attributed to size."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if spread > 1e-9 * n * xx:
            slope = (n * xy - x * y) / spread
            if slope > 0 and slope * x < y:
                return slope
        return y / x if x else 0.0

    @property
    def wait(self) -> float:
        n, x, y, _, _ = self._sums
        return max(0.0, (y - self.each * x) / n) if n else 0.0

    def seconds(self, size: float) -> float:
        return self.wait + self.each * size


class BreakEven:
    """Compares the steps of a fetch, which follow each other, with computing."""

    def __init__(self, steps: Sequence[LinearFit], computing: LinearFit) -> None:
        """Steps are measured by bytes, computing by tokens."""
        self._steps = steps
        self.computing = computing
        self._tried_at = float("-inf")

    @property
    def is_known(self) -> bool:
        return min(line.count for line in (*self._steps, self.computing)) >= MEASURED_MIN

    def is_worth_it(self, tokens: int, size: int, now: float) -> bool:
        """Whether to fetch so many tokens, of so many bytes."""
        if not self.is_known:
            return True
        fetching = sum(step.seconds(size) for step in self._steps)
        if fetching < self.computing.seconds(tokens):
            return True
        if now < self._tried_at + AGAIN_SECONDS:
            return False
        self._tried_at = now  # it may have become faster since
        return True

    def tokens_min(self, bytes_per_token: float, more_bytes: float = 0.0) -> int | None:
        """The least number of tokens that are worth fetching, with so many bytes more whatever their
        number; 0 if unknown, None for never."""
        if not self.is_known:
            return 0
        each = sum(step.each for step in self._steps)
        saved = self.computing.each - bytes_per_token * each
        waits = sum(step.wait for step in self._steps) + more_bytes * each
        lacking = waits - self.computing.wait
        if lacking < 0 <= saved:
            return 0
        if saved <= 0 or lacking / saved > TOKENS_MAX:
            return None
        return int(lacking / saved) + 1
