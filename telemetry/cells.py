"""Numbers of many series over some time, and how they are added up. No Django.

    counter     what it grew by
    gauge       (integral, seconds, max): value x seconds, the seconds it is known for, the highest
    histogram   [sum, first, *counts]: seconds in all, the first bucket in use, counts from it on

All of them are added: two seconds to ten, ten nodes to a fleet, in any order and grouping. That is why
gauges are integrals: what a fleet holds is the sum of integrals over the length of time, and what a node
held on average the integral over the seconds it is known for. Nothing is 0, (0, 0, 0) or [].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import add
from typing import Any, Final

import msgspec

from telemetry.histogram import BUCKETS, Histogram
from telemetry.metrics import Kind

Number = int | float
Gauge = tuple[Number, int, Number]
Sparse = list[Number]
Cell = Any  # one of them, as the kind of its series says

NUMBER_MAX: Final = 1 << 53  # of a record
NO_GAUGE: Final[Gauge] = (0, 0, 0)
NO_TIMES: Final[Sparse] = []  # never changed: adding makes a new one


class Cells(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """By kind, in the order of a shape."""

    counters: list[Number]
    gauges: list[Gauge]
    histograms: list[Sparse]

    def check(self) -> None:
        """Raises ValueError for what can't be added to others."""
        if not _is_sound(self.counters):
            raise ValueError("a counter is beyond bounds")
        for gauge in self.gauges:
            if gauge[1] < 0 or not _is_sound(gauge):
                raise ValueError("a gauge is beyond bounds, or of less than no time")
        for cell in self.histograms:
            if cell and not (_is_sound(cell) and _fits(cell)):
                raise ValueError("a histogram has other buckets, or is beyond bounds")

    def of(self, kind: Kind) -> Sequence[Cell]:
        if kind is Kind.COUNTER:
            return self.counters
        return self.gauges if kind is Kind.GAUGE else self.histograms


def _is_sound(numbers: Sequence[Number]) -> bool:
    """Finite, and small enough for many of them to be added."""
    if not numbers:
        return True
    return math.isfinite(sum(numbers)) and -NUMBER_MAX < min(numbers) <= max(numbers) < NUMBER_MAX


def _fits(cell: Sparse) -> bool:
    if len(cell) < 3:
        return False
    first, last = cell[1], cell[1] + len(cell) - 2
    return (
        isinstance(first, int) and first >= 0 and last <= BUCKETS and set(map(type, cell[2:])) <= {int}
    )


def add_cells(mine: Cells, its: Cells) -> Cells:
    """Both together, of the same shape."""
    return Cells(
        list(map(add, mine.counters, its.counters)),
        list(map(add_gauges, mine.gauges, its.gauges)),
        list(map(add_sparse, mine.histograms, its.histograms)),
    )


def add_gauges(mine: Gauge, its: Gauge) -> Gauge:
    if not mine[1]:
        return its
    if not its[1]:
        return mine
    return mine[0] + its[0], mine[1] + its[1], max(mine[2], its[2])


def add_sparse(mine: Sparse, its: Sparse) -> Sparse:
    if not mine:
        return its
    if not its:
        return mine
    low = min(mine[1], its[1])
    width = max(mine[1] + len(mine), its[1] + len(its)) - low - 2
    both = list(map(add, _padded(mine, int(low), int(width)), _padded(its, int(low), int(width))))
    return [mine[0] + its[0], low, *both]


def _padded(cell: Sparse, low: int, width: int) -> Sparse:
    """So many counts, from this bucket on."""
    counts = [0] * (int(cell[1]) - low) + cell[2:]
    return counts + [0] * (width - len(counts))


def spread(cells: Iterable[Sparse]) -> list[int]:
    """The counts of all buckets, added up."""
    dense = [0] * BUCKETS
    for cell in cells:
        if cell:
            index = int(cell[1])
            for count in cell[2:]:
                dense[index] += int(count)
                index += 1
    return dense


def sparse(dense: Sequence[int], total: Number) -> Sparse:
    """From the first bucket that is not empty to the last."""
    used = [index for index, count in enumerate(dense) if count]
    if not used:
        return []
    return [total, used[0], *dense[used[0] : used[-1] + 1]]


def histogram_of(cells: Iterable[Sparse]) -> Histogram:
    listed = [cell for cell in cells if cell]
    return Histogram(spread(listed), float(sum(cell[0] for cell in listed)))
