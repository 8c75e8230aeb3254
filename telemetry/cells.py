"""Numbers of many series over some time, and how they are added up. No Django.

    counter     what it grew by
    gauge       (integral, seconds, max): value x seconds, the seconds it is known for, the highest
    histogram   [sum, first, *counts]: seconds in all, the first bucket in use, counts from it on

All of them are added: two seconds to ten, ten nodes to a fleet, in any order and grouping. That is why
gauges are integrals: what a fleet holds is the sum of integrals over the length of time, and what a node
held on average the integral over the seconds it is known for. Nothing is 0, (0, 0, 0) or [].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from telemetry.histogram import BUCKETS, Histogram
from telemetry.metrics import Kind

NUMBER_MAX: Final = 1 << 53  # of a record: finite, and small enough for many of them to be added
SUM_MAX: Final = 1 << 62  # of what is stored; sums of counts and seconds end there, others are floats
Number = int | float
Gauge = tuple[Number, int, Number]
Sparse = list[Number]
Cell = Any  # one of them, as the kind of its series says

NO_GAUGE: Final[Gauge] = (0, 0, 0)
NO_TIMES: Final[Sparse] = []  # never changed: adding makes a new one


class Cells(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """By kind, in the order of a shape."""

    counters: list[Number]
    gauges: list[Gauge]
    histograms: list[Sparse]

    def of(self, kind: Kind) -> Sequence[Cell]:
        if kind is Kind.COUNTER:
            return self.counters
        return self.gauges if kind is Kind.GAUGE else self.histograms


_Bounded = (
    Annotated[int, Meta(gt=-NUMBER_MAX, lt=NUMBER_MAX)]
    | Annotated[float, Meta(gt=-NUMBER_MAX, lt=NUMBER_MAX)]
)
_Positive = Annotated[int, Meta(ge=0, lt=NUMBER_MAX)] | Annotated[float, Meta(ge=0, lt=NUMBER_MAX)]


class ReportedCells(Cells, array_like=True, forbid_unknown_fields=True):
    """As somebody tells them: only numbers that can be added to others."""

    counters: list[_Bounded]
    gauges: list[tuple[_Bounded, Annotated[int, Meta(ge=0, lt=NUMBER_MAX)], _Bounded]]
    histograms: list[list[_Positive]]

    def check(self) -> None:
        """What the types do not say. Raises ValueError."""
        if not _are_buckets(self.histograms):
            raise ValueError("a histogram has other buckets")


def _are_buckets(cells: Iterable[Sparse]) -> bool:
    """Whether these, none of which has a number below 0, have whole counts of buckets that there are. In
    one loop, for it is done for each record: their sum is an integer if all of them are."""
    for cell in cells:
        if cell and not (
            3 <= len(cell) <= BUCKETS + 2 - cell[1] and type(sum(cell[1:])) is int  # and so is the first
        ):
            return False
    return True


def clamped(cells: Cells) -> Cells:
    """These cells, with no number that is too large to be stored. Counts and seconds stay integers."""
    return Cells(
        list(map(float, cells.counters)),
        [(float(integral), min(seconds, SUM_MAX), most) for integral, seconds, most in cells.gauges],
        [
            [float(cell[0]), cell[1], *[min(count, SUM_MAX) for count in cell[2:]]] if cell else cell
            for cell in cells.histograms
        ],
    )


def is_sound(cells: Cells) -> bool:
    """Whether these, which came from storage, can be added to others."""
    return all(min(cell) >= 0 for cell in cells.histograms if cell) and _are_buckets(cells.histograms)


def add_cells(each: Sequence[Cells]) -> Cells:
    """One at least, and all of the same shape. Column by column, which is what is fast in Python."""
    if len(each) == 1:
        return each[0]
    return Cells(
        list(map(sum, zip(*[cells.counters for cells in each], strict=True))),
        list(map(add_gauges, zip(*[cells.gauges for cells in each], strict=True))),
        list(map(add_sparse, zip(*[cells.histograms for cells in each], strict=True))),
    )


def add_gauges(gauges: Sequence[Gauge]) -> Gauge:
    known = [gauge for gauge in gauges if gauge[1]]
    if not known:
        return NO_GAUGE
    integrals, seconds, most = zip(*known, strict=True)
    return sum(integrals), sum(seconds), max(most)


def add_sparse(cells: Sequence[Sparse]) -> Sparse:
    by_first: dict[Number, list[Sparse]] = {}
    for cell in cells:
        if cell:
            by_first.setdefault(cell[1], []).append(cell)
    sums = [_add_aligned(first, aligned) for first, aligned in by_first.items()]
    if len(sums) > 1:
        return sparse(spread(sums), sum(cell[0] for cell in sums))
    return sums[0] if sums else NO_TIMES


def _add_aligned(first: Number, cells: list[Sparse]) -> Sparse:
    """Those that begin with the same bucket."""
    if len(cells) == 1:
        return cells[0]
    both: Sparse = list(map(sum, zip_longest(*cells, fillvalue=0)))
    both[1] = first
    return both


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


ADD: Final[tuple[Callable[[Any], Cell], ...]] = (
    sum,
    add_gauges,
    add_sparse,
)  # by kind, all that are given
