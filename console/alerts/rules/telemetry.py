"""Rules about telemetry itself. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import metrics, reporting
from console.alerts.rules.rule import MetricQuery, Rule, Scope, Severity, Threshold
from telemetry.queries import Fold

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="telemetry-late",
        title="Telemetry is late",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="Records wait in Redis, or roll-ups are behind. The console shows old data.",
        unit="seconds",
        suggested_fix="Start ingest, or a second one; check what PostgreSQL waits for.",
        condition=reporting.telemetry_late,
        own_thresholds=(Threshold("late_seconds", 60, "Threshold: lag.", low=5, high=86_400),),
        ignores_missing_data=True,
        prometheus=("TidegateTelemetryLate",),
    ),
    Rule(
        slug="telemetry-missing",
        title="Telemetry records missing",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="Records of running processes have not arrived. Sums over that time are too low.",
        unit="records",
        suggested_fix="Fix what was down. The metrics of that time are lost.",
        condition=reporting.telemetry_missing,
        pending_seconds=900,
        ignores_missing_data=True,
        prometheus=("TidegateTelemetryMissing",),
    ),
    Rule(
        slug="telemetry-rejected",
        title="Telemetry rejected",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="Telemetry of a process was not stored: it is invalid, or over quota.",
        unit="records or series",
        suggested_fix="See the page “Dead letters” for the process and the cause.",
        page="dead-letters",
        condition=metrics.level(
            "rejected", "rejected", "{value:,.0f} records or series were rejected", of=sum
        ),
        queries={"rejected": MetricQuery("telemetry_dead_letters_total", Fold.SUM, 600)},
        own_thresholds=(Threshold("rejected", 0, "Threshold: records or series in ten minutes."),),
        prometheus=("TidegateTelemetryRejected",),
    ),
)
