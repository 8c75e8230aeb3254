"""Rules of the numbers themselves. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts import judges, silence
from console.alerts.rules import Limit, Reading, Rule, Scope, Severity
from telemetry.queries import Fold

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
    Rule(
        slug="numbers-refused",
        title="Numbers can't be stored",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        means="Telemetry of a process was set aside: it makes no sense, or is more than its share.",
        remedy="See on the page “Dead letters” which process it is, and why.",
        page="dead-letters",
        runbook="numbers-refused.md",
        judge=judges.level(
            "refused", "refused", "{value:,.0f} records or series could not be stored", of=sum
        ),
        readings={
            "refused": Reading(
                topic="fleet", metric="telemetry_dead_letters_total", fold=Fold.SUM, seconds=600
            )
        },
        own_limits=(Limit("refused", 0, "More than so many in ten minutes."),),
        prometheus=("TidegateNumbersRefused",),
    ),
)
