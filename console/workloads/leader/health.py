"""How requests fare with the new revision and with the old one, from what brains report."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from console.workloads.leader.verdicts import Z
from console.workloads.leader.world import Traffic
from inference_brain import metrics as brain
from telemetry.histogram import Histogram
from telemetry.metrics import Metric
from telemetry.queries import Fold, Question, Value, ask
from telemetry.topics import FLEET

SECONDS: Final = 300
STEP: Final = 10
SERIES_MAX: Final = 2_000
# By a fault of the replica, as far as brains know.
FAILED: Final = frozenset(
    {"error", "failed", "broken", brain.REFUSED, brain.REFUSED_AGAIN, brain.FULL, brain.UNANSWERED}
)
KNOWN: Final = FAILED | {"ok", "invalid", "rejected", "client_left", "client_slow"}


class Counted(NamedTuple):
    """Requests of one replica in one step."""

    replica: str
    at: float
    labels: Mapping[str, str]
    number: int


class Waited(NamedTuple):
    """Times to first token of one replica in one step: how many in each bucket of a histogram."""

    replica: str
    at: float
    counts: Sequence[int]


def traffic(
    model: str, switched: Mapping[str, float], replicas: frozenset[str], requests_min: int
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one, in the last five minutes."""
    end = time.time() // STEP * STEP
    asked = [
        Counted(replica, at, labels, round(number))
        for replica, at, labels, number in _told(
            question(model, brain.REPLICA_RESULTS, Fold.SUM, ("replica", "result"), end)
        )
        if isinstance(number, int | float)
    ]
    waited = [
        Waited(replica, at, counts)
        for replica, at, _, counts in _told(
            question(model, brain.REPLICA_TTFT, Fold.HEATMAP, ("replica",), end)
        )
        if isinstance(counts, list)
    ]
    return compared(asked, waited, switched, replicas, requests_min)


def compared(
    asked: Sequence[Counted],
    waited: Sequence[Waited],
    switched: Mapping[str, float],
    replicas: frozenset[str],
    requests_min: int,
) -> tuple[Traffic, Traffic]:
    """Of the new revision and of the old one. `asked`: requests, by replica and result; `waited`:
    times to first token, by replica.

    `switched`: since when the new one serves a replica; before that, and elsewhere, requests count for
    the old one; the step of a switch for nobody. Of the old one counts what came beside the new one, if
    that is enough: they had the same load then. Else all of it. Of the new one all counts: it may have
    become bad when the old one was gone. But not what others failed as well: it may be the request. Of
    what one org alone was refused no more counts than what was refused to one after the other. Of what
    a replica had no room for counts what is more than it served itself: one that is always full serves
    nothing, however much others of its revision serve.
    """
    # Brains of a later release may say what is not known here: whether it is a fault or not.
    asked = [one for one in asked if one.number and one.labels["result"] in KNOWN]

    def is_new(one: Counted | Waited) -> bool | None:
        return _is_new(switched, replicas, one)

    new, old = ([one for one in asked if is_new(one) is side] for side in (True, False))
    new_waited, old_waited = ([one for one in waited if is_new(one) is side] for side in (True, False))
    doubtful = {one.at for one in asked if _is_unanswered(one) and not is_new(one)}
    new = [one for one in new if not (_is_unanswered(one) and one.at in doubtful)]
    steps = {one.at for one in new}
    beside = _summed(
        [one for one in old if one.at in steps], [one for one in old_waited if one.at in steps]
    )
    is_enough = beside.requests >= requests_min
    return _summed(new, new_waited), beside if is_enough else _summed(old, old_waited)


def _is_unanswered(one: Counted) -> bool:
    return one.labels["result"] == brain.UNANSWERED


def _summed(asked: Sequence[Counted], waited: Sequence[Waited]) -> Traffic:
    ttft, results = Histogram(), Counter[str]()
    served, too_many = Counter[str](), Counter[str]()  # by replica
    for times in waited:
        ttft.add(Histogram(times.counts))
    for one in asked:
        result = one.labels["result"]
        results[result] += one.number
        if result == "ok":
            served[one.replica] += one.number
        elif result == brain.FULL:
            too_many[one.replica] += one.number
    refused = results[brain.REFUSED]
    results[brain.REFUSED_AGAIN] = again = min(results[brain.REFUSED_AGAIN], refused)
    results[brain.FULL] = full = (too_many - served).total()  # each at least 0
    requests, steps = results.total(), len({(one.replica, one.at) for one in asked})
    return Traffic(
        requests=requests,
        errors=sum(number for result, number in results.items() if result in FAILED),
        refused=refused + again + full,
        ttft_seconds=ttft.quantile(0.5),
        ttft_range=_range_of_median(ttft),
        per_second=requests / (STEP * steps) if steps else 0.0,
    )


def _range_of_median(ttft: Histogram) -> tuple[float, float] | None:
    """Between which times the median is, as far as so many of them can say."""
    if not ttft.count:
        return None
    spread = Z / (2 * math.sqrt(ttft.count))
    least, most = ttft.quantile(max(0.0, 0.5 - spread)), ttft.quantile(min(1.0, 0.5 + spread))
    return (least, most) if least is not None and most is not None else None


def _is_new(
    switched: Mapping[str, float], replicas: frozenset[str], one: Counted | Waited
) -> bool | None:
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


def _told(asked: Question) -> Iterator[tuple[str, float, Mapping[str, str], Value]]:
    """Replica, beginning of the step, labels and what it was."""
    found = ask(asked, time.time(), SERIES_MAX)
    for line in found.lines:
        for index, value in enumerate(line.values):
            yield line.labels.get("replica", ""), asked.start + index * STEP, line.labels, value
