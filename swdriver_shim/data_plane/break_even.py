"""Is fetching faster than computing anew? Learned from what both have taken so far.

Each is taken for a wait and a part that grows with size, and both are estimated from what was measured,
the recent counting most. Where nothing is known, fetching is tried; where it was found to be slower, it
is tried again after a while, since disks and networks recover.
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
        """Per unit of size. Where all sizes were the same, it is the whole of it."""
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
    """What a fetch goes through, one after the other, against computing."""

    def __init__(self, steps: Sequence[LinearFit], computing: LinearFit) -> None:
        """Steps are measured by bytes, computing by tokens."""
        self._steps = steps
        self.computing = computing
        self._tried_at = float("-inf")

    @property
    def has_an_opinion(self) -> bool:
        return min(line.count for line in (*self._steps, self.computing)) >= MEASURED_MIN

    def is_worth_it(self, tokens: int, size: int, now: float) -> bool:
        """Whether so many tokens, of so many bytes, had better be fetched."""
        if not self.has_an_opinion:
            return True
        fetching = sum(step.seconds(size) for step in self._steps)
        if fetching < self.computing.seconds(tokens):
            return True
        if now < self._tried_at + AGAIN_SECONDS:
            return False
        self._tried_at = now  # it may have become faster since
        return True

    def tokens_min(self, bytes_per_token: float) -> int | None:
        """From how many tokens on it is worth it; 0 without an opinion, None for never."""
        if not self.has_an_opinion:
            return 0
        each = bytes_per_token * sum(step.each for step in self._steps)
        saved = self.computing.each - each
        lacking = sum(step.wait for step in self._steps) - self.computing.wait
        if lacking < 0 <= saved:
            return 0
        if saved <= 0 or lacking / saved > TOKENS_MAX:
            return None
        return int(lacking / saved) + 1
