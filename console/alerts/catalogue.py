"""The rules that there are, with what they begin with. docs/alerts.md has the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from console.alerts import judges, silence, spine
from console.alerts.judges import last
from console.alerts.rules import Limit, Reading, Rule, Scope, Severity
from telemetry.queries import Fold

SILENT = Limit("silent_seconds", 30, "From how long a silence on.", low=5, high=86_400)
HOUR, DAY = 3600, 86_400
PATH_BYTES: Final = "tidegate_driver_path_bytes_total"


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
        slug="agent-silent",
        title="An agent is silent",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        means="Nothing has been heard of an agent, while others are heard. What it has is a miss.",
        remedy="Start the agent, or drain the node so that its shards get other homes.",
        runbook="agent-silent.md",
        judge=silence.silent("node"),
        own_limits=(SILENT,),
        fine_seconds=20,
        outlives_silence=True,
        prometheus=("TidegateAgentSilent",),
    ),
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
        means="An agent was told a newer document and is not through with it.",
        remedy="Wait while its progress moves; otherwise do what the reason it gives says.",
        runbook="desired-not-applied.md",
        judge=judges.behind("desired", "observed", "{name} is {value:.0f} documents behind"),
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
        slug="driver-behind",
        title="A driver does not follow its document",
        severity=Severity.TICKET,
        scope=Scope.DRIVER,
        means="A driver was told a newer document, a policy perhaps, and does not follow it yet.",
        remedy="See what the driver says of it; until then the older policy is in force there.",
        runbook="desired-not-applied.md",
        judge=judges.behind("desired", "observed", "{name} is {value:.0f} documents behind"),
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
    Rule(
        slug="queue-deep",
        title="Requests wait at a shard",
        severity=Severity.PAGE,
        scope=Scope.NODE,
        means="Refills and deletes wait for evicts that have not been applied.",
        remedy="Move the shard to a node that is less busy. A driver that stopped is cut off by itself.",
        runbook="queue-deep.md",
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
    Rule(
        slug="spine-placement",
        title="A stream is placed across the spine",
        severity=Severity.TICKET,
        scope=Scope.SESSION,
        means="Its box and its node are on different leaves: all it moves takes links that all share.",
        remedy="Bring it back on a rail: make room on a node of the box's leaf, and move it there.",
        runbook="spine-placement.md",
        judge=spine.placed,
        readings={
            "crossing": Reading(
                topic="driver:*",
                metric=PATH_BYTES,
                fold=Fold.SUM,
                seconds=HOUR,
                step=HOUR,
                where={"tier": "spine"},
                by=("session", "stream", "node", "port_leaf", "nic_leaf", "link", "box", "direction"),
            )
        },
        fine_seconds=0,
        every_seconds=60,
        outlives_silence=True,
    ),
    Rule(
        slug="spine-share",
        title="Too much of a session crosses the spine",
        severity=Severity.TICKET,
        scope=Scope.SESSION,
        means="Evicts and refills of all sessions on those links get slower with it.",
        remedy="If it is no move, which ends by itself: make room on better nodes, and move the shards.",
        runbook="spine-share.md",
        judge=judges.share(
            "spine",
            "all",
            "spine_share",
            "{value:.0%} of the bytes of {name} cross the spine; {limit:.0%} is much",
            of=sum,
            least="least_bytes",
        ),
        readings={
            name: Reading(
                topic="session:*", metric=PATH_BYTES, fold=Fold.SUM, seconds=600, step=60, where=where
            )
            for name, where in {"spine": {"tier": "spine"}, "all": {}}.items()
        },
        own_limits=(
            Limit("spine_share", 0.1, "Of the bytes of ten minutes.", low=0, high=1),
            Limit("least_bytes", 1e9, "Moved in them; of less nothing is said."),
        ),
        breach_seconds=600,
        prometheus=("TidegateSpineShare",),
    ),
    Rule(
        slug="spine-burst",
        title="A spine link is nearly full",
        severity=Severity.PAGE,
        scope=Scope.FLEET,
        means="In some ten seconds a link took nearly all that it can carry: whoever shares it waits.",
        remedy="See which session it is; slow down its moves, or bring its streams back on rails.",
        runbook="spine-burst.md",
        judge=spine.bursts,
        readings={
            "crossing": Reading(
                topic="fleet",
                metric=PATH_BYTES,
                fold=Fold.SUM,
                seconds=60,
                where={"tier": "spine"},
                by=("link", "session"),
            )
        },
        own_limits=(
            Limit("burst_share", 0.8, "Of what the link can carry.", low=0.01, high=10),
            Limit("link_gbits", 100, "Of a link that the fleet does not know.", low=0.001),
        ),
        breach_seconds=30,
        fine_seconds=120,
    ),
    Rule(
        slug="load-uneven",
        title="One node carries far more than the others",
        severity=Severity.NOTICE,
        scope=Scope.SESSION,
        means="A session's load is uneven over its nodes: the busiest one decides how fast it is.",
        remedy="Plan the session again, and move shards from the busiest node to the idlest.",
        runbook="load-uneven.md",
        judge=judges.uneven(
            "carried",
            "node",
            "uneven_factor",
            "least_bytes",
            "{busiest} carries {value:.2g} times what the nodes of {name} do on average",
        ),
        readings={
            "carried": Reading(
                topic="session:*", metric=PATH_BYTES, fold=Fold.SUM, seconds=600, step=60, by=("node",)
            )
        },
        own_limits=(
            Limit("uneven_factor", 1.5, "Times the mean of its nodes.", low=1, high=1000),
            Limit("least_bytes", 1e9, "Moved in ten minutes; of less nothing is said."),
        ),
        breach_seconds=900,
        fine_seconds=300,
        every_seconds=60,
    ),
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

BY_SLUG: Final[Mapping[str, Rule]] = {rule.slug: rule for rule in RULES}
