"""Rules about brains, and about how requests are routed. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import generations, metrics, replicas, reporting
from console.alerts.rules.nodes import SILENT
from console.alerts.rules.rule import (
    MetricQuery,
    Rule,
    Scope,
    Severity,
    Threshold,
    by_which,
    mean_and_count,
)
from telemetry.queries import Fold

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="brain-not-reporting",
        title="Brain not reporting",
        severity=Severity.PAGE,
        scope=Scope.BRAIN,
        description="A joined brain sends no telemetry. Its clients may get no answers.",
        unit="seconds",
        suggested_fix="Restart the brain. If its process has ended for good, remove it.",
        page="routing-brains",
        condition=reporting.not_reporting("brain", registered_only=True),
        own_thresholds=(SILENT,),
        pending_seconds=60,
        keep_firing_seconds=20,
        ignores_missing_data=True,
    ),
    Rule(
        slug="brain-behind",
        title="Brain has not applied its desired state",
        severity=Severity.TICKET,
        scope=Scope.BRAIN,
        description="A brain is behind its desired generation, or gives the console no valid answer: "
        "it serves with older keys, limits and replicas.",
        unit="generations",
        suggested_fix="Act on the reason in the evidence.",
        runbook="desired-not-applied.md",
        condition=generations.not_applied("brain"),
        queries=by_which(("desired", "observed"), "brain_generation", Fold.MAX, 30),
        pending_seconds=120,
        prometheus=("TidegateBrainBehind",),
    ),
    Rule(
        slug="estimate-off",
        title="Estimates of the first token are off",
        severity=Severity.TICKET,
        scope=Scope.BRAIN,
        description="A brain expects first tokens much sooner or later than they come, so it may choose "
        "the wrong replica.",
        unit="share",
        suggested_fix="Look at the error by replica, and for what else uses the slow one.",
        page="routing",
        condition=metrics.share_of_means(
            "error",
            "ttft",
            "error_share",
            "estimates of {name} for {model} are off by {percent} of the time to first token",
            least="least_seconds",
            least_count="least_requests",
        ),
        queries={
            **mean_and_count("error", "brain_estimate_error_seconds", 300, by=("model",)),
            **mean_and_count("ttft", "brain_ttft_seconds", 300, by=("model",)),
        },
        own_thresholds=(
            Threshold("error_share", 0.5, "Threshold: mean error over mean time to first token."),
            Threshold("least_seconds", 0.05, "Shorter times to first token are ignored."),
            # As many as the brain itself wants to have seen before it calls its estimates off.
            Threshold("least_requests", 32, "Fewer requests in five minutes are ignored."),
        ),
        pending_seconds=300,
        keep_firing_seconds=300,
        every_seconds=60,
        prometheus=("TidegateEstimateOff",),
    ),
    Rule(
        slug="routing-unfair",
        title="Orgs are served unfairly",
        severity=Severity.TICKET,
        scope=Scope.BRAIN,
        description="One of two orgs that both have queued requests has been served far more than its "
        "weight allows.",
        unit="tokens",
        suggested_fix="Check that all brains reach Redis, and the limits of the orgs with queues.",
        page="routing",
        condition=metrics.level(
            "gap",
            "gap_tokens",
            "{name} has served one org {value:,.0f} weighted tokens more than another",
        ),
        queries={"gap": MetricQuery("brain_fairness_gap_tokens", Fold.MAX, 60)},
        own_thresholds=(
            Threshold("gap_tokens", 500_000, "Threshold: difference of weighted tokens served."),
        ),
        pending_seconds=120,
        prometheus=("TidegateRoutingUnfair",),
    ),
    Rule(
        slug="queue-past-deadline",
        title="Requests waited past their deadline",
        severity=Severity.PAGE,
        scope=Scope.ORG,
        description="Requests of an org got 503: they were queued for as long as its limits allow.",
        unit="requests",
        suggested_fix="Add replicas, or raise the org's weight; see what fills the queue.",
        page="routing",
        condition=metrics.level(
            "late", "requests", "{value:,.0f} requests of {name} waited past their deadline", of=sum
        ),
        queries={
            "late": MetricQuery(
                "brain_rejected_requests_total", Fold.SUM, 300, where={"reason": "deadline"}
            )
        },
        own_thresholds=(Threshold("requests", 10, "Threshold: requests in five minutes."),),
        keep_firing_seconds=120,
        prometheus=("TidegateQueuePastDeadline",),
    ),
    Rule(
        slug="replica-ejected",
        title="Replica is ejected",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="Brains leave a replica out, because it fails or can't be reached. The others carry "
        "its requests.",
        unit="brains",
        suggested_fix="See the engine's log. Drain or remove the replica if it will not return.",
        page="routing-models",
        condition=replicas.left_out,
        queries={
            "states": MetricQuery(
                "brain_replica_state", Fold.TOTAL, 60, by=("model", "replica", "state")
            )
        },
        own_thresholds=(Threshold("brains", 0.5, "Threshold: brains that leave it out, on average."),),
        pending_seconds=60,
        prometheus=("TidegateReplicaEjected",),
    ),
    Rule(
        slug="map-stale",
        title="Cache map is stale",
        severity=Severity.TICKET,
        scope=Scope.BRAIN,
        description="A brain has not received a driver's cache map for a while, and uses the last one.",
        unit="seconds",
        suggested_fix="Check that the driver and the brain reach Redis, and that the driver is running.",
        page="routing-brains",
        condition=metrics.level(
            "age",
            "stale_seconds",
            "the map of {driver} at {name} is {value:.0f} s old",
            of=metrics.newest,
        ),
        queries={"age": MetricQuery("brain_map_age_seconds", Fold.MAX, 30, by=("driver",))},
        own_thresholds=(Threshold("stale_seconds", 30, "Threshold: age of the map."),),
        pending_seconds=30,
        prometheus=("TidegateMapStale",),
    ),
)
