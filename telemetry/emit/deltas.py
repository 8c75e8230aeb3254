"""What has changed since the last look: cumulative numbers in, cells out. No Django."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import sub
from typing import Final

from telemetry.cells import ADD, Cell, Cells, sparse
from telemetry.histogram import Histogram
from telemetry.metrics import Kind, LabelLimits, Labels, Metric, Sink, Value, summed
from telemetry.shapes import SERIES_MAX, Series, Shape

Collect = Callable[[Sink], None]
Key = tuple[str, tuple[str, ...]]
Known = float | tuple[list[int], float]
EMPTY: Final = Shape(())


def combined(first: Collect, second: Collect) -> Collect:
    def collect(into: Sink) -> None:
        first(into)
        second(into)

    return collect


class Deltas:
    """Looks at all numbers of a process when asked, and says what each has become since the last time.

    What is there for the first time counts from 0: a process begins with nothing. What has become less
    was begun anew, unless it is a counter that is corrected.
    """

    def __init__(self, collect: Collect, limits: LabelLimits | None = None) -> None:
        self.limits = limits or LabelLimits()
        self.left_out = 0  # series that did not fit into a record, summed over records
        self._collect = collect
        self._known: dict[Key, Known] = {}
        self._shape = EMPTY

    def take(self, seconds: int) -> tuple[Shape, Cells]:
        """What happened in the last so many seconds. If the numbers can't be had it raises what they
        raised, and nothing is lost: it is in the next."""
        look = _Snapshot(self._known, self.limits, seconds)
        self._collect(look)
        self._known = look.known
        values = look.values
        if len(values) > SERIES_MAX:
            self.left_out += len(values) - SERIES_MAX
            values = {one: values[one] for one in sorted(values)[:SERIES_MAX]}
        if values.keys() != set(self._shape.series):
            self._shape = Shape(values)
        return self._shape, self._shape.cells(values)


class _Snapshot:
    """A sink for one look."""

    def __init__(self, before: dict[Key, Known], limits: LabelLimits, seconds: int) -> None:
        self.known: dict[Key, Known] = {}
        self.values: dict[Series, Cell] = {}
        self._before = before
        self._limits = limits
        self._seconds = seconds

    def put(self, metric: Metric, samples: Iterable[tuple[Labels, Value]]) -> None:
        sums = summed(metric, samples)
        for values, labels in self._limits.bounded(metric, sums).items():
            cell = self._cell(metric, values, sums[values])
            if cell is None:
                continue
            one = Series(metric.kind, metric.name, tuple(labels.items()))
            known = self.values.get(one)
            self.values[one] = cell if known is None else ADD[one.kind]([known, cell])

    def _cell(self, metric: Metric, values: tuple[str, ...], value: Value) -> Cell | None:
        key = (metric.name, values)
        if isinstance(value, Histogram):
            return self._grown(key, value)
        if metric.kind is Kind.GAUGE:
            return (value * self._seconds, self._seconds, value) if math.isfinite(value) else None
        before = self._before.get(key, 0)
        if not isinstance(before, int | float):
            raise TypeError(f"{metric.name} was a histogram")
        self.known[key] = value
        return value - before if value >= before or metric.corrected else value

    def _grown(self, key: Key, histogram: Histogram) -> Cell:
        counts, total = list(histogram.counts), histogram.sum
        before = self._before.get(key)
        self.known[key] = (counts, total)
        if not isinstance(before, tuple):
            return sparse(counts, total)
        if counts == before[0]:
            return []
        grown = list(map(sub, counts, before[0]))
        return sparse(counts, total) if min(grown) < 0 else sparse(grown, max(0.0, total - before[1]))
