"""What has changed since the last look: cumulative numbers in, cells out. No Django."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import sub
from typing import Final

from telemetry.cells import ADD, Cell, Cells, sparse
from telemetry.histogram import Histogram
from telemetry.metrics import OTHER, Kind, LabelLimits, Labels, Metric, Sink, Value, summed
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
        self.left_out = 0  # series that did not fit into a record and were folded, summed over records
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
            values, folded = _fitted(values)
            self.left_out += folded
        if values.keys() != set(self._shape.series):
            self._shape = Shape(values)
        return self._shape, self._shape.cells(values)


def _fitted(values: Mapping[Series, Cell]) -> tuple[dict[Series, Cell], int]:
    """Not more series than a record may have, and how many were folded for that. Each metric may have
    an equal part of them, so that one with very many takes nothing from the others. Sums over a metric
    stay right."""
    metrics: dict[str, dict[Series, Cell]] = {}
    for one, cell in values.items():
        metrics.setdefault(one.name, {})[one] = cell
    fitted: dict[Series, Cell] = {}
    folded, waiting = 0, len(metrics)
    for its in sorted(metrics.values(), key=len):
        kept = _folded(its, (SERIES_MAX - len(fitted)) // waiting)
        folded += len(its) - len(kept)
        fitted |= kept
        waiting -= 1
    return fitted, folded


def _folded(series: dict[Series, Cell], most: int) -> dict[Series, Cell]:
    """Of one metric, so many series at most. Of the label with the most values the last are `other`;
    where that is not enough, all are, and those of the next label."""
    while len(series) > most:
        labels = [one.labels for one in series]
        values_of = [Counter(value for _, value in column) for column in zip(*labels, strict=True)]
        place = max(range(len(values_of)), key=lambda at: len(values_of[at]))
        room = most - len({pairs[:place] + pairs[place + 1 :] for pairs in labels})
        own = set[str]()
        for value, count in sorted(values_of[place].items()):
            room -= count
            if room >= 0 and value != OTHER:
                own.add(value)
        found: dict[Series, list[Cell]] = {}
        for one, cell in series.items():
            name, value = one.labels[place]
            shown = value if value in own else OTHER
            labels_shown = (*one.labels[:place], (name, shown), *one.labels[place + 1 :])
            found.setdefault(one._replace(labels=labels_shown), []).append(cell)
        series = {one: ADD[one.kind](cells) for one, cells in found.items()}
    return series


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
