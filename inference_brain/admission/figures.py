"""Numbers of queues, for metrics: taken by the event loop, read from any thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from inference_brain import metrics
from inference_brain.admission.pool import Pool
from telemetry.metrics import Sink, put


class Figures(NamedTuple):
    """`gap`: the largest difference between the counters of two orgs that both wait for one model."""

    queued: dict[str, int]
    gap: float
    flights: dict[str, int]

    def collect(self, into: Sink) -> None:
        put(into, metrics.QUEUED, self.queued)
        put(into, metrics.FAIRNESS_GAP, self.gap)
        put(into, metrics.SINGLE_FLIGHT, self.flights)


NO_FIGURES = Figures({}, 0.0, {})


def figures(pools: Iterable[Pool]) -> Figures:
    queued, flights = Counter[str](), Counter[str]()
    gap = 0.0
    for pool in pools:
        queued.update(pool.queue.orgs)
        flights.update(led=pool.flights.led, waited=pool.flights.waited, gave_up=pool.flights.gave_up)
        counters = [pool.counters[org] for org in pool.queue.orgs]
        gap = max(gap, max(counters) - min(counters)) if counters else gap
    return Figures(dict(queued), gap, dict(flights))
