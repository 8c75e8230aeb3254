"""Rules of drivers, and of what orgs get. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts import judges, silence, standings
from console.alerts.rules import Limit, Reading, Rule, Scope, Severity
from console.alerts.silence import SILENT
from telemetry.queries import Fold

HOUR, DAY = 3600, 86_400


def _latency(verb: str) -> Rule:
    metric = f"swdriver_{verb}_seconds"
    return Rule(
        slug=f"{verb}-slow",
        title=f"{verb.capitalize()}s are slow",
        severity=Severity.PAGE,
        scope=Scope.ORG,
        means=f"More {verb}s take too long than the objective allows, and it goes on.",
        remedy="Move the shard to a node that is near and idle; look for what changed on its path.",
        runbook="evict-or-refill-slow.md",
        judge=judges.burning(
            "hour",
            "six_hours",
            f"{verb} p99 of {{name}} is {{value:.3g}} s; {{limit:.3g}} s is promised",
        ),
        readings={
            "hour": Reading(topic="org:*", metric=metric, fold=Fold.HEATMAP, seconds=HOUR, step=60),
            "six_hours": Reading(
                topic="org:*", metric=metric, fold=Fold.HEATMAP, seconds=6 * HOUR, step=300
            ),
        },
        own_limits=(
            Limit("objective_seconds", 0.25, "What is fast enough.", low=1e-6, high=60),
            Limit("objective_share", 0.99, "How many have to be.", low=0.5, high=0.9999),
            Limit(
                "burn_factor",
                1,
                "1: for a budget of 30 days that would be gone in two. More is more patient.",
                low=0.1,
                high=100,
            ),
            Limit("least_requests", 100, "In an hour; of fewer nothing is said."),
        ),
        fine_seconds=120,
        every_seconds=60,
        prometheus=(f"Tidegate{verb.capitalize()}Slow",),
    )


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="driver-silent",
        title="A driver is silent",
        severity=Severity.TICKET,
        scope=Scope.DRIVER,
        means="Nothing has been heard of a driver that is registered. Its engine computes all anew.",
        remedy="Start it again; if its job is over, remove it from the fleet.",
        runbook="driver-silent.md",
        judge=silence.silent("driver", registered_only=True),
        own_limits=(SILENT,),
        breach_seconds=60,
        fine_seconds=20,
        outlives_silence=True,
    ),
    Rule(
        slug="driver-behind",
        title="A driver does not follow its document",
        severity=Severity.TICKET,
        scope=Scope.DRIVER,
        means="A driver does not follow a newer document, or gives the console no valid answer.",
        remedy="Do what the reason in the evidence says; until then the older policy is in force there.",
        runbook="desired-not-applied.md",
        judge=standings.not_followed("desired", "observed", "driver"),
        readings={
            which: Reading(
                topic="driver:*",
                metric="swdriver_generation",
                fold=Fold.MAX,
                seconds=30,
                where={"which": which},
            )
            for which in ("desired", "observed")
        },
        breach_seconds=120,
        prometheus=("TidegateDriverBehind",),
    ),
    Rule(
        slug="driver-not-ready",
        title="A driver has lost a shard",
        severity=Severity.PAGE,
        scope=Scope.DRIVER,
        means="An agent can't be reached, or a shard is on its way. What has a part there is a miss.",
        remedy="Start the agent, or give the shard another home. A move ends by itself.",
        runbook="driver-not-ready.md",
        judge=judges.flag("ready", "a shard of {name} is lost or on its way"),
        readings={
            "ready": Reading(topic="driver:*", metric="swdriver_ready", fold=Fold.MAX, seconds=30)
        },
        breach_seconds=120,
        prometheus=("TidegateDriverNotReady",),
    ),
    _latency("evict"),
    _latency("refill"),
    Rule(
        slug="hit-rate-drop",
        title="Far fewer hits than usual",
        severity=Severity.TICKET,
        scope=Scope.ORG,
        means="An org's hit rate is far below what it was in most hours of the last week.",
        remedy="Look at the reasons of its misses, and what changed: a policy, a resize, its prompts.",
        runbook="hit-rate-drop.md",
        fixes=("quota",),
        judge=judges.fallen(
            "hit",
            "requested",
            "usual",
            "{name} hits {value:.0%} of its tokens; {usual:.0%} is usual",
        ),
        readings={
            "hit": Reading(
                topic="org:*", metric="swdriver_hit_tokens_total", fold=Fold.SUM, seconds=900, step=60
            ),
            "requested": Reading(
                topic="org:*",
                metric="swdriver_requested_tokens_total",
                fold=Fold.SUM,
                seconds=900,
                step=60,
            ),
            "usual": Reading(
                topic="org:*",
                metric="swdriver_hit_tokens_total",
                fold=Fold.RATIO,
                over="swdriver_requested_tokens_total",
                seconds=7 * DAY,
                step=HOUR,
                behind_seconds=HOUR,
            ),
        },
        own_limits=(
            Limit("fall_share", 0.3, "A breach is so much below the usual.", low=0.01, high=1),
            Limit(
                "least_tokens", 10_000, "Asked for in a quarter of an hour; of fewer nothing is said."
            ),
            Limit("least_hours", 6, "With traffic, before anything is usual.", low=1, high=168),
        ),
        breach_seconds=300,
        fine_seconds=300,
        every_seconds=60,
    ),
    Rule(
        slug="overstay",
        title="Columns lay beyond their time",
        severity=Severity.PAGE,
        scope=Scope.DRIVER,
        means="A sweeper was late. Nothing was served, but bytes lay in memory for too long.",
        remedy="Bring the agent back, or give the driver CPU. Tell the org's admin how long it was.",
        runbook="overstay.md",
        judge=judges.level(
            "columns",
            "columns",
            "{value:,.0f} columns of {name} lay in memory beyond their time",
            of=sum,
        ),
        readings={
            "columns": Reading(
                topic="driver:*", metric="swdriver_overstay_columns_total", fold=Fold.SUM, seconds=300
            )
        },
        own_limits=(Limit("columns", 0, "More than so many in five minutes."),),
        prometheus=("TidegateOverstay",),
    ),
    Rule(
        slug="seal-refused",
        title="A slot had other bytes than were stored",
        severity=Severity.PAGE,
        scope=Scope.ORG,
        means="A seal did not hold, so nothing was served: a memory error, or a fault of a driver.",
        remedy="See in the logs whether it is corrupt, stale or foreign, and do what the page says.",
        runbook="seal-refused.md",
        judge=judges.level(
            "tokens", "tokens", "{value:,.0f} tokens of {name} were not what had been stored", of=sum
        ),
        readings={
            "tokens": Reading(
                topic="org:*",
                metric="swdriver_missed_tokens_total",
                fold=Fold.SUM,
                seconds=600,
                where={"reason": "seal_refused"},
            )
        },
        own_limits=(Limit("tokens", 0, "More than so many in ten minutes."),),
        prometheus=("TidegateSealRefused",),
    ),
)
