"""The fleet as its page shows it: stamps with their pictures, and how many are what. In few queries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from django.db.models import Count, Q
from django.utils import timezone

from console.accounts.principal import Principal
from console.fleet import services
from console.fleet.insight import activity
from console.fleet.insight.diagram import Drawing, Link, Look, Spot, draw, states_of
from console.fleet.models import Domain, Driver, Leaf, Nic, Node, Port, SpineLink, Stamp
from console.fleet.services import NOT_JOINED
from console.placement.topology import State
from telemetry.units import counted, size

REPLACED: Final = "lost, replaced"
PICTURES_MAX: Final = 8  # of stamps; of more the page has a table, and a picture of the one asked for
LOOKS: Final[dict[str, Look]] = {
    State.READY.value: "ok",
    State.CORDONED.value: "warn",
    State.DRAINING.value: "warn",
    State.MAINTENANCE.value: "off",
    State.LOST.value: "bad",
}


def look_of(state: str, *, has_joined: bool, replaced: bool = False) -> tuple[Look, str]:
    """How a node's state is shown: shape and colour, and in words. `replaced`: its streams are on
    other nodes."""
    if not has_joined:
        return "off", NOT_JOINED
    if replaced and state == State.LOST.value:
        return "warn", REPLACED
    return LOOKS[state], state


@dataclass(frozen=True)
class LeafRow:
    """A row of the table beside a picture."""

    name: str
    links: list[Link]
    nodes: str
    node_count: int
    boxes: list[str]


@dataclass
class StampView:
    name: str
    links: list[Link] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    streams: list[tuple[str, str, int]] = field(default_factory=list)  # by the kind of their path
    picture: Drawing | None = None

    @property
    def nodes(self) -> list[Spot]:
        return [spot for spot in self.spots if spot.kind == "node"]

    @property
    def boxes(self) -> list[Spot]:
        return [spot for spot in self.spots if spot.kind == "box"]

    @property
    def states(self) -> list[tuple[Look, str, int]]:
        return _in_order(Counter((spot.look, spot.said) for spot in self.nodes))

    @property
    def rows(self) -> list[LeafRow]:
        on: dict[str, list[Spot]] = defaultdict(list)
        for spot in self.spots:
            for leaf in spot.leaves:
                on[leaf].append(spot)
        return [
            LeafRow(
                leaf,
                [link for link in self.links if link.leaf == leaf],
                states_of(on[leaf]),
                sum(spot.kind == "node" for spot in on[leaf]),
                sorted(spot.name for spot in on[leaf] if spot.kind == "box"),
            )
            for leaf in self.leaves
        ]


@dataclass(frozen=True)
class Overview:
    stamps: list[StampView]
    states: list[tuple[Look, str, int]]
    memory_ready: int
    drivers_alive: int
    drivers_lost: int
    versions: list[tuple[str, int]]
    heard_at: datetime | None  # the last heartbeat of anybody
    at: datetime

    @property
    def node_count(self) -> int:
        return sum(count for _, _, count in self.states)


def overview(principal: Principal, only: str = "") -> Overview:
    """All of it, or the picture of one stamp of it."""
    services.check_fleet(principal)
    nodes = list(
        Node.objects.values_list(
            "name", "stamp_id", "state", "joined_at", "memory_bytes", "software_version", named=True
        ).order_by("name")
    )
    stamps = {stamp.pk: StampView(stamp.name) for stamp in Stamp.objects.all()}
    for row in Leaf.objects.all():
        stamps[row.stamp_id].leaves.append(row.name)
    taken, shards = activity.paths(), activity.streams_by_node()
    replaced = activity.replaced_nodes()
    for link in SpineLink.objects.select_related("leaf"):
        leaf = link.leaf.name
        stamps[link.leaf.stamp_id].links.append(
            Link(link.name, leaf, link.spine, link.gbits, taken.over_spine.get(leaf, 0))
        )
    leaves = _sets(Nic.objects.values_list("node__name", "leaf__name").distinct())
    for node in nodes:
        look, said = _look(node, replaced)
        detail = size(node.memory_bytes) if node.memory_bytes else ""
        if count := shards.get(node.name):
            detail = f"{detail}, {counted(count, 'shard')}"
        spot = Spot("node", node.name, leaves[node.name], look, said, detail)
        stamps[node.stamp_id].spots.append(spot)
    _add_boxes(stamps)
    shown = [view for view in stamps.values() if not only or view.name == only]
    for view in shown:
        view.streams = taken.of(view.leaves)
    for view in shown[:PICTURES_MAX] if only or len(shown) <= PICTURES_MAX else ():
        view.picture = draw(view.leaves, view.links, view.spots)
    joined = [node for node in nodes if node.joined_at]
    lost = list(Driver.objects.filter(joined_at__isnull=False).values_list("lost_at", flat=True))
    newest = Node.objects.order_by("-last_heartbeat_at").exclude(last_heartbeat_at=None).first()
    return Overview(
        stamps=shown,
        states=_in_order(Counter(_look(node, replaced) for node in nodes)),
        memory_ready=sum(node.memory_bytes for node in nodes if node.state == State.READY.value),
        drivers_alive=lost.count(None),
        drivers_lost=len(lost) - lost.count(None),
        versions=Counter(node.software_version or "unknown" for node in joined).most_common(),
        heard_at=newest.last_heartbeat_at if newest else None,
        at=timezone.now(),
    )


def states(principal: Principal) -> list[tuple[Look, str, int]]:
    """How many nodes are in which state, counted by the database."""
    services.check_fleet(principal)
    joined = Node.objects.annotate(
        joined=Q(joined_at__isnull=False), replaced=Q(name__in=activity.replaced_nodes())
    )
    found = joined.values_list("state", "joined", "replaced").annotate(Count("pk"))
    counts: Counter[tuple[Look, str]] = Counter()
    for state, has_joined, replaced, count in found.order_by():
        counts[look_of(state, has_joined=has_joined, replaced=replaced)] += count
    return _in_order(counts)


def _add_boxes(stamps: dict[int, StampView]) -> None:
    wio: dict[str, list[int]] = defaultdict(list)
    stamp_of: dict[str, int] = {}
    for box, stamp, streams in Domain.objects.order_by("box__name", "index").values_list(
        "box__name", "box__stamp_id", "wio"
    ):
        wio[box].append(streams)
        stamp_of[box] = stamp
    leaves = _sets(Port.objects.values_list("domain__box__name", "leaf__name").distinct())
    for box, stamp in stamp_of.items():
        domains = len(wio[box])
        said = counted(domains, "domain")
        stamps[stamp].spots.append(
            Spot("box", box, leaves[box], "box", said, f"WIO {'+'.join(map(str, wio[box]))}")
        )


def _sets(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name, leaf in pairs:
        found[name].add(leaf)
    return defaultdict(tuple, {name: tuple(sorted(leaves)) for name, leaves in found.items()})


def _look(node: Any, replaced: Collection[str]) -> tuple[Look, str]:
    return look_of(node.state, has_joined=node.joined_at is not None, replaced=node.name in replaced)


def _in_order(counts: Counter[tuple[Look, str]]) -> list[tuple[Look, str, int]]:
    """How many nodes are in which state, the good first."""
    order = [*LOOKS, REPLACED, NOT_JOINED]
    found = [(look, said, count) for (look, said), count in counts.items()]
    return sorted(found, key=lambda one: order.index(one[1]))
