"""What is measured, with a name, a kind, a sentence and labels; and who takes it down. No Django.

A process names its metrics in a `Catalog` and has one function that puts all their values, counted since
its start, into a `Sink`. The page for Prometheus is a sink, and so is what the emitter sends: there is
one list of numbers, and nothing in the data plane knows who reads them.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from telemetry.histogram import Histogram

LABEL_VALUES_MAX: Final = 200  # of a metric's first label; further ones are summed up under `other`
OTHER: Final = "other"
# Where a hit was, as people read it; other outcomes are words already.
TIER_WORDS: Final = {"dram": "memory", "sibling": "siblings", "tier2": "tier 2"}
LABELS_OF_WORDS: Final = frozenset({"tier", "reason", "cause"})  # their values are no names of things

Labels = Mapping[str, str]
Value = float | Histogram
Table = Value | Mapping[str, "Table"]  # by the value of the first label, then of the next


def words_of(outcome: str) -> str:
    """A tier of a hit, or a reason of a miss, as people read it."""
    return TIER_WORDS.get(outcome, outcome.replace("_", " "))


class Kind(enum.IntEnum):
    """In the order in which a record has them."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """There is one object of each: it is equal to itself only, which makes it a fast key of tables."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    corrected: bool = False  # a counter of which some may be taken back


class Catalog:
    """The metrics of one kind of process, by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def counter(self, name: str, text: str, *labels: str, corrected: bool = False) -> Metric:
        """What is counted; `name` ends in _total. It only ever grows, unless it is `corrected`: what
        was counted may be taken back. Prometheus takes any fall for a new beginning, so those are gauges
        there, and `delta` is asked instead of `rate`."""
        return self._add(Metric(name, Kind.COUNTER, text, labels, corrected))

    def gauge(self, name: str, text: str, *labels: str) -> Metric:
        return self._add(Metric(name, Kind.GAUGE, text, labels))

    def histogram(self, name: str, text: str, *labels: str) -> Metric:
        """How long something takes; `name` ends in _seconds."""
        return self._add(Metric(name, Kind.HISTOGRAM, text, labels))

    def _add(self, metric: Metric) -> Metric:
        if metric.name in self._metrics:
            raise ValueError(f"there are two metrics {metric.name}")
        if (metric.kind is Kind.COUNTER) != metric.name.endswith("_total"):
            raise ValueError(f"{metric.name}: counters end in _total, and nothing else does")
        self._metrics[metric.name] = metric
        return metric

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())


class Sink(Protocol):
    def put(self, metric: Metric, samples: Iterable[tuple[Labels, Value]]) -> None:
        """All samples of a metric, at once and once: cumulative ones of counters and histograms. Several
        with the same labels are added up."""


def put(into: Sink, metric: Metric, table: Table) -> None:
    """All samples of a metric; without labels its table is one value."""
    into.put(metric, list(_samples(table, metric.labels, {})))


def _samples(table: Table, names: tuple[str, ...], labels: Labels) -> Iterator[tuple[Labels, Value]]:
    if not isinstance(table, Mapping):
        yield labels, table
        return
    for value, inner in sorted(table.items()):  # at once: another thread may be counting
        yield from _samples(inner, names[1:], {**labels, names[0]: value})


class LabelLimits:
    """Which values of a metric's first label (orgs, shards) have series of their own: the first that
    come, up to a limit. Further labels are of few values each: tiers, reasons, directions.

    What came too late stays under `other` for as long as it is there, so that no series ever takes over
    what another has counted. Places of what is gone are given away when they are needed.
    """

    def __init__(self, most: int = LABEL_VALUES_MAX) -> None:
        self.most = most
        self.overflowed = 0  # values that went to `other`, since the start
        self._lock = threading.Lock()
        self._own: dict[str, set[str]] = {}
        self._others: dict[str, set[str]] = {}

    def bounded(self, metric: Metric, sets: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Labels]:
        """For each of these sets of labels, all that there are of a metric, what it is shown as."""
        listed = list(sets)
        others = self._apart(metric.name, {values[0] for values in listed}) if metric.labels else ()
        return {
            values: dict(
                zip(
                    metric.labels,
                    (OTHER, *values[1:]) if values and values[0] in others else values,
                    strict=True,
                )
            )
            for values in listed
        }

    def shown(
        self, metric: Metric, samples: Iterable[tuple[Labels, Value]]
    ) -> dict[tuple[str, ...], Value]:
        """One value for each set of labels that is shown."""
        sums = summed(metric, samples)
        bounded = self.bounded(metric, sums).items()
        return summed(metric, [(labels, sums[values]) for values, labels in bounded])

    def _apart(self, name: str, present: set[str]) -> set[str]:
        with self._lock:
            own = self._own.setdefault(name, set())
            others = self._others.setdefault(name, set())
            others &= present
            new = present - own - others
            if len(own) + len(new) > self.most:
                own &= present
            for value in sorted(new):
                if len(own) < self.most:
                    own.add(value)
                else:
                    others.add(value)
                    self.overflowed += 1
            return set(others)


def summed(metric: Metric, samples: Iterable[tuple[Labels, Value]]) -> dict[tuple[str, ...], Value]:
    """One value for each set of labels, by their values in the metric's order."""
    sums: dict[tuple[str, ...], Value] = {}
    for labels, value in samples:
        values = tuple([labels[name] for name in metric.labels])
        known = sums.get(values)
        sums[values] = value if known is None else _sum(known, value)
    return sums


def _sum(mine: Value, its: Value) -> Value:
    if isinstance(mine, Histogram) and isinstance(its, Histogram):
        both = Histogram(mine.counts, mine.sum)
        both.add(its)
        return both
    if isinstance(mine, Histogram) or isinstance(its, Histogram):
        raise TypeError("a histogram and a number can't be added")
    return mine + its
