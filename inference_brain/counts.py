"""What a brain counts of requests. The names are those of `metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from inference_brain import metrics
from telemetry.histogram import Histogram
from telemetry.metrics import LabelLimits, Metric, Sink

K = TypeVar("K")
V = TypeVar("V")
Labels = tuple[str, ...]


class Counts:
    """Counted by one event loop, and collected by any thread."""

    def __init__(self) -> None:
        self.limits = LabelLimits()
        self.streams = 0
        self._numbers: dict[Metric, dict[Labels, int]] = {}
        self._times: dict[Metric, dict[Labels, Histogram]] = {}

    def add(self, metric: Metric, *labels: str, amount: int = 1) -> None:
        numbers = self._numbers.get(metric)
        if numbers is None:
            numbers = self._numbers[metric] = {}
        numbers[labels] = numbers.get(labels, 0) + amount

    def time(self, metric: Metric, seconds: float, *labels: str) -> None:
        times = self._times.get(metric)
        if times is None:
            times = self._times[metric] = {}
        found = times.get(labels)
        if found is None:
            found = times[labels] = Histogram()
        found.record(seconds)

    def total(self, metric: Metric) -> int:
        """Over all labels."""
        return sum(_items(self._numbers.get(metric, {})).values())

    def collect(self, into: Sink) -> None:
        into.put(metrics.STREAMS, [({}, self.streams)])
        for metric, numbers in _items(self._numbers).items():
            into.put(
                metric,
                [(_labels(metric, labels), count) for labels, count in _items(numbers).items()],
            )
        for metric, times in _items(self._times).items():
            into.put(
                metric,
                [
                    (_labels(metric, labels), Histogram(one.counts, one.sum))
                    for labels, one in _items(times).items()
                ],
            )


def _labels(metric: Metric, labels: Labels) -> dict[str, str]:
    return dict(zip(metric.labels, labels, strict=True))


def _items(table: Mapping[K, V]) -> dict[K, V]:
    """A copy that is made at once: another thread may be counting."""
    return dict(list(table.items()))
