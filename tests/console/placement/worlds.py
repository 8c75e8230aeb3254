"""Small fleets and streams: by hand, and drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import strategies as st

from console.placement.grants import Stream
from console.placement.plan import Plan
from console.placement.rules import Cause, Limit
from console.placement.topology import Box, Domain, Fleet, Nic, Node, State, Tier

EXAMPLES = 60  # of each property; none has a deadline, since solvers share the machine with other tests

LEAVES = ("l1", "l2", "l3")
LIMITS = (
    Limit(),
    Limit(Tier.LEAF, Cause.SPINE_REFUSED_BY_RULE),
    Limit(Tier.RAIL, Cause.WAITING_FOR_RAIL),
)


def node(
    name: str, *leaves: str, memory: int = 100, shards: int = 4, state: State = State.READY
) -> Node:
    return Node(name, tuple(Nic(leaf) for leaf in leaves), memory, shards, state)


def stream(
    box: str,
    domain: int = 0,
    *,
    memory: int = 40,
    wio: int = 4,
    group: str = "full",
    limit: Limit = LIMITS[0],
) -> Stream:
    return Stream("s1", "chat", group, box, domain, wio, memory, limit)


def two_leaves(*nodes: Node) -> Fleet:
    """Box `cs1` with a domain on l1 and one on l2, box `cs2` with both on l3."""
    boxes = (
        Box("cs1", (Domain(("l1",), 4), Domain(("l2",), 4))),
        Box("cs2", (Domain(("l3",), 4), Domain(("l3",), 4))),
    )
    return Fleet(nodes, boxes)


@st.composite
def fleets(draw: st.DrawFn, nodes_max: int = 4) -> Fleet:
    states = st.sampled_from([*[State.READY] * 6, *State])
    nodes = tuple(
        node(
            f"ax{number}",
            *draw(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=2, unique=True)),
            memory=draw(st.integers(30, 150)),
            shards=draw(st.integers(0, 4)),
            state=draw(states),
        )
        for number in range(draw(st.integers(1, nodes_max)))
    )
    boxes = tuple(
        Box(
            f"cs{number}",
            tuple(Domain((draw(st.sampled_from(LEAVES)),), draw(st.integers(1, 6))) for _ in range(2)),
        )
        for number in range(2)
    )
    return Fleet(nodes, boxes)


@st.composite
def streams_of(draw: st.DrawFn, fleet: Fleet, most: int = 5, group: str = "full") -> tuple[Stream, ...]:
    count = draw(st.integers(1, most))
    found = []
    for number in range(count):
        box = draw(st.sampled_from(fleet.boxes))
        domain = draw(st.integers(0, 1))
        found.append(
            Stream(
                draw(st.sampled_from(["s1", "s2"])),
                "job",
                f"{group}{number}",
                box.name,
                domain,
                box.domains[domain].wio,
                draw(st.integers(1, 80)),
                draw(st.sampled_from(LIMITS)),
            )
        )
    return tuple(found)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Fleet, tuple[Stream, ...]]:
    fleet = draw(fleets())
    return fleet, draw(streams_of(fleet))


@st.composite
def running_worlds(draw: st.DrawFn) -> tuple[Fleet, dict[Stream, str]]:
    """Streams that run wherever there happened to be room."""
    fleet = draw(fleets(5))
    running: dict[Stream, str] = {}
    for one in draw(streams_of(fleet, 8, "running")):
        allowed = [
            node.name
            for node in fleet.nodes
            if fits(fleet, {**running, one: node.name})
            and path(fleet, one, node.name) <= one.limit.worst
        ]
        if allowed:
            running[one] = draw(st.sampled_from(allowed))
    return fleet, running


def path(fleet: Fleet, one: Stream, name: str) -> Tier:
    """Told from the leaves, and not by what is tested."""
    leaves = {nic.leaf for nic in fleet.node[name].nics}
    domains = fleet.box[one.box].domains
    if leaves & set(domains[one.domain].leaves):
        return Tier.RAIL
    if any(leaves & set(domain.leaves) for domain in domains):
        return Tier.LEAF
    return Tier.SPINE


def used(places: Mapping[Stream, str] | Iterable[tuple[Stream, str]], name: str) -> tuple[int, int]:
    """Bytes and shards at a node."""
    pairs = places.items() if isinstance(places, Mapping) else places
    here = [one.memory_bytes for one, at in pairs if at == name]
    return sum(here), len(here)


def fits(fleet: Fleet, places: Mapping[Stream, str]) -> bool:
    return all(
        used(places, node.name)[0] <= node.memory_bytes and used(places, node.name)[1] <= node.shards_max
        for node in fleet.nodes
    )


def places_of(plan: Plan) -> dict[Stream, str]:
    return {one.stream: one.node for one in plan.placed}
