"""Rules of paths: the spine, its links, and how even the load is. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts import judges, spine
from console.alerts.rules import Limit, Reading, Rule, Scope, Severity
from telemetry.queries import Fold

HOUR: Final = 3600
PATH_BYTES: Final = "tidegate_driver_path_bytes_total"


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="spine-placement",
        title="A stream is placed across the spine",
        severity=Severity.TICKET,
        scope=Scope.SESSION,
        means="Its box and its node are on different leaves: all it moves takes links that all share.",
        remedy="Bring it back on a rail: make room on a node of the box's leaf, and move it there.",
        runbook="spine-placement.md",
        fixes=("move",),
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
        fixes=("restore-rails",),
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
        fixes=("restore-rails",),
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
)
