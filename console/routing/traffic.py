"""What brains did in the last minutes, by org and by replica; from their telemetry."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from console.metrics.services import existing_topics
from inference_brain import metrics as brain
from telemetry.metrics import Metric
from telemetry.queries import TOPIC, Fold, Question, ask
from telemetry.topics import FLEET, ORG, of_org

MINUTES: Final = 5
STEP: Final = 60
ROWS_MAX: Final = 100  # of a table; how many more there are is said
SERIES_MAX: Final = 5_000
READY: Final = "ready"
LOOKS: Final = {"draining": "warn", "slow_start": "warn"}  # of states; of others it is bad


Key = tuple[str, ...]
State = tuple[str, str, int]  # look, state, brains


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
    """`states`: of those brains that see it otherwise than ready, how many see it how. None: no brain
    reports it just now."""

    model: str
    replica: str
    requests: int
    ttft_seconds: float | None
    error_seconds: float | None
    states: list[State] | None


def by_org(orgs: Iterable[str] | None) -> list[OrgRow]:
    """Those of these orgs, or of all, with most requests first. Raises Unanswerable."""
    every = f"{ORG}:*"
    topics = existing_topics(every) if orgs is None else tuple(map(of_org, orgs))
    of = partial(_asked, every, by=(TOPIC,), topics=topics)
    requests = _sums(of(brain.REQUESTS, Fold.SUM))
    rejected = _sums(of(brain.REJECTED, Fold.SUM))
    queued = _worst(of(brain.QUEUED, Fold.TOTAL))
    waits = _worst(of(brain.QUEUE, Fold.P99))
    ttft = _worst(of(brain.TTFT, Fold.P99))
    rows = [
        OrgRow(
            org=key[0].removeprefix(f"{ORG}:"),
            requests=round(requests.get(key, 0)),
            rejected=round(rejected.get(key, 0)),
            queued=queued.get(key, 0),
            queue_seconds=waits.get(key),
            ttft_seconds=ttft.get(key),
        )
        for key in {*requests, *queued}
    ]
    return sorted(rows, key=lambda row: (-row.requests, row.org))


def by_replica() -> list[ReplicaRow]:
    """Of all brains together, those that are not ready first. Raises Unanswerable."""
    labels = ("model", "replica")
    of = partial(_asked, FLEET, by=labels)
    requests = _sums(of(brain.REPLICA_RESULTS, Fold.SUM))
    ttft = _worst(of(brain.REPLICA_TTFT, Fold.P99))
    errors = _worst(of(brain.ESTIMATE_ERROR, Fold.P50))
    states = states_by_replica()
    rows = [
        ReplicaRow(
            model=key[0],
            replica=key[1],
            requests=round(requests.get(key, 0)),
            ttft_seconds=ttft.get(key),
            error_seconds=errors.get(key),
            states=states.get(key),
        )
        for key in {*requests, *states}
    ]
    return sorted(rows, key=lambda row: (not row.states, row.model, row.replica))


def states_by_replica() -> dict[Key, list[State]]:
    """By model and replica, of those that any brain reports just now. Raises Unanswerable."""
    found: dict[Key, list[State]] = {}
    of = ("model", "replica", "state")
    for (model, replica, state), brains in sorted(_now(brain.REPLICA_STATE, *of).items()):
        its = found.setdefault((model, replica), [])
        if state != READY and brains >= 1:
            its.append((LOOKS.get(state, "bad"), state.replace("_", " "), round(brains)))
    return found


def expected_hits(org: str, seconds: int) -> dict[str, float]:
    """Prompt tokens of the org that brains expected in the caches of the replicas that they chose, by
    what clients call the model, in the last so many seconds. Raises Unanswerable."""
    found = _asked(of_org(org), brain.PREDICTED_HIT, Fold.SUM, ("model",), seconds)
    return {key[0]: sum(values) for key, values in found.items()}


def _sums(found: Mapping[Key, list[float]]) -> dict[Key, float]:
    return {key: sum(values) for key, values in found.items()}


def _worst(found: Mapping[Key, list[float]]) -> dict[Key, float]:
    return {key: max(values) for key, values in found.items() if values}


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
    topics: tuple[str, ...] | None = None,
) -> Mapping[Key, list[float]]:
    now = time.time()
    end = now // step * step
    question = Question(
        topic=topic,
        topics=topics,
        metric=metric,
        fold=fold,
        start=end - seconds,
        end=end,
        step=step,
        by=by,
    )
    lines = ask(question, now, SERIES_MAX).lines
    return {tuple(line.labels.get(name, "") for name in by): line.numbers for line in lines}
