"""Why not better: for each stream, what speaks against the nodes that would have been nearer to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from console.placement.loads import NOWHERE, Ints, Loads, Problem
from console.placement.plan import Placed, Reason, Refusal, Route, Unplaced, route
from console.placement.rules import Cause
from console.placement.topology import State, Tier

_STATES: Final = {
    State.CORDONED: Reason.CORDONED,
    State.DRAINING: Reason.DRAINING,
    State.MAINTENANCE: Reason.MAINTENANCE,
    State.LOST: Reason.LOST,
}
_REASONS: Final = tuple(Reason)
_NOTHING: Final = -1


def placed(problem: Problem, loads: Loads, one: int, node: int, before: int, *, kept: bool) -> Placed:
    """What the plan says of a stream that has a place. `kept`: it runs, and was not to be moved."""
    tier = problem.tier(one, node)
    return Placed(
        problem.streams[one],
        problem.nodes[node].name,
        _route(problem, one, node),
        None if before == NOWHERE else problem.nodes[before].name,
        tuple(_refusals(problem, loads, one, tier, kept=kept)) if tier is not Tier.RAIL else (),
    )


def unplaced(problem: Problem, loads: Loads, one: int) -> Unplaced:
    """What the plan says of a stream that has none: what it lacked, and whether waiting helps."""
    stream, found = problem.streams[one], problem.candidates[one]
    refused = tuple(_refusals(problem, loads, one, None, kept=False))
    missing_bytes, missing_shards = stream.memory_bytes, 1
    if len(found.all):
        lacks = np.maximum(0, stream.memory_bytes - loads.free[found.all])
        full = (loads.shards[found.all] <= 0).astype(np.int64)
        nearest = np.lexsort((lacks, full))[0]
        missing_bytes, missing_shards = int(lacks[nearest]), int(full[nearest])
    cause = _cause(problem, loads, one, refused)
    return Unplaced(stream, cause, missing_bytes, missing_shards, refused)


def _cause(problem: Problem, loads: Loads, one: int, refused: tuple[Refusal, ...]) -> Cause:
    """What keeps it waiting, the most final first; a rule counts where there is room that it refuses."""
    stream = problem.streams[one]
    allowed = np.flatnonzero(problem.candidates[one].tiers <= stream.limit.worst)
    able = (problem.memory_of_node[allowed] >= stream.memory_bytes) & (problem.shards_max[allowed] > 0)
    if not able.any():
        return Cause.EXCEEDS_CLUSTER_CAPACITY
    if stream.limit.because and any(refusal.reason is Reason.RULE for refusal in refused):
        return stream.limit.because
    room = allowed[loads.has_room(np.full(len(allowed), one), allowed)]
    if State.CORDONED in problem.states[room]:
        return Cause.NODE_CORDONED
    if State.DRAINING in problem.states[room]:
        return Cause.WAITING_FOR_DRAIN
    return Cause.WAITING_FOR_CAPACITY


def _refusals(
    problem: Problem, loads: Loads, one: int, than: Tier | None, *, kept: bool
) -> Iterator[Refusal]:
    """By tier, and in it by reason: the nodes of a better path than this, and why they are not it."""
    stream, tiers = problem.streams[one], problem.candidates[one].tiers
    for tier in Tier:
        if than is not None and tier >= than:
            break
        nodes = np.flatnonzero(tiers == tier)
        if not len(nodes) and tier is Tier.RAIL:
            yield Refusal(Reason.NO_NIC, tier)
        against = _against(problem, loads, one, nodes, tier, kept=kept)
        for number in np.unique(against).tolist():
            here = nodes[against == number]
            names = tuple(problem.nodes[node].name for node in here.tolist())
            if number == _NOTHING:
                raise RuntimeError(
                    f"{stream.name} was not given {names[0]}, and nothing speaks against it"
                )
            reason = _REASONS[number]
            lacks = stream.memory_bytes - int(loads.free[here].max())
            yield Refusal(reason, tier, names, lacks if reason is Reason.FULL_MEMORY else 0)


def _against(problem: Problem, loads: Loads, one: int, nodes: Ints, tier: Tier, *, kept: bool) -> Ints:
    """For each node the first reason, as its number, or _NOTHING."""
    stream = problem.streams[one]
    found = np.full(len(nodes), _NOTHING, dtype=np.int64)
    if tier > stream.limit.worst:
        found[:] = _REASONS.index(Reason.RULE)
    elif kept:
        found[:] = _REASONS.index(Reason.RUNS_ELSEWHERE)
    found[loads.shards[nodes] <= 0] = _REASONS.index(Reason.CPU_GUARD)
    found[loads.free[nodes] < stream.memory_bytes] = _REASONS.index(Reason.FULL_MEMORY)
    for state, reason in _STATES.items():
        found[problem.states[nodes] == state] = _REASONS.index(reason)
    return found


def _route(problem: Problem, one: int, node: int) -> Route:
    stream = problem.streams[one]
    return route(problem.fleet, stream.box, stream.domain, problem.nodes[node])
