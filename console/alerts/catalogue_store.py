"""Rules of agents and their disks. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts import judges, silence, standings
from console.alerts.judges import last
from console.alerts.rules import Limit, Reading, Rule, Scope, Severity
from console.alerts.silence import SILENT
from telemetry.queries import Fold

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="agent-silent",
        title="An agent is silent",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        means="Nothing has been heard of an agent, while others are heard. What it has is a miss.",
        remedy="Start the agent, or drain the node so that its shards get other homes.",
        runbook="agent-silent.md",
        fixes=("drain",),
        judge=silence.silent("node"),
        own_limits=(SILENT,),
        fine_seconds=20,
        outlives_silence=True,
        prometheus=("TidegateAgentSilent",),
    ),
    Rule(
        slug="leaf-down",
        title="A leaf is down",
        severity=Severity.PAGE,
        scope=Scope.LEAF,
        means="All nodes that have a NIC on a leaf are silent at once: it is the switch, or its power.",
        remedy="Look at the switch. Its nodes come back by themselves.",
        runbook="leaf-down.md",
        judge=silence.leaf_down,
        own_limits=(SILENT, Limit("least_nodes", 2, "A leaf with fewer tells nothing.", low=1)),
        fine_seconds=20,
        outlives_silence=True,
    ),
    Rule(
        slug="agent-not-ready",
        title="An agent is not what it was told to be",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        means="A shard was not granted its memory, or tier 2 can't be opened.",
        remedy="Give the machine memory, or the shards fewer slots; mend the path of tier 2.",
        runbook="agent-not-ready.md",
        fixes=("cordon", "drain"),
        judge=judges.flag("ready", "{name} is not what it was told to be"),
        readings={"ready": Reading(topic="node:*", metric="kvss_ready", fold=Fold.MAX, seconds=30)},
        breach_seconds=300,
        prometheus=("TidegateAgentNotReady",),
    ),
    Rule(
        slug="desired-not-applied",
        title="A document is not followed",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        means="An agent is not through with a newer document, or gives the console no valid answer.",
        remedy="Wait while its progress moves; otherwise do what the reason in the evidence says.",
        runbook="desired-not-applied.md",
        judge=standings.not_followed("desired", "observed", "node"),
        readings={
            which: Reading(
                topic="node:*",
                metric="kvss_generation",
                fold=Fold.MAX,
                seconds=30,
                where={"which": which},
            )
            for which in ("desired", "observed")
        },
        breach_seconds=120,
        prometheus=("TidegateDesiredNotApplied",),
    ),
    Rule(
        slug="queue-deep",
        title="Requests wait at a shard",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        means="Refills and deletes wait for evicts that have not been applied.",
        remedy="Move the shard to a node that is less busy. A driver that stopped is cut off by itself.",
        runbook="queue-deep.md",
        fixes=("cordon", "drain"),
        judge=judges.level(
            "waiting", "depth", "{value:,.0f} requests wait at shard {shard} of {name}", of=last
        ),
        readings={
            "waiting": Reading(
                topic="node:*",
                metric="kvss_shard_waiting_requests",
                fold=Fold.MAX,
                seconds=30,
                by=("shard",),
            )
        },
        own_limits=(Limit("depth", 1000, "More than so many."),),
        breach_seconds=120,
        prometheus=("TidegateQueueDeep",),
    ),
    Rule(
        slug="tier2-near-cap",
        title="Tier 2 is full",
        severity=Severity.TICKET,
        scope=Scope.NODE,
        means="The cap is never exceeded, but what is spilled displaces what was going to be hit.",
        remedy="Raise the cap, give the org that holds most one of its own, or shorten its TTL.",
        runbook="tier2-near-cap.md",
        judge=judges.share(
            "held",
            "cap",
            "full_share",
            "tier 2 of {name} is {value:.0%} full; {limit:.0%} is much",
            of=last,
        ),
        readings={
            which: Reading(
                topic="node:*",
                metric="kvss_tier2_bytes",
                fold=Fold.MAX,
                seconds=60,
                where={"tag": "", "which": which},
            )
            for which in ("held", "cap")
        },
        own_limits=(Limit("full_share", 0.95, "Of the cap.", low=0.1, high=1),),
        breach_seconds=900,
        prometheus=("TidegateTier2NearCap",),
    ),
    Rule(
        slug="tier2-faults",
        title="Disk or bucket of tier 2 fails",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        means="Reads or writes fail. What can't be read is a miss.",
        remedy="Make room, take the disk out of service, or mend the bucket's credentials.",
        runbook="tier2-faults.md",
        fixes=("cordon", "drain"),
        judge=judges.level("faults", "faults", "tier 2 of {name}: {value:,.0f} times {outcome}", of=sum),
        readings={
            "faults": Reading(
                topic="node:*",
                metric="kvss_tier2_faults_total",
                fold=Fold.SUM,
                seconds=300,
                by=("outcome",),
            )
        },
        own_limits=(Limit("faults", 0, "More than so many in five minutes."),),
        breach_seconds=300,
        fine_seconds=300,
        prometheus=("TidegateTier2Faults",),
    ),
)
