"""What brains did in the last minutes, by org and by replica; from their telemetry."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from inference_brain import metrics as brain
from telemetry.metrics import Metric
from telemetry.queries import TOPIC, Fold, Question, ask
from telemetry.topics import FLEET, ORG

MINUTES: Final = 5
STEP: Final = 60
ROWS_MAX: Final = 100
SERIES_MAX: Final = 5_000
STATES: Final = {"ejected": "bad", "unreachable": "bad", "draining": "warn", "slow_start": "warn"}


@dataclass(frozen=True, slots=True)
class OrgRow:
    """Seconds are of the worst of the last minutes; None without requests."""

    org: str
    requests: int
    rejected: int
    queued: float
    queue_seconds: float | None
    ttft_seconds: float | None


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """`states`: of those brains that see it otherwise than ready, how many see it how."""

    model: str
    replica: str
    requests: int
    ttft_seconds: float | None
    error_seconds: float | None
    states: tuple[tuple[str, str, int], ...]  # look, state, brains


Key = tuple[str, ...]


def by_org(orgs: Iterable[str] | None) -> list[OrgRow]:
    """Those of these orgs, or of all, with most requests first."""
    wanted = None if orgs is None else {f"{ORG}:{slug}" for slug in orgs}
    topic = f"{ORG}:*"
    requests = _sums(topic, brain.REQUESTS, TOPIC)
    rejected = _sums(topic, brain.REJECTED, TOPIC)
    queued = _worst(topic, brain.QUEUED, Fold.TOTAL, TOPIC)
    waits = _worst(topic, brain.QUEUE, Fold.P99, TOPIC)
    ttft = _worst(topic, brain.TTFT, Fold.P99, TOPIC)
    found = {*requests, *queued} if wanted is None else {(one,) for one in wanted} & {*requests, *queued}
    rows = [
        OrgRow(
            org=key[0].removeprefix(f"{ORG}:"),
            requests=round(requests.get(key, 0)),
            rejected=round(rejected.get(key, 0)),
            queued=queued.get(key, 0),
            queue_seconds=waits.get(key),
            ttft_seconds=ttft.get(key),
        )
        for key in found
    ]
    return sorted(rows, key=lambda row: (-row.requests, row.org))[:ROWS_MAX]


def by_replica() -> list[ReplicaRow]:
    """Of all brains together, those that are not ready first."""
    labels = ("model", "replica")
    requests = _sums(FLEET, brain.REQUESTS, *labels)
    ttft = _worst(FLEET, brain.TTFT, Fold.P99, *labels)
    errors = _worst(FLEET, brain.ESTIMATE_ERROR, Fold.P50, *labels)
    states: dict[Key, list[tuple[str, str, int]]] = {}
    for (model, replica, state), brains in sorted(_now(brain.REPLICA_STATE, *labels, "state").items()):
        its = states.setdefault((model, replica), [])
        if state in STATES and brains >= 1:
            its.append((STATES[state], state.replace("_", " "), round(brains)))
    rows = [
        ReplicaRow(
            model=key[0],
            replica=key[1],
            requests=round(requests.get(key, 0)),
            ttft_seconds=ttft.get(key),
            error_seconds=errors.get(key),
            states=tuple(states.get(key, ())),
        )
        for key in {*requests, *states}
        if key[1]
    ]
    return sorted(rows, key=lambda row: (not row.states, row.model, row.replica))[:ROWS_MAX]


def expected_hits(org: str, seconds: int) -> dict[str, float]:
    """Prompt tokens of the org that brains expected in the caches of the replicas that they chose, by
    what clients call the model, in the last so many seconds."""
    found = _asked(f"{ORG}:{org}", brain.PREDICTED_HIT, Fold.SUM, ("model",), seconds)
    return {key[0]: sum(values) for key, values in found.items()}


def _sums(topic: str, metric: Metric, *by: str) -> dict[Key, float]:
    return {key: sum(values) for key, values in _asked(topic, metric, Fold.SUM, by).items()}


def _worst(topic: str, metric: Metric, fold: Fold, *by: str) -> dict[Key, float]:
    return {key: max(values) for key, values in _asked(topic, metric, fold, by).items() if values}


def _now(metric: Metric, *by: str) -> dict[Key, float]:
    """The newest value of each, of the last half minute."""
    found = _asked(FLEET, metric, Fold.TOTAL, by, seconds=30, step=10)
    return {key: values[-1] for key, values in found.items() if values}


def _asked(
    topic: str,
    metric: Metric,
    fold: Fold,
    by: tuple[str, ...],
    seconds: int = MINUTES * STEP,
    step: int = STEP,
) -> Mapping[Key, list[float]]:
    now = time.time()
    end = now // step * step
    question = Question(
        topic=topic, metric=metric, fold=fold, start=end - seconds, end=end, step=step, by=by
    )
    lines = ask(question, now, SERIES_MAX).lines
    return {tuple(line.labels.get(name, "") for name in by): line.numbers for line in lines}
