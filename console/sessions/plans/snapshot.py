"""The fleet and its streams as placement needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from console.fleet.services import closed_boxes, topology
from console.placement import grants
from console.placement.grants import Stream, spread
from console.placement.topology import Box, Fleet, Misconfigured
from console.sessions import models
from console.sessions.fragments import AllFragments
from swdriver_shim.desired import ModelSpec
from swdriver_shim.layout import Group

TRIAL = "trial"  # the job and the group that a session is tried with where it has none
LEAVING = "~"  # behind the name of a job: the other place of a stream that is on its way

Key: TypeAlias = tuple[str, str, str, str, int]  # of a stream, in plans


class PlacedStream(NamedTuple):
    """A row of `Stream` as plans need it: no model, since each preview reads thousands of them."""

    session: str
    job: str
    group: str
    box: str
    domain: int
    wio: int
    slot_bytes: int
    node: str
    slots: int
    next_node: str | None
    next_slots: int | None

    @property
    def key(self) -> Key:
        return self.session, self.job, self.group, self.box, self.domain

    @property
    def memory_bytes_soon(self) -> int:
        """When who moves or changes it has done that."""
        return (self.slots if self.next_slots is None else self.next_slots) * self.slot_bytes

    def stream(self, slots: int, *, job: str = "") -> Stream:
        """At this size. It may stay on the path that it has."""
        return Stream(
            self.session,
            job or self.job,
            self.group,
            self.box,
            self.domain,
            self.wio,
            slots * self.slot_bytes,
        )


_FIELDS: Final = (
    *("job__session__name", "job__name", "group", "box__name", "domain", "wio", "slot_bytes"),
    *("node__name", "slots", "next_node__name", "next_slots"),
)


@dataclass(frozen=True)
class Snapshot:
    """One consistent view of everything that a plan depends on. Take it with the fleet locked."""

    fleet: Fleet
    streams: tuple[PlacedStream, ...]
    taken: frozenset[str]  # boxes that belong to sessions
    closed: frozenset[str] = frozenset()  # boxes that take nothing new

    @classmethod
    def now(cls) -> Snapshot:
        return cls(
            _beside_fragments(topology()),
            tuple(map(PlacedStream._make, models.Stream.objects.order_by("pk").values_list(*_FIELDS))),
            frozenset(models.SessionBox.objects.values_list("box__name", flat=True)),
            frozenset(closed_boxes().values_list("name", flat=True)),
        )

    @cached_property
    def running(self) -> dict[Stream, str]:
        """Everything that has a place, by where it is; what is on its way has two."""
        found: dict[Stream, str] = {}
        for one in self.streams:
            coming = one.next_slots or 0
            in_place = one.next_node in (None, one.node)
            found[one.stream(max(one.slots, coming if in_place else 0))] = one.node
            if one.next_node is not None and not in_place:
                found[one.stream(coming, job=f"{one.job}{LEAVING}")] = one.next_node
        return {stream: node for stream, node in found.items() if node in self.fleet.node}

    @property
    def settled(self) -> Iterator[PlacedStream]:
        """What no operation moves or changes."""
        return (shard for shard in self.streams if shard.next_node is None)

    @cached_property
    def by_key(self) -> Mapping[Key, PlacedStream]:
        return {shard.key: shard for shard in self.streams}

    @property
    def free_boxes(self) -> list[Box]:
        return [box for box in self.fleet.boxes if box.name not in self.taken | self.closed]


def _beside_fragments(fleet: Fleet) -> Fleet:
    """With the memory that is left where fragments of others pass through."""
    taken = AllFragments().bytes_by_node
    if not taken:
        return fleet
    nodes = (
        replace(node, memory_bytes=max(1, node.memory_bytes - taken[node.name])) for node in fleet.nodes
    )
    return replace(fleet, nodes=tuple(nodes))


def key_of(stream: models.Stream) -> Key:
    return stream.job.session.name, stream.job.name, stream.group, stream.box.name, stream.domain


def job_of(
    fleet: Fleet, name: str, model: ModelSpec, boxes: Collection[str], *, keeps_to_boxes: bool = False
) -> grants.Job:
    """The shards of a model on these boxes: number i of each group on the i-th of their domains.

    Raises Misconfigured where there are more shards than domains.
    """
    places = [(box, number) for box in sorted(boxes) for number in range(len(_box(fleet, box).domains))]
    shards = []
    for group in model.shape().groups:
        if group.shards > len(places):
            raise Misconfigured(
                f"Group {group.name} has {group.shards} shards, and each needs a domain. The job's "
                f"boxes have {len(places)}. Give it more boxes, or describe them with more domains."
            )
        shards += [
            grants.Shard(group.name, box, number, *sizes)
            for (box, number), sizes in zip(places, _sizes(group), strict=False)
        ]
    return grants.Job(name, tuple(shards), keeps_to_boxes)


def boxes_for(model: ModelSpec, fleet: Fleet, boxes: Collection[str]) -> list[str]:
    """The first of these boxes that have a domain for every shard; all, if they are too few."""
    wanted = max(group.shards for group in model.shape().groups)
    chosen: list[str] = []
    domains = 0
    for box in boxes:
        if domains >= wanted:
            break
        chosen.append(box)
        domains += len(_box(fleet, box).domains)
    return chosen


def _sizes(group: Group) -> list[tuple[int, int, int]]:
    """Of each shard: bytes per token, bytes per state, and for how many columns a slot is."""
    if group.is_state:
        return [(0, size, group.columns_per_slot) for size in group.bytes_per_state]
    return [(size, 0, 1) for size in group.bytes_per_token]


def trial_job(fleet: Fleet, boxes: Collection[str], bytes_per_token: int) -> grants.Job:
    return grants.Job(TRIAL, spread(fleet, sorted(boxes), TRIAL, bytes_per_token))


def _box(fleet: Fleet, name: str) -> Box:
    found = fleet.box.get(name)
    if found is None:
        raise Misconfigured(f"Box {name} is not in the fleet, or has no ports on leaves.")
    return found
