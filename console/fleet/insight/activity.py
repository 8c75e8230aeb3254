"""What runs on the fleet: streams and their paths, sessions and operations, and who follows how far.

The only place where the fleet looks at what is above it. All of it is counted by the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from django.db.models import Count, F, Q, QuerySet, Sum

from console.control.models import Target
from console.fleet.boxes import topic as topic_of_box
from console.fleet.models import Box, Node
from console.operations.models import Operation
from console.operations.services import running_on
from console.placement.rules import Redundancy
from console.placement.topology import Tier
from console.sessions.fragments import AllFragments
from console.sessions.models import Loss, SessionBox, Stream, StreamRedundancy
from console.sessions.plans.losses import Verdict
from telemetry.units import counted

SHOWN_MAX: Final = 100
TIERS: Final = {Tier.RAIL: ("ok", "rail"), Tier.LEAF: ("warn", "leaf"), Tier.SPINE: ("bad", "spine")}


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream with the look and the name of its path."""

    stream: Stream
    look: str
    tier: str


@dataclass(frozen=True, slots=True)
class NodeActivity:
    streams: list[StreamRow]
    left_out: int
    memory_bytes: int
    fragments: int  # fragment shards that fragments of other nodes' columns pass through
    fragments_bytes: int  # of memory
    fragments_of: list[str]  # drivers
    target: Target | None
    operation: Operation | None


@dataclass(frozen=True, slots=True)
class BoxActivity:
    streams: list[StreamRow]
    left_out: int
    held: SessionBox | None  # by a session, for its jobs
    operation: Operation | None


@dataclass(slots=True)
class Paths:
    """How many streams take which kind of path, and through which leaves they cross the spine."""

    over_spine: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by leaf
    by_leaf: dict[str, dict[Tier, int]] = field(default_factory=dict)  # of the box's port

    def of(self, leaves: list[str]) -> list[tuple[str, str, int]]:
        """Of the streams that begin at these: looks, kinds and counts, the best first."""
        counts: dict[Tier, int] = defaultdict(int)
        for leaf in leaves:
            for tier, count in self.by_leaf.get(leaf, {}).items():
                counts[tier] += count
        return [(*TIERS[tier], counts[tier]) for tier in Tier if counts[tier]]


def on_node(node: Node, topic: str) -> NodeActivity:
    """What is on a node, or comes there."""
    found = Stream.objects.filter(Q(node=node) | Q(next_node=node))
    used = found.filter(node=node).aggregate(bytes=Sum(F("slots") * F("slot_bytes")))
    streams, left_out = _first(found.order_by("pk"))
    fragments = AllFragments()
    return NodeActivity(
        streams,
        left_out,
        memory_bytes=used["bytes"] or 0,
        fragments=len(fragments.at(node.name)),
        fragments_bytes=fragments.bytes_by_node[node.name],
        fragments_of=sorted({one.driver for one in fragments.at(node.name)}),
        target=target_of("node", node.name),
        operation=running_on(topic),
    )


def fragments_lost_with(nodes: Collection[str]) -> dict[str, list[str]]:
    """By node, in a sentence, what columns are lost if all of these lose their tier 2 at once: those
    that lack more fragments then than their code survives."""
    fragments, names = AllFragments(), set(nodes)
    held = {
        shard: [row.node.name for row in rows if row.node.name in names]
        for shard, rows in (fragments.holders.items() if names else ())
    }
    lost = {shard for shard, at in held.items() if len(at) > Redundancy(shard.code).parity}
    if not lost:
        return {}
    keys = [one.stream for one in fragments.streams if one.shard in lost]
    said = StreamRedundancy.objects.filter(stream__in=keys).aggregate(sum=Sum("columns"))
    columns, shards = counted(said["sum"] or 0, "redundant column"), counted(len(lost), "shard")
    sentence = (
        f"With it {columns} of {shards} become misses: more of their fragments go than their code "
        "survives. Change fewer nodes at once, and drain them before."
    )
    return {name: [sentence] for shard in lost for name in held[shard]}


def on_box(box: Box) -> BoxActivity:
    """What begins at a box, and whose it is."""
    streams, left_out = _first(Stream.objects.filter(box=box).order_by("domain", "pk"))
    held = SessionBox.objects.filter(box=box).select_related("session")
    held_box = held.prefetch_related("jobs__job__driver").first()
    return BoxActivity(streams, left_out, held_box, running_on(topic_of_box(box.name)))


def _first(found: QuerySet[Stream]) -> tuple[list[StreamRow], int]:
    """The first ones, and how many more there are."""
    related = ("job__session", "job__driver", "box", "node", "next_node")
    streams = list(found.select_related(*related)[: SHOWN_MAX + 1])
    rows = [StreamRow(stream, *TIERS[Tier(stream.tier)]) for stream in streams[:SHOWN_MAX]]
    return rows, found.count() - SHOWN_MAX if len(streams) > SHOWN_MAX else 0


def sessions_of(boxes: Collection[str]) -> dict[str, str]:
    """By box the session that has it."""
    held = SessionBox.objects.filter(box__name__in=boxes)
    return dict(held.values_list("box__name", "session__name"))


def operations_on(topics: Collection[str]) -> dict[str, Operation]:
    """By topic what works on it now."""
    return {one.target: one for one in Operation.objects.filter(target__in=topics, done=False)}


def target_of(kind: str, name: str) -> Target | None:
    """What it was told to be, and how far it is; None for who has never been told."""
    return Target.objects.filter(kind=kind, name=name, generation__gt=0).first()


def paths() -> Paths:
    found = Paths()
    counts = Stream.objects.values_list("tier", "port_leaf", "nic_leaf").annotate(count=Count("pk"))
    for number, port_leaf, nic_leaf, count in counts:
        tier = Tier(number)
        of_leaf = found.by_leaf.setdefault(port_leaf, {})
        of_leaf[tier] = of_leaf.get(tier, 0) + count
        if tier is Tier.SPINE:
            found.over_spine[port_leaf] += count
            found.over_spine[nic_leaf] += count
    return found


def replaced_nodes() -> set[str]:
    """Lost nodes whose streams are all on other nodes."""
    left = Loss.objects.exclude(verdict=Verdict.REPLACED)
    replaced = Loss.objects.filter(verdict=Verdict.REPLACED).exclude(node__in=left.values("node"))
    return set(replaced.values_list("node__name", flat=True))


def losses_on(node: Node) -> list[Loss]:
    """What is done about its streams while it is lost, session by session."""
    return list(node.losses.select_related("session", "operation").order_by("session__name"))


def streams_by_node() -> dict[str, int]:
    return dict(Stream.objects.values_list("node__name").annotate(Count("pk")).order_by())
