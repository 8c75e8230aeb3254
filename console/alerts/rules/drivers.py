"""Rules about drivers, and about the service that orgs get. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import generations, metrics, reporting
from console.alerts.rules.nodes import SILENT
from console.alerts.rules.rule import MetricQuery, Rule, Scope, Severity, Threshold, by_which
from telemetry.queries import Fold

HOUR, DAY = 3600, 86_400


def _latency(verb: str) -> Rule:
    metric = f"swdriver_{verb}_seconds"
    return Rule(
        slug=f"{verb}-slow",
        title=f"{verb.capitalize()} latency above objective",
        severity=Severity.PAGE,
        scope=Scope.ORG,
        description=f"Too many {verb}s are slower than the org's objective allows, and still are.",
        unit="seconds",
        suggested_fix="Check what changed on the path, and move the stream to a near, idle node.",
        runbook="evict-or-refill-slow.md",
        condition=metrics.burn_rate(
            f"{verb} {{percentile}} of {{name}} over {{window}} is {{value}} (objective {{limit}})"
        ),
        queries={
            "hour": MetricQuery(metric, Fold.HEATMAP, HOUR, step=60),
            "six_hours": MetricQuery(metric, Fold.HEATMAP, 6 * HOUR, step=300),
        },
        own_thresholds=(
            Threshold("objective_seconds", 0.25, "Latency objective.", low=1e-6, high=60),
            Threshold(
                "objective_share",
                0.99,
                "Share of requests that must meet the objective.",
                low=0.5,
                high=0.9999,
            ),
            Threshold(
                "burn_factor",
                1,
                "1 fires when the error budget of 30 days would be used up in two days; "
                "a higher value fires later.",
                low=0.1,
                high=100,
            ),
            Threshold("least_requests", 100, "Orgs with fewer requests in an hour are ignored."),
        ),
        keep_firing_seconds=120,
        every_seconds=60,
        prometheus=(f"Tidegate{verb.capitalize()}Slow",),
    )


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="driver-not-reporting",
        title="Driver not reporting",
        severity=Severity.TICKET,
        scope=Scope.DRIVER,
        description="A joined driver sends no telemetry. Its engine may recompute every prompt.",
        unit="seconds",
        suggested_fix="Restart the driver. If its job is finished, remove it from the fleet.",
        condition=reporting.not_reporting("driver", registered_only=True),
        own_thresholds=(SILENT,),
        pending_seconds=60,
        keep_firing_seconds=20,
        ignores_missing_data=True,
    ),
    Rule(
        slug="driver-behind",
        title="Driver has not applied its desired state",
        severity=Severity.TICKET,
        scope=Scope.DRIVER,
        description="A driver is behind its desired generation, or gives the console no valid answer.",
        unit="generations",
        suggested_fix="Act on the reason in the evidence. Until then the older policy stays active.",
        runbook="desired-not-applied.md",
        condition=generations.not_applied("driver"),
        queries=by_which(("desired", "observed"), "swdriver_generation", Fold.MAX, 30),
        pending_seconds=120,
        prometheus=("TidegateDriverBehind",),
    ),
    Rule(
        slug="driver-not-ready",
        title="Driver has lost a shard",
        severity=Severity.PAGE,
        scope=Scope.DRIVER,
        description="An agent is unreachable, or a shard is moving. Columns with a part there miss.",
        suggested_fix="Start the agent, or move the stream to another node. A move ends by itself.",
        condition=metrics.flag("ready", "a shard of {name} is lost or moving"),
        queries={"ready": MetricQuery("swdriver_ready", Fold.MAX, 30)},
        pending_seconds=120,
        prometheus=("TidegateDriverNotReady",),
    ),
    _latency("evict"),
    _latency("refill"),
    Rule(
        slug="hit-rate-drop",
        title="Hit rate dropped",
        severity=Severity.TICKET,
        scope=Scope.ORG,
        description="The hit rate of an org is far below its median of the last week.",
        unit="share",
        suggested_fix="Check why it misses, and what changed: a policy, a resize, or its prompts.",
        actions=("quota",),
        condition=metrics.drop,
        queries={
            "hit": MetricQuery("swdriver_hit_tokens_total", Fold.SUM, 900, step=60),
            "requested": MetricQuery("swdriver_requested_tokens_total", Fold.SUM, 900, step=60),
            "usual": MetricQuery(
                "swdriver_hit_tokens_total",
                Fold.RATIO,
                7 * DAY,
                over="swdriver_requested_tokens_total",
                step=HOUR,
                behind_seconds=HOUR,
            ),
        },
        own_thresholds=(
            Threshold("fall_share", 0.3, "Threshold: relative drop below the median.", low=0.01, high=1),
            Threshold(
                "least_tokens",
                10_000,
                "Orgs that request fewer tokens in 15 minutes are ignored.",
                low=1,
            ),
            Threshold(
                "least_hours", 6, "Orgs with fewer hours of traffic are ignored.", low=1, high=168
            ),
        ),
        pending_seconds=300,
        keep_firing_seconds=300,
        every_seconds=60,
    ),
    Rule(
        slug="ttl-exceeded",
        title="Columns kept past TTL",
        severity=Severity.PAGE,
        scope=Scope.DRIVER,
        description="A sweeper was late. Expired columns were not served, but stayed in memory.",
        unit="columns",
        suggested_fix="Restore the agent, or give the driver more CPU. Inform the org's admin.",
        condition=metrics.level(
            "columns", "columns", "{name} kept {value:,.0f} column{s} in memory past the TTL", of=sum
        ),
        queries={"columns": MetricQuery("swdriver_overstay_columns_total", Fold.SUM, 300)},
        own_thresholds=(Threshold("columns", 0, "Threshold: columns in five minutes."),),
        prometheus=("TidegateTtlExceeded",),
    ),
    Rule(
        slug="seal-refused",
        title="Seal check failed",
        severity=Severity.PAGE,
        scope=Scope.ORG,
        description="A slot did not contain the stored bytes, so nothing was served from it. The cause "
        "is a memory error or a driver bug.",
        unit="tokens",
        suggested_fix="Find the kind in the driver's log (corrupt, stale, foreign); see the runbook.",
        condition=metrics.level(
            "tokens", "tokens", "{value:,.0f} token{s} of {name} failed the seal check", of=sum
        ),
        queries={
            "tokens": MetricQuery(
                "swdriver_missed_tokens_total", Fold.SUM, 600, where={"reason": "seal_refused"}
            )
        },
        own_thresholds=(Threshold("tokens", 0, "Threshold: tokens in ten minutes."),),
        prometheus=("TidegateSealRefused",),
    ),
    Rule(
        slug="siblings-away",
        title="Siblings do not answer",
        severity=Severity.TICKET,
        scope=Scope.DRIVER,
        description="Prompts that were to be borrowed from siblings were computed, since those did not "
        "answer, or none of their bytes came.",
        unit="prompts",
        suggested_fix="Check that the driver reaches its siblings, and its nodes those of theirs.",
        condition=metrics.level(
            "away", "prompts", "siblings of {name} were away for {value:,.0f} prompt{s}", of=sum
        ),
        queries={"away": MetricQuery("swdriver_borrows_total", Fold.SUM, 600, where={"what": "away"})},
        own_thresholds=(Threshold("prompts", 20, "Threshold: prompts in ten minutes."),),
        pending_seconds=300,
        prometheus=("TidegateSiblingsAway",),
    ),
)
