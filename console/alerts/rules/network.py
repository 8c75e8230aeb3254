"""Rules about the network: the spine, its links, and the balance of load. Pure."""

from __future__ import annotations

from typing import Final

from console.alerts.conditions import metrics, spine
from console.alerts.rules.rule import MetricQuery, Rule, Scope, Severity, Threshold
from telemetry.queries import Fold

HOUR: Final = 3600
PATH_BYTES: Final = "tidegate_driver_path_bytes_total"


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        slug="spine-placement",
        title="Stream placed across the spine",
        severity=Severity.TICKET,
        scope=Scope.SESSION,
        description="Its box and its node are on different leaves: its traffic uses shared links.",
        suggested_fix="Make room on a node of the box's leaf, and move the stream there.",
        actions=("move",),
        condition=spine.placed_across,
        queries={
            "crossing": MetricQuery(
                PATH_BYTES,
                Fold.SUM,
                HOUR,
                topic="driver:*",
                step=HOUR,
                where={"tier": "spine"},
                by=("session", "stream", "node", "port_leaf", "nic_leaf", "link", "box", "direction"),
            )
        },
        keep_firing_seconds=0,
        every_seconds=60,
        ignores_missing_data=True,
    ),
    Rule(
        slug="spine-share",
        title="High share of spine traffic",
        severity=Severity.TICKET,
        scope=Scope.SESSION,
        description="Spine traffic of this session slows all sessions on the same links.",
        unit="share",
        suggested_fix="If it is not a move: make room on better nodes, and move the streams there.",
        actions=("restore-rails",),
        condition=metrics.share(
            "spine",
            "all",
            "spine_share",
            "{percent} of the bytes of {name} cross the spine (threshold {limit_percent})",
            of=sum,
            least="least_bytes",
        ),
        queries={
            name: MetricQuery(PATH_BYTES, Fold.SUM, 600, step=60, where=where)
            for name, where in {"spine": {"tier": "spine"}, "all": {}}.items()
        },
        own_thresholds=(
            Threshold("spine_share", 0.1, "Threshold: share of bytes in ten minutes.", low=0, high=1),
            Threshold("least_bytes", 1e9, "Sessions that moved fewer bytes are ignored."),
        ),
        pending_seconds=600,
        prometheus=("TidegateSpineShare",),
    ),
    Rule(
        slug="spine-burst",
        title="Spine link nearly saturated",
        severity=Severity.PAGE,
        scope=Scope.FLEET,
        description="For ten seconds a link carried nearly its full capacity. All traffic on it waits.",
        unit="Gbit/s",
        suggested_fix="Find the session, then slow its moves or restore its rails.",
        actions=("restore-rails",),
        condition=spine.saturated,
        queries={
            "crossing": MetricQuery(
                PATH_BYTES, Fold.SUM, 60, where={"tier": "spine"}, by=("link", "session")
            )
        },
        own_thresholds=(
            Threshold("burst_share", 0.8, "Threshold: share of the link's capacity.", low=0.01, high=10),
            Threshold("link_gbits", 100, "Capacity of links not in the fleet description.", low=0.001),
        ),
        pending_seconds=30,
        keep_firing_seconds=120,
    ),
    Rule(
        slug="load-uneven",
        title="Uneven load across nodes",
        severity=Severity.NOTICE,
        scope=Scope.SESSION,
        description="One node of a session carries far more than the others, and limits its speed.",
        unit="times the average",
        suggested_fix="Move streams of the session from the busiest node to the idlest.",
        condition=metrics.uneven,
        queries={"carried": MetricQuery(PATH_BYTES, Fold.SUM, 600, step=60, by=("node",))},
        own_thresholds=(
            Threshold(
                "uneven_factor", 1.5, "Threshold: multiple of the nodes' average.", low=1, high=1000
            ),
            Threshold("least_bytes", 1e9, "Sessions that moved fewer bytes in ten minutes are ignored."),
        ),
        pending_seconds=900,
        keep_firing_seconds=300,
        every_seconds=60,
    ),
)
