"""The fleet as the planner gets it, where it places the streams, and which links these use."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.placement import WIO
from benchmarks.scale import sizes
from benchmarks.scale.sizes import BOXES, LEAVES, MODELS, NODES, Model
from console.placement.grants import Job, Session, Stream, job_bytes, spread, streams
from console.placement.plan import Plan, Route, route
from console.placement.rules import Rules
from console.placement.topology import Box, Domain, Fleet, Nic, Node, Tier
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import columns_in

RULES: Final = Rules(grant_percent=sizes.GRANT_PERCENT)
Link = tuple[str, str, str]  # `port`, `nic` or `spine`, whose it is, and its leaf


@dataclass(frozen=True, slots=True)
class Replica:
    """`columns`: how many its cache has room for."""

    name: str
    model: Model
    stamp: int
    session: Session
    columns: int


@dataclass(frozen=True)
class Site:
    """`gbits` of each link, in either direction."""

    stamps: int
    fleet: Fleet
    replicas: tuple[Replica, ...]
    gbits: Mapping[Link, float]

    def streams(self) -> tuple[Stream, ...]:
        return streams(self.fleet, [one.session for one in self.replicas])


def leaf_of(stamp: int, place: int) -> str:
    return f"leaf{stamp:03}.{place % LEAVES}"


def site(stamps: int, seed: int = 1) -> Site:
    rng = random.Random(seed)
    nodes = tuple(
        Node(
            f"ax{stamp:03}.{place:02}",
            (Nic(leaf_of(stamp, place)), Nic(leaf_of(stamp, place + 1))),
            sizes.NODE_BYTES,
            sizes.SHARDS_MAX,
        )
        for stamp in range(stamps)
        for place in range(NODES)
    )
    boxes = tuple(
        Box(
            f"cs{stamp:03}.{number:02}",
            tuple(Domain((leaf_of(stamp, at),), wio) for at, wio in enumerate(rng.choice(WIO))),
        )
        for stamp in range(stamps)
        for number in range(BOXES)
    )
    fleet = Fleet(nodes, boxes)
    return Site(stamps, fleet, tuple(_replicas(fleet, stamps)), dict(_gbits(fleet)))


def _replicas(fleet: Fleet, stamps: int) -> Iterable[Replica]:
    for model in MODELS:
        for stamp in range(stamps):
            for number in range(model.replicas):
                first = _boxes_before(model) + number * model.boxes
                on = [f"cs{stamp:03}.{first + at:02}" for at in range(model.boxes)]
                name = f"{model.name}-{stamp:03}-{number}"
                yield _replica(fleet, name, model, stamp, on)


def _replica(fleet: Fleet, name: str, model: Model, stamp: int, boxes: list[str]) -> Replica:
    shards = [
        shard
        for group, kibibytes in zip("ab", model.kibibytes, strict=True)
        for shard in spread(fleet, boxes, group, kibibytes << 10)
    ]
    job = Job(name, tuple(shards))
    session = Session(name, (job,), RULES)
    columns = columns_in(job_bytes(fleet, session, job), job.slot_sizes)
    return Replica(name, model, stamp, session, columns)


def _boxes_before(model: Model) -> int:
    return sum(one.boxes * one.replicas for one in MODELS[: MODELS.index(model)])


def moved_to(fleet: Fleet, one: Replica, stamp: int, boxes: list[str]) -> Replica:
    """The replica on other boxes."""
    return _replica(fleet, one.name, one.model, stamp, boxes)


def _gbits(fleet: Fleet) -> Iterable[tuple[Link, float]]:
    for node in fleet.nodes:
        for nic in node.nics:
            yield ("nic", node.name, nic.leaf), sizes.NIC_GBITS
    for box in fleet.boxes:
        for domain in box.domains:
            yield ("port", box.name, domain.leaves[0]), sizes.WIO_GBITS * domain.wio
    for leaf in sorted({leaf for box in fleet.boxes for leaf in box.leaves}):
        yield ("spine", leaf, leaf), sizes.SPINE_GBITS


# What breaks


def without_leaf(fleet: Fleet, leaf: str) -> Fleet:
    """As somebody would describe it whose leaf is gone: nodes keep their other NIC, and a box carries
    what a domain sent over the lost port to its next one."""

    def next_of(box: Box, domain: Domain) -> Domain:
        if leaf not in domain.leaves:
            return domain
        at = box.domains.index(domain)
        return replace(domain, leaves=box.domains[(at + 1) % len(box.domains)].leaves)

    return Fleet(
        tuple(
            replace(node, nics=tuple(nic for nic in node.nics if nic.leaf != leaf))
            for node in fleet.nodes
        ),
        tuple(
            replace(box, domains=tuple(next_of(box, domain) for domain in box.domains))
            for box in fleet.boxes
        ),
    )


def without_stamp(fleet: Fleet, stamp: int) -> Fleet:
    return Fleet(
        tuple(node for node in fleet.nodes if not node.name.startswith(f"ax{stamp:03}.")),
        tuple(box for box in fleet.boxes if not box.name.startswith(f"cs{stamp:03}.")),
    )


# Paths

Paths = Mapping[str, Mapping[Link, float]]  # by replica: the share of its bytes on each link


def routes(fleet: Fleet, places: Mapping[Stream, str]) -> dict[Stream, Route]:
    return {
        stream: route(fleet, stream.box, stream.domain, fleet.node[node])
        for stream, node in places.items()
    }


def paths(found: Mapping[Stream, Route], places: Mapping[Stream, str]) -> Paths:
    """Bytes of a replica are divided over its streams as memory is."""
    totals: dict[str, int] = defaultdict(int)
    for stream in found:
        totals[stream.session] += stream.memory_bytes
    made: dict[str, dict[Link, float]] = defaultdict(lambda: defaultdict(float))
    for stream, its in found.items():
        share = stream.memory_bytes / totals[stream.session]
        for link in links(stream, its, places[stream]):
            made[stream.session][link] += share
    return made


def links(stream: Stream, its: Route, node: str) -> list[Link]:
    made = [("port", stream.box, its.port_leaf), ("nic", node, its.nic_leaf)]
    if its.tier is Tier.SPINE:
        made += [("spine", leaf, leaf) for leaf in (its.port_leaf, its.nic_leaf)]
    return made


def places_of(found: Plan) -> dict[Stream, str]:
    return {one.stream: one.node for one in found.placed}


def columns_bytes(model: Model, columns: float) -> float:
    return columns * COLUMN_TOKENS * model.token_bytes
