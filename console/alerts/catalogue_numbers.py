"""Rules of the numbers themselves. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts import silence
from console.alerts.rules import Limit, Rule, Scope, Severity

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="numbers-late",
        title="What the console shows is old",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        means="Records wait in Redis, or roll-ups stand still. Until then nobody knows how things are.",
        remedy="Start ingest, or another one beside it; see what PostgreSQL waits for.",
        runbook="numbers-late.md",
        judge=silence.numbers_late,
        own_limits=(Limit("late_seconds", 60, "More than so many.", low=5, high=86_400),),
        outlives_silence=True,
        prometheus=("TidegateNumbersLate",),
    ),
    Rule(
        slug="numbers-missing",
        title="Numbers are missing",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        means="Records of processes that are alive have not arrived: sums over that time are too low.",
        remedy="Mend what was away. The numbers of that time are gone.",
        runbook="numbers-missing.md",
        judge=silence.numbers_missing,
        breach_seconds=900,
        outlives_silence=True,
        prometheus=("TidegateNumbersMissing",),
    ),
)
