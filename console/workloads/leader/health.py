"""How requests fare with the new revision and with the old one, from what brains report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from console.workloads.leader.world import Traffic
from inference_brain import metrics as brain
from telemetry.metrics import Metric
from telemetry.queries import Fold, Question, ask
from telemetry.topics import FLEET

SECONDS: Final = 300
STEP: Final = 10
SERIES_MAX: Final = 2_000
FAILED: Final = frozenset({"error", "failed"})  # by a fault of the replica


def traffic(
    model: str, switched: Mapping[str, float], replicas: frozenset[str]
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one. `switched`: since when the new one serves a replica;
    before that, and elsewhere, requests count for the old one; the step of a switch for nobody."""
    now = time.time()
    end = now // STEP * STEP
    counts = {True: [0, 0], False: [0, 0]}
    for labels, at, number in _numbers(model, brain.REQUESTS, Fold.SUM, ("replica", "result"), end):
        if (side := _side(switched, replicas, labels, at)) is not None:
            counts[side][0] += round(number)
            if labels["result"] in FAILED:
                counts[side][1] += round(number)
    medians: dict[bool, list[float]] = {True: [], False: []}
    for labels, at, number in _numbers(model, brain.TTFT, Fold.P50, ("replica",), end):
        if (side := _side(switched, replicas, labels, at)) is not None:
            medians[side].append(number)
    new, old = (
        Traffic(requests=counts[side][0], errors=counts[side][1], ttft_seconds=_median(medians[side]))
        for side in (True, False)
    )
    return new, old


def _side(
    switched: Mapping[str, float],
    replicas: frozenset[str],
    labels: Mapping[str, str],
    at: float,
) -> bool | None:
    replica = labels.get("replica", "")
    if replica not in replicas:
        return None
    since = switched.get(replica)
    if since is None or at + STEP <= since:
        return False
    return True if at >= since else None


def question(model: str, metric: Metric, fold: Fold, by: tuple[str, ...], end: float) -> Question:
    """Of this model only: of all of them there are more series than an answer may have."""
    return Question(
        topic=FLEET,
        metric=metric,
        fold=fold,
        start=end - SECONDS,
        end=end,
        step=STEP,
        where={"model": model},
        by=by,
    )


def _numbers(
    model: str, metric: Metric, fold: Fold, by: tuple[str, ...], end: float
) -> list[tuple[Mapping[str, str], float, float]]:
    found = ask(question(model, metric, fold, by, end), time.time(), SERIES_MAX)
    return [
        (line.labels, end - SECONDS + index * STEP, value)
        for line in found.lines
        for index, value in enumerate(line.values)
        if isinstance(value, float)
    ]


def _median(numbers: list[float]) -> float | None:
    return sorted(numbers)[len(numbers) // 2] if numbers else None
