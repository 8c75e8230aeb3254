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
    model: str, switched: Mapping[str, float], replicas: frozenset[str], requests_min: int
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one, in the last five minutes."""
    end = time.time() // STEP * STEP
    asked = _numbers(model, brain.REPLICA_RESULTS, Fold.SUM, ("replica", "result"), end)
    waited = _numbers(model, brain.REPLICA_TTFT, Fold.P50, ("replica",), end)
    return compared(asked, waited, switched, replicas, requests_min)


def compared(
    asked: Sequence[Counted],
    waited: Sequence[Counted],
    switched: Mapping[str, float],
    replicas: frozenset[str],
    requests_min: int,
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one. `asked`: requests, by replica and result; `waited`:
    medians of times to first token.

    `switched`: since when the new one serves a replica; before that, and elsewhere, requests count for
    the old one; the step of a switch for nobody. Of the old one counts what came beside the new one, if
    that is enough: they had the same load then. Else all of it. Of the new one all counts: it may have
    become bad when the old one was gone.
    """
    asked = [one for one in asked if one.number]
    (new, old), (new_waited, old_waited) = (
        [[one for one in found if _is_new(switched, replicas, one) is side] for side in (True, False)]
        for found in (asked, waited)
    )
    steps = {one.at for one in new}
    beside = [one for one in old if one.at in steps]
    if _requests(beside) >= requests_min:
        old, old_waited = beside, [one for one in old_waited if one.at in steps]
    return _summed(new, new_waited), _summed(old, old_waited)


def _requests(asked: Sequence[Counted]) -> int:
    return round(sum(one.number for one in asked))


def _summed(asked: Sequence[Counted], waited: Sequence[Counted]) -> Traffic:
    requests, medians = _requests(asked), [one.number for one in waited]
    steps = len({(one.replica, one.at) for one in asked})
    return Traffic(
        requests=requests,
        errors=round(sum(one.number for one in asked if one.labels["result"] in FAILED)),
        ttft_seconds=sorted(medians)[len(medians) // 2] if medians else None,
        per_second=requests / (STEP * steps) if steps else 0.0,
    )


def _is_new(switched: Mapping[str, float], replicas: frozenset[str], one: Counted) -> bool | None:
    """Whether it is of the new revision; None if it counts for nobody."""
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
        if isinstance(value, int | float)  # requests are counted in whole numbers
    ]
