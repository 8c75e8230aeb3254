"""Condition on processes that have not applied their desired state. Pure.

It reads both their metrics and their answers to the console. A process that the console never reached
reports that it has applied its older generation; one that no longer answers may still report metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from console.alerts.conditions import metrics
from console.alerts.conditions.condition import (
    Condition,
    Finding,
    Snapshot,
    Tables,
    TargetState,
    ValuesOf,
    name_of,
)
from console.alerts.state.lifecycle import Verdict
from telemetry.units import duration


def not_applied(kind: str) -> Condition:
    """Breach for each process of a kind that is behind, or gives the console no valid answer."""
    by_metrics = metrics.behind(
        "desired", "observed", "{name} is behind its desired generation by {value:.0f}"
    )

    def condition(tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        found = {one.topic: one for one in by_metrics(tables, snapshot, values)}
        known = {topic for topic in snapshot.targets if topic.startswith(f"{kind}:")}
        for topic in sorted({*found, *known}):
            finding = found.get(topic) or Finding(topic, Verdict.OK, "it has applied its desired state")
            target = snapshot.targets.get(topic)
            yield _with_target(finding, target, snapshot.at) if target else finding

    return condition


def _with_target(finding: Finding, target: TargetState, now: datetime) -> Finding:
    """Adds what the console knows about the process, which may turn the finding into a breach."""
    late, name = target.desired - target.observed, name_of(finding.topic)
    if target.fault:
        sentence = f"{name} gives the console no valid answer: {target.problem.rstrip('.')}"
        finding = replace(finding, verdict=Verdict.BREACH, sentence=sentence)
    elif late > 0 and finding.verdict is Verdict.OK:
        sentence = f"{name} is behind its desired generation by {late}"
        finding = replace(finding, verdict=Verdict.BREACH, sentence=sentence, value=late, threshold=0)
    return replace(finding, evidence={**finding.evidence, **_evidence(target, now)})


def _evidence(target: TargetState, now: datetime) -> dict[str, Any]:
    return {
        "reason": target.problem,
        "fault": target.fault,
        "no_valid_answer_since": _moment(target.fault_since, now),
        "last_valid_answer": _moment(target.answered_at, now),
        "generation": f"{target.observed} of {target.desired}",
    }


def _moment(at: datetime | None, now: datetime) -> str | None:
    """A time with its age at this evaluation."""
    if at is None:
        return None
    seconds = max(0, round((now - at).total_seconds()))
    return f"{at:%Y-%m-%d %H:%M:%S} UTC, {duration(seconds)} ago"
