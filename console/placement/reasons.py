"""Why not better: for each stream, what speaks against the nodes that would have been nearer to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from console.placement.loads import NOWHERE, Loads, Problem
from console.placement.plan import Placed, Reason, Refusal, Route, Unplaced
from console.placement.rules import Cause
from console.placement.topology import Node, State, Tier

_STATES: Final = {
    State.CORDONED: Reason.CORDONED,
    State.DRAINING: Reason.DRAINING,
    State.MAINTENANCE: Reason.MAINTENANCE,
    State.LOST: Reason.LOST,
}


def placed(problem: Problem, loads: Loads, one: int, node: int, before: int, *, kept: bool) -> Placed:
    """What the plan says of a stream that has a place. `kept`: it runs, and was not to be moved."""
    tier = problem.tier(one, node)
    return Placed(
        problem.streams[one],
        problem.nodes[node].name,
        _route(problem, one, node, tier),
        None if before == NOWHERE else problem.nodes[before].name,
        tuple(_refusals(problem, loads, one, tier, kept=kept)) if tier is not Tier.RAIL else (),
    )


def unplaced(problem: Problem, loads: Loads, one: int) -> Unplaced:
    """What the plan says of a stream that has none: what it lacked, and whether waiting helps."""
    stream = problem.streams[one]
    refused = tuple(_refusals(problem, loads, one, None, kept=False))
    allowed = [
        (number, node)
        for number, node in enumerate(problem.nodes)
        if problem.tier(one, number) <= stream.limit.worst
    ]
    ready = [(number, node) for number, node in allowed if node.state is State.READY]
    missing = min(
        (
            (max(0, stream.memory_bytes - int(loads.free[number])), max(0, 1 - int(loads.shards[number])))
            for number, _ in ready
        ),
        default=(stream.memory_bytes, 1),
        key=lambda pair: (pair[1], pair[0]),
    )
    return Unplaced(stream, _cause(problem, loads, one, allowed, refused), *missing, refused)


def _cause(
    problem: Problem,
    loads: Loads,
    one: int,
    allowed: list[tuple[int, Node]],
    refused: tuple[Refusal, ...],
) -> Cause:
    stream = problem.streams[one]
    if stream.limit.because and any(refusal.reason is Reason.RULE for refusal in refused):
        return stream.limit.because
    if not any(
        node.memory_bytes >= stream.memory_bytes and node.shards_max > 0 for _, node in allowed
    ):
        return Cause.EXCEEDS_CLUSTER_CAPACITY
    with_room = {node.state for number, node in allowed if _has_room(problem, loads, one, number)}
    if State.CORDONED in with_room:
        return Cause.NODE_CORDONED
    if State.DRAINING in with_room:
        return Cause.WAITING_FOR_DRAIN
    return Cause.WAITING_FOR_CAPACITY


def _refusals(
    problem: Problem, loads: Loads, one: int, than: Tier | None, *, kept: bool
) -> Iterator[Refusal]:
    """By tier, and within it by reason: the nodes of a better path than this, and why they are not it."""
    for tier in Tier:
        if than is not None and tier >= than:
            break
        found: dict[Reason, list[int]] = {}
        nodes = [number for number in range(len(problem.nodes)) if problem.tier(one, number) is tier]
        for number in nodes:
            found.setdefault(_reason(problem, loads, one, number, tier, kept=kept), []).append(number)
        if not nodes and tier is Tier.RAIL:
            yield Refusal(Reason.NO_NIC, tier)
        for reason in sorted(found, key=list(Reason).index):
            numbers = found[reason]
            most = max(int(loads.free[number]) for number in numbers)
            missing = problem.streams[one].memory_bytes - most if reason is Reason.FULL_MEMORY else 0
            yield Refusal(reason, tier, tuple(problem.nodes[number].name for number in numbers), missing)


def _reason(problem: Problem, loads: Loads, one: int, number: int, tier: Tier, *, kept: bool) -> Reason:
    stream, node = problem.streams[one], problem.nodes[number]
    if node.state is not State.READY:
        return _STATES[node.state]
    if loads.free[number] < stream.memory_bytes:
        return Reason.FULL_MEMORY
    if loads.shards[number] <= 0:
        return Reason.CPU_GUARD
    if tier > stream.limit.worst:
        return Reason.RULE
    if kept:
        return Reason.RUNS_ELSEWHERE
    raise RuntimeError(f"{stream.name} was not given {node.name}, and nothing speaks against it")


def _has_room(problem: Problem, loads: Loads, one: int, number: int) -> bool:
    return bool(loads.free[number] >= problem.streams[one].memory_bytes and loads.shards[number] > 0)


def _route(problem: Problem, one: int, node: int, tier: Tier) -> Route:
    """Of several leaves the first by name that the two have in common."""
    stream, leaves = problem.streams[one], problem.nodes[node].leaves
    own = problem.fleet.domain(stream.box, stream.domain).leaves
    box = problem.fleet.box[stream.box].leaves
    match tier:
        case Tier.RAIL:
            leaf = min(leaves.intersection(own))
            return Route(tier, leaf, leaf)
        case Tier.LEAF:
            leaf = min(leaves & box)
            return Route(tier, leaf, leaf)
        case Tier.SPINE:
            return Route(tier, min(own), min(leaves))
