"""Worlds and numbers to judge, and a rule that says what a test wants."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from console.alerts.conditions.condition import Finding, Snapshot, Tables, ValuesOf
from console.alerts.rules.rule import Rule, Scope, Severity
from console.alerts.state.lifecycle import Verdict
from telemetry.queries import ResultSeries

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def world(seconds: float = 0, **heard: float) -> Snapshot:
    """Noon and so many seconds; who was heard how many seconds after noon, by node."""
    return Snapshot(
        at=at(seconds),
        last_seen={f"node:{name.replace('_', '-')}": at(when) for name, when in heard.items()},
    )


def line(topic: str, *values: Any, **labels: str) -> ResultSeries:
    return ResultSeries({"topic": topic, **labels}, list(values))


def judged(
    rule: Rule,
    tables: Mapping[str, list[ResultSeries]],
    now: Snapshot | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Any:
    """What the rule finds, with these of its thresholds."""
    values = {**rule.defaults, **(thresholds or {})}
    return list(rule.condition(tables, now or world(), lambda _topic: values))


class StaticCondition:
    """A judge that finds what it is told to, of topics."""

    def __init__(self, **verdicts: Verdict) -> None:
        self.verdicts = verdicts

    def __call__(self, _tables: Tables, _snapshot: Snapshot, _values: ValuesOf) -> list[Finding]:
        return [
            Finding(topic, verdict, f"{topic} is so", 1.0, 0.0)
            for topic, verdict in self.verdicts.items()
        ]


def rule_of(judge: Any, slug: str = "ttl-exceeded", **more: Any) -> Rule:
    """A rule that has the name of a real one, and fires at once."""
    values = {
        "pending_seconds": 0,
        "keep_firing_seconds": 0,
        "every_seconds": 10,
        "scope": Scope.FLEET,
        **more,
    }
    return Rule(
        slug=slug,
        title="A test",
        severity=Severity.PAGE,
        description="",
        suggested_fix="",
        runbook="ttl-exceeded.md",
        condition=judge,
        **values,
    )
