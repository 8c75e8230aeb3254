"""Worlds and numbers to judge, and a rule that says what a test wants."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from console.alerts.life import Verdict
from console.alerts.rules import Finding, LimitsOf, Rule, Scope, Severity, Tables, World
from telemetry.queries import ResultSeries

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def world(seconds: float = 0, **heard: float) -> World:
    """Noon and so many seconds; who was heard how many seconds after noon, by node."""
    return World(
        at=at(seconds),
        heard={f"node:{name.replace('_', '-')}": at(when) for name, when in heard.items()},
    )


def line(topic: str, *values: Any, **labels: str) -> ResultSeries:
    return ResultSeries({"topic": topic, **labels}, list(values))


def judged(
    rule: Rule,
    tables: Mapping[str, list[ResultSeries]],
    now: World | None = None,
    limits: Mapping[str, float] | None = None,
) -> Any:
    """What the rule finds, with these of its limits."""
    values = {**rule.defaults, **(limits or {})}
    return list(rule.judge(tables, now or world(), lambda _topic: values))


class Told:
    """A judge that finds what it is told to, of topics."""

    def __init__(self, **verdicts: Verdict) -> None:
        self.verdicts = verdicts

    def __call__(self, _tables: Tables, _world: World, _limits: LimitsOf) -> list[Finding]:
        return [
            Finding(topic, verdict, f"{topic} is so", 1.0, 0.0)
            for topic, verdict in self.verdicts.items()
        ]


def rule_of(judge: Any, slug: str = "overstay", **more: Any) -> Rule:
    """A rule that has the name of a real one, and fires at once."""
    values = {"breach_seconds": 0, "fine_seconds": 0, "every_seconds": 10, "scope": Scope.FLEET, **more}
    return Rule(
        slug=slug,
        title="A test",
        severity=Severity.PAGE,
        means="",
        remedy="",
        runbook="overstay.md",
        judge=judge,
        **values,
    )
