"""The fleet and what runs on it, as placement wants them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import msgspec

from console.fleet.models import Driver
from console.fleet.services import topology
from console.placement import grants
from console.placement.grants import Stream, spread
from console.placement.topology import Box, Fleet, Misconfigured
from console.sessions.models import SessionBox, Shard
from swdriver_shim.desired import ModelSpec

TRIAL = "trial"  # the job and the group that a session is tried with where it has none
LEAVING = "~"  # behind the name of a job: the other place of a stream that is on its way

Key: TypeAlias = tuple[str, str, str, str, int]  # a stream's, by which plans know a shard


class Here(NamedTuple):
    """A shard as plans see it: no model, since plans read thousands of them while people type."""

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
class World:
    """One consistent look at everything that a plan depends on. Take it while the fleet is held."""

    fleet: Fleet
    shards: tuple[Here, ...]
    taken: frozenset[str]  # boxes that belong to sessions

    @classmethod
    def now(cls) -> World:
        return cls(
            topology(),
            tuple(map(Here._make, Shard.objects.order_by("pk").values_list(*_FIELDS))),
            frozenset(SessionBox.objects.values_list("box__name", flat=True)),
        )

    @cached_property
    def running(self) -> dict[Stream, str]:
        """Everything that has a place, by where it is; what is on its way has two."""
        found: dict[Stream, str] = {}
        for shard in self.shards:
            coming = shard.next_slots or 0
            in_place = shard.next_node in (None, shard.node)
            found[shard.stream(max(shard.slots, coming if in_place else 0))] = shard.node
            if shard.next_node is not None and not in_place:
                found[shard.stream(coming, job=f"{shard.job}{LEAVING}")] = shard.next_node
        return {stream: node for stream, node in found.items() if node in self.fleet.node}

    @property
    def settled(self) -> Iterator[Here]:
        """What no operation moves or changes."""
        return (shard for shard in self.shards if shard.next_node is None)

    @cached_property
    def by_key(self) -> Mapping[Key, Here]:
        return {shard.key: shard for shard in self.shards}

    @property
    def free_boxes(self) -> list[Box]:
        return [box for box in self.fleet.boxes if box.name not in self.taken]


def key_of(shard: Shard) -> Key:
    return shard.job.session.name, shard.job.name, shard.group, shard.box.name, shard.domain


def model_of(driver: Driver) -> ModelSpec:
    """Raises Misconfigured for a driver that has told of no model, or of nonsense."""
    if not driver.model:
        raise Misconfigured(f"Driver {driver.name} has not told which model it serves.")
    try:
        spec: ModelSpec = msgspec.convert(driver.model, ModelSpec)
    except msgspec.ValidationError as error:
        raise Misconfigured(f"The model of driver {driver.name} makes no sense: {error}.") from None
    return spec


def job_of(fleet: Fleet, name: str, model: ModelSpec, boxes: Collection[str]) -> grants.Job:
    """The shards of a model on these boxes: number i of each group on the i-th of their domains.

    Raises Misconfigured where there are more shards than domains.
    """
    places = [(box, number) for box in sorted(boxes) for number in range(len(_box(fleet, box).domains))]
    shards = []
    for group in model.groups:
        if len(group.bytes_per_token) > len(places):
            raise Misconfigured(
                f"Group {group.name} has {len(group.bytes_per_token)} shards; {len(boxes)} boxes have "
                f"{len(places)} domains: give the job more boxes."
            )
        shards += [
            grants.Shard(group.name, box, number, size)
            for (box, number), size in zip(places, group.bytes_per_token, strict=False)
        ]
    return grants.Job(name, tuple(shards))


def boxes_for(model: ModelSpec, fleet: Fleet, boxes: Collection[str]) -> list[str]:
    """The first of these boxes that have a domain for every shard; all, if they are too few."""
    wanted = max(len(group.bytes_per_token) for group in model.groups)
    chosen: list[str] = []
    domains = 0
    for box in sorted(boxes):
        if domains >= wanted:
            break
        chosen.append(box)
        domains += len(_box(fleet, box).domains)
    return chosen


def trial_job(fleet: Fleet, boxes: Collection[str], bytes_per_token: int) -> grants.Job:
    return grants.Job(TRIAL, spread(fleet, sorted(boxes), TRIAL, bytes_per_token))


def _box(fleet: Fleet, name: str) -> Box:
    found = fleet.box.get(name)
    if found is None:
        raise Misconfigured(f"Box {name} is not in the fleet, or has no ports on leaves.")
    return found
