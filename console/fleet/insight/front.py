"""What the directory in front of a node's tier 2 has alone, as its agent has told last."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from console.fleet.models import Node
from kvss_agent.metrics import TIER2_FRONT, TIER2_WAITING, TIER2_WAITING_SECONDS
from telemetry.metrics import Metric
from telemetry.queries import Fold, Question, ask
from telemetry.topics import of_source

SPAN: Final = timedelta(minutes=2)  # what is older than that is not known to be so now
STEP: Final = 10  # seconds


@dataclass(frozen=True, slots=True)
class Waiting:
    columns: int
    bytes: int
    since: datetime | None  # of the oldest; None: they wait until they make room
    at: datetime  # when its agent told so


def waiting_of(node: Node, now: datetime) -> Waiting | None:
    """None: it has no directory in front, or its agent tells nothing."""
    if "front" not in node.declared.get("tier2", {}):
        return None
    columns = _last(node, TIER2_WAITING, now)
    if columns is None:
        return None
    seconds = _last(node, TIER2_WAITING_SECONDS, now)
    size = _last(node, TIER2_FRONT, now, which="waiting")
    return Waiting(
        columns=round(columns.value),
        bytes=round(size.value) if size else 0,
        since=seconds and seconds.at - timedelta(seconds=seconds.value),
        at=columns.at,
    )


class _Told(NamedTuple):
    value: float
    at: datetime


def _last(node: Node, metric: Metric, now: datetime, **where: str) -> _Told | None:
    question = Question(
        topic=of_source("agent", node.name),
        metric=metric,
        fold=Fold.MAX,
        start=(now - SPAN).timestamp(),
        end=now.timestamp(),
        step=STEP,
        where=where,
    )
    answer = ask(question, now.timestamp())
    found = [
        _Told(float(value), min(now, datetime.fromtimestamp(begin + STEP, UTC)))
        for line in answer.lines
        for begin, value in zip(answer.times, line.values, strict=False)
        if isinstance(value, int | float)
    ]
    return max(found, key=lambda one: one.at, default=None)
