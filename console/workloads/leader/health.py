"""How requests fare with the new revision and with the old one, from what brains report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from console.workloads.leader.world import Traffic
from inference_brain import metrics as brain
from telemetry.metrics import Metric
from telemetry.queries import Fold, Question, ask
from telemetry.topics import FLEET

SECONDS: Final = 300
STEP: Final = 10
SERIES_MAX: Final = 2_000
FAILED: Final = frozenset({"error", "failed"})  # by a fault of the replica


class Counted(NamedTuple):
    """A number of one replica in one step."""

    replica: str
    at: float
    labels: Mapping[str, str]
    number: float


def traffic(
    model: str, switched: Mapping[str, float], replicas: frozenset[str]
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one, in the last five minutes."""
    end = time.time() // STEP * STEP
    asked = _numbers(model, brain.REQUESTS, Fold.SUM, ("replica", "result"), end)
    waited = _numbers(model, brain.TTFT, Fold.P50, ("replica",), end)
    return compared(asked, waited, switched, replicas)


def compared(
    asked: Sequence[Counted],
    waited: Sequence[Counted],
    switched: Mapping[str, float],
    replicas: frozenset[str],
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one. `asked`: requests, by replica and result; `waited`:
    medians of times to first token.

    `switched`: since when the new one serves a replica; before that, and elsewhere, requests count for
    the old one; the step of a switch for nobody. Of the old one counts what came beside the new one, if
    anything did: they had the same load then. Else what came before.
    """
    sides: dict[bool, list[Counted]] = {True: [], False: []}
    for one in asked:
        if one.number and (side := _side(switched, replicas, one)) is not None:
            sides[side].append(one)
    beside = {one.at for one in sides[True]} & {one.at for one in sides[False]}
    if beside:
        sides[False] = [one for one in sides[False] if one.at in beside]
    medians: dict[bool, list[float]] = {True: [], False: []}
    for one in waited:
        side = _side(switched, replicas, one)
        if side or (side is False and (not beside or one.at in beside)):
            medians[side].append(one.number)
    return _summed(sides[True], medians[True]), _summed(sides[False], medians[False])


def _summed(asked: Sequence[Counted], medians: Sequence[float]) -> Traffic:
    requests = round(sum(one.number for one in asked))
    steps = len({(one.replica, one.at) for one in asked})
    return Traffic(
        requests=requests,
        errors=round(sum(one.number for one in asked if one.labels["result"] in FAILED)),
        ttft_seconds=sorted(medians)[len(medians) // 2] if medians else None,
        per_second=requests / (STEP * steps) if steps else 0.0,
    )


def _side(switched: Mapping[str, float], replicas: frozenset[str], one: Counted) -> bool | None:
    if one.replica not in replicas:
        return None
    since = switched.get(one.replica)
    if since is None or one.at + STEP <= since:
        return False
    return True if one.at >= since else None


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


def _numbers(model: str, metric: Metric, fold: Fold, by: tuple[str, ...], end: float) -> list[Counted]:
    found = ask(question(model, metric, fold, by, end), time.time(), SERIES_MAX)
    return [
        Counted(line.labels.get("replica", ""), end - SECONDS + index * STEP, line.labels, value)
        for line in found.lines
        for index, value in enumerate(line.values)
        if isinstance(value, float)
    ]
