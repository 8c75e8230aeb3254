"""Latencies as counts in fixed buckets that grow by a factor of 2^(1/4). Merged by adding. No Django.

104 bounds from 1 µs to 60 s and more; the same everywhere, so that any two histograms can be added, and
percentiles, heat maps and Prometheus come from the same vector. A percentile is off by 9 % at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

FACTOR: Final = 2.0**0.25
BOUNDS: Final = tuple(1e-6 * FACTOR**power for power in range(105))  # seconds; the last is 67 s
BUCKETS: Final = len(BOUNDS) + 1  # one more for what is slower than the last bound
COARSE: Final = 4  # so many buckets are one for others: a factor of two from bound to bound
COARSE_BOUNDS: Final = BOUNDS[::COARSE]


class Histogram:
    """Not locked: one thread records, or the caller has a lock."""

    __slots__ = ("counts", "sum")

    def __init__(self, counts: Sequence[int] | None = None, total: float = 0.0) -> None:
        if counts is not None and len(counts) != BUCKETS:
            raise ValueError(f"a histogram has {BUCKETS} buckets, not {len(counts)}")
        self.counts = list(counts) if counts is not None else [0] * BUCKETS
        self.sum = total

    def record(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.sum += seconds * times

    def add(self, other: Histogram) -> None:
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def coarse(self) -> list[int]:
        """Counts up to each of COARSE_BOUNDS, and one for what is slower. From any thread."""
        counts = list(self.counts)  # which others may be adding to
        return [
            counts[0],
            *(sum(counts[first : first + COARSE]) for first in range(1, BUCKETS, COARSE)),
        ]

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, fraction: float) -> float | None:
        """What this part of all is not above, to the middle of its bucket. None: nothing yet."""
        total = self.count
        if not total:
            return None
        rank = max(1.0, fraction * total)
        index = bisect_left(list(accumulate(self.counts)), rank)
        if index == 0:
            return BOUNDS[0]
        return float(BOUNDS[min(index, len(BOUNDS) - 1)] / FACTOR**0.5)
