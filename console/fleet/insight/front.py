"""What the directory in front of a node's tier 2 has alone, as its agent has told last."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from console.fleet.models import Node
from kvss_agent.metrics import TIER2_FRONT, TIER2_WAITING, TIER2_WAITING_SECONDS
from telemetry.metrics import Metric
from telemetry.queries import Fold, Question, ask
from telemetry.topics import of_source

SPAN: Final = timedelta(minutes=2)  # what is older than that is not known to be so now


@dataclass(frozen=True, slots=True)
class Waiting:
    columns: int
    bytes: int
    since: datetime | None  # of the oldest; None: they wait until they make room


def waiting_of(node: Node, now: datetime) -> Waiting | None:
    """None: it has no directory in front, or its agent tells nothing."""
    if "front" not in node.declared.get("tier2", {}):
        return None
    columns = _last(node, TIER2_WAITING, now)
    if columns is None:
        return None
    seconds = _last(node, TIER2_WAITING_SECONDS, now)
    return Waiting(
        columns=round(columns),
        bytes=round(_last(node, TIER2_FRONT, now, which="waiting") or 0),
        since=None if seconds is None else now - timedelta(seconds=seconds),
    )


def _last(node: Node, metric: Metric, now: datetime, **where: str) -> float | None:
    question = Question(
        topic=of_source("agent", node.name),
        metric=metric,
        fold=Fold.MAX,
        start=(now - SPAN).timestamp(),
        end=now.timestamp(),
        step=10,
        where=where,
    )
    known = [value for line in ask(question, now.timestamp()).lines for value in line.numbers]
    return known[-1] if known else None
