"""Rules about agents and their tier 2. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import generations, metrics, redundancy, reporting
from console.alerts.rules.rule import MetricQuery, Rule, Scope, Severity, Threshold, by_which
from telemetry.queries import Fold

SILENT: Final = Threshold(
    reporting.SILENT_SECONDS, 30, "Threshold: seconds without a report.", low=5, high=86_400
)

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="agent-not-reporting",
        title="Agent not reporting",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        description="An agent sends no telemetry while other processes do. If it is lost, its streams "
        "are placed on other nodes. Where that is impossible, an alert of the session pages.",
        unit="seconds",
        suggested_fix="Start the agent, or remove the node if the machine will not return.",
        actions=("drain",),
        condition=reporting.not_reporting("node"),
        own_thresholds=(SILENT,),
        keep_firing_seconds=20,
        ignores_missing_data=True,
        prometheus=("TidegateAgentNotReporting",),
    ),
    Rule(
        slug="lost-node-not-replaced",
        title="Lost node not replaced",
        severity=Severity.PAGE,
        scope=Scope.SESSION,
        description="A node is lost, and the session's streams there can't be placed on other nodes. "
        "Its drivers have no hits and store nothing.",
        suggested_fix="Start the agent, or act on the reason: add memory, change rules, drain the node.",
        actions=("drain",),
        condition=reporting.not_replaced,
        keep_firing_seconds=20,
        ignores_missing_data=True,
    ),
    Rule(
        slug="leaf-down",
        title="Leaf switch down",
        severity=Severity.PAGE,
        scope=Scope.LEAF,
        description="No node on this leaf is reporting. The cause is the switch or its power.",
        unit="nodes",
        suggested_fix="Check the switch. Its nodes recover without further action.",
        condition=reporting.leaf_down,
        own_thresholds=(SILENT, Threshold("least_nodes", 2, "Smaller leaves are ignored.", low=1)),
        keep_firing_seconds=20,
        ignores_missing_data=True,
    ),
    Rule(
        slug="agent-not-ready",
        title="Agent not ready",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        description="A shard did not get its memory, or tier 2 cannot be opened.",
        suggested_fix="Add memory to the machine, reduce the shards' slots, or fix the path of tier 2.",
        actions=("cordon", "drain"),
        condition=metrics.flag("ready", "{name} cannot apply its desired state"),
        queries={"ready": MetricQuery("kvss_ready", Fold.MAX, 30)},
        pending_seconds=300,
        prometheus=("TidegateAgentNotReady",),
    ),
    Rule(
        slug="desired-not-applied",
        title="Agent has not applied its desired state",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        description="An agent is behind its desired generation, or gives the console no valid answer.",
        unit="generations",
        suggested_fix="If its progress moves, wait. Otherwise act on the reason in the evidence.",
        condition=generations.not_applied("node"),
        queries=by_which(("desired", "observed"), "kvss_generation", Fold.MAX, 30),
        pending_seconds=120,
        prometheus=("TidegateDesiredNotApplied",),
    ),
    Rule(
        slug="queue-deep",
        title="Shard queue too deep",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        description="Refills and deletes at a shard wait for evicts that are not yet applied.",
        unit="requests",
        suggested_fix="Move the stream to a less busy node. The agent disconnects stalled drivers.",
        actions=("cordon", "drain"),
        condition=metrics.level(
            "waiting",
            "depth",
            "{value:,.0f} request{s} waiting at shard {shard} of {name}",
            of=metrics.newest,
        ),
        queries={"waiting": MetricQuery("kvss_shard_waiting_requests", Fold.MAX, 30, by=("shard",))},
        own_thresholds=(Threshold("depth", 1000, "Threshold: requests waiting at a shard."),),
        pending_seconds=120,
        prometheus=("TidegateQueueDeep",),
    ),
    Rule(
        slug="tier2-near-cap",
        title="Tier 2 nearly full",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        description="The cap is never exceeded, but new spills displace columns that would be hit.",
        unit="share",
        suggested_fix="Raise the cap, cap the org that uses most, or shorten its TTL.",
        condition=metrics.share(
            "held",
            "cap",
            "full_share",
            "tier 2 of {name} is {percent} full (threshold {limit_percent})",
            of=metrics.newest,
        ),
        queries=by_which(("held", "cap"), "kvss_tier2_bytes", Fold.MAX, tag=""),
        own_thresholds=(
            Threshold("full_share", 0.95, "Threshold: used share of the cap.", low=0.1, high=1),
        ),
        pending_seconds=900,
        prometheus=("TidegateTier2NearCap",),
    ),
    Rule(
        slug="tier2-faults",
        title="Tier 2 read or write errors",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        description="Reads or writes of tier 2 fail. A column that cannot be read is a miss.",
        unit="errors",
        suggested_fix="Free disk space, replace the disk, or fix the credentials of the bucket.",
        actions=("cordon", "drain"),
        condition=metrics.level(
            "faults", "faults", "{value:,.0f} tier 2 error{s} on {name}: {outcome}", of=sum
        ),
        queries={"faults": MetricQuery("kvss_tier2_faults_total", Fold.SUM, 300, by=("outcome",))},
        own_thresholds=(Threshold("faults", 0, "Threshold: errors in five minutes."),),
        pending_seconds=300,
        keep_firing_seconds=300,
        prometheus=("TidegateTier2Faults",),
    ),
    Rule(
        slug="tier2-front-waiting",
        title="Columns not copied to tier 2",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        description="Columns wait in the directory in front of tier 2, since the store behind it does "
        "not take them. They are served, and lost if that disk is lost.",
        unit="seconds",
        suggested_fix="Bring the store back, or find out why it is slower than what is written.",
        condition=metrics.level(
            "waiting",
            "seconds",
            "a column has waited for {value:,.0f} s in front of tier 2 of {name}",
            of=metrics.newest,
        ),
        queries={"waiting": MetricQuery("kvss_tier2_front_waiting_seconds", Fold.MAX, 30)},
        own_thresholds=(
            Threshold("seconds", 900, "Threshold: seconds that the oldest column has waited.", low=10),
        ),
        pending_seconds=60,
        prometheus=("TidegateTier2FrontWaiting",),
    ),
    Rule(
        slug="redundancy-degraded",
        title="Redundancy degraded",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        description="Agents that store fragments can't be reached, or columns lack a fragment. They can "
        "still be recalled; the loss of another agent may lose them.",
        unit="columns or agents",
        suggested_fix="Start the agents that can't be reached, or remove them. Else wait for repair.",
        condition=metrics.first_breach(
            metrics.level(
                "unreachable",
                "agents",
                "{name} can't reach {value:,.0f} agent{s} with fragments of {shard}",
                of=metrics.newest,
            ),
            metrics.level(
                "incomplete",
                "columns",
                "{value:,.0f} column{s} of {shard} on {name} lack{third} a fragment",
                of=metrics.newest,
            ),
        ),
        queries={
            "unreachable": MetricQuery(
                "kvss_redundancy_unreachable_holders", Fold.MAX, 30, by=("shard",)
            ),
            "incomplete": MetricQuery("kvss_redundancy_incomplete_columns", Fold.MAX, 30, by=("shard",)),
        },
        own_thresholds=(
            Threshold("agents", 0, "Threshold: agents with fragments that can't be reached."),
            Threshold("columns", 0, "Threshold: columns that lack a fragment."),
        ),
        pending_seconds=600,
        prometheus=("TidegateRedundancyDegraded",),
    ),
    Rule(
        slug="redundancy-not-kept",
        title="Redundancy not kept",
        severity=Severity.TICKET,
        scope=Scope.FLEET,
        description="Session rules ask for redundancy of tier 2, and columns are stored without it: too "
        "few agents can store fragments, or be reached, or links have no room. The loss of a disk loses "
        "such columns.",
        unit="shards or columns",
        suggested_fix="Add nodes with tier 2 on a disk of their own, or choose a redundancy that needs "
        "fewer. Start the agents that can't be reached. Give moves a larger part of links.",
        page="session-rules",
        condition=redundancy.not_kept,
        queries={
            "alone": MetricQuery(
                "kvss_redundancy_stored_alone_total", Fold.SUM, 300, by=("why",), topic="node:*"
            )
        },
        own_thresholds=(
            Threshold("columns", 0, "Threshold: columns that an agent stored alone in five minutes."),
        ),
        pending_seconds=300,
        keep_firing_seconds=300,
        ignores_missing_data=True,
        prometheus=("TidegateRedundancyNotKept",),
    ),
)
