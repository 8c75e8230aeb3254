"""The fleet and what runs on it, as placement wants them; and the lock under which both may be used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
from django.db import connection

from console.fleet.models import Driver
from console.fleet.services import topology
from console.placement import grants
from console.placement.grants import Stream, spread
from console.placement.topology import Box, Fleet, Misconfigured
from console.sessions.models import Session, SessionBox, Shard
from swdriver_shim.desired import ModelSpec

TRIAL = "trial"  # the job and the group that a session is tried with where it has none
LEAVING = "~"  # behind the name of a job: the other place of a stream that is on its way


def hold() -> None:
    """Until the end of the transaction nobody else reserves boxes, memory or names on nodes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('placement'))")


@dataclass(frozen=True)
class World:
    """One consistent look at everything that a plan depends on. Take it under `hold`."""

    fleet: Fleet
    shards: tuple[Shard, ...]
    taken: frozenset[str]  # boxes that belong to sessions

    @classmethod
    def now(cls) -> World:
        related = ("job__session", "job__driver", "box", "node", "next_node")
        return cls(
            topology(),
            tuple(Shard.objects.select_related(*related).order_by("pk")),
            frozenset(SessionBox.objects.values_list("box__name", flat=True)),
        )

    @cached_property
    def running(self) -> dict[Stream, str]:
        """Everything that has a place, by where it is; what is on its way has two."""
        found: dict[Stream, str] = {}
        for shard in self.shards:
            coming = shard.next_slots or 0
            in_place = shard.next_node_id in (None, shard.node_id)
            found[stream_of(shard, max(shard.slots, coming if in_place else 0))] = shard.node.name
            if shard.next_node is not None and not in_place:
                other = stream_of(shard, coming)
                found[replace(other, job=f"{other.job}{LEAVING}")] = shard.next_node.name
        return {stream: node for stream, node in found.items() if node in self.fleet.node}

    @property
    def free_boxes(self) -> list[Box]:
        return [box for box in self.fleet.boxes if box.name not in self.taken]

    def shards_of(self, session: Session) -> list[Shard]:
        return [shard for shard in self.shards if shard.job.session_id == session.pk]


def stream_of(shard: Shard, slots: int) -> Stream:
    """As it is placed, at this size. It may stay on the path that it has."""
    return Stream(
        shard.job.session.name,
        shard.job.name,
        shard.group,
        shard.box.name,
        shard.domain,
        shard.wio,
        slots * shard.slot_bytes,
    )


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
