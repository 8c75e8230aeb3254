"""Planning: streams in, a plan out. Running streams stay where they are, unless they can't.

Small problems are solved to the proven optimum. Large ones go through rounds of matchings, then windows
for whoever could have a better path, then matchings again that make loads even.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import numpy as np

from console.placement import exact, rounds, windows
from console.placement.grants import Stream
from console.placement.loads import NOWHERE, Loads, Problem, cost
from console.placement.plan import BringBack, Move, Plan
from console.placement.reasons import placed, unplaced
from console.placement.topology import Fleet, Tier

EXACT_PAIRS_MAX: Final = 120  # of a stream and a node that may take it
EVENING_TURNS: Final = 4


def plan(fleet: Fleet, wanted: Iterable[Stream], running: Mapping[Stream, str] | None = None) -> Plan:
    """A place for each wanted stream. Raises Misconfigured if the input contradicts itself.

    `running`: what runs where, of these streams and all others; they are the same if their keys are.
    Others stay. Wanted streams that run stay too, at their new size, unless their node has no room for
    it, has to be left, or their path is not allowed any more; then they move. Room that a move leaves
    counts as free, so whoever carries a plan out makes its moves before the rest.
    """
    streams = list(wanted)
    keys = {stream.key for stream in streams}
    own = {stream.key: node for stream, node in (running or {}).items() if stream.key in keys}
    others = {stream: node for stream, node in (running or {}).items() if stream.key not in keys}
    problem = Problem(fleet, streams, others)
    before = [
        problem.node(own[stream.key]) if stream.key in own else NOWHERE for stream in problem.streams
    ]
    loads = problem.empty.copy()
    places = [NOWHERE] * len(before)
    _keep(problem, loads, places, before)
    kept = {one for one, node in enumerate(places) if node != NOWHERE}
    movable = [one for one, node in enumerate(places) if node == NOWHERE]
    proven = _place(problem, loads, places, movable, before)
    return Plan(
        tuple(
            placed(problem, loads, one, places[one], before[one], kept=one in kept)
            for one in range(len(places))
            if places[one] != NOWHERE
        ),
        tuple(unplaced(problem, loads, one) for one in range(len(places)) if places[one] == NOWHERE),
        cost(problem, loads, places, before),
        proven,
    )


def _keep(problem: Problem, loads: Loads, places: list[int], before: list[int]) -> None:
    """Leave where it is what runs and may stay there, the smallest first: so as many as can be."""
    running = [one for one, node in enumerate(before) if node != NOWHERE]
    for one in sorted(running, key=lambda one: (problem.memory[one], one)):
        node, stream = before[one], problem.streams[one]
        allowed = problem.tier(one, node) <= stream.limit.worst and problem.nodes[node].state.keeps
        if allowed and loads.has_room(np.array([one]), np.array([node])).all():
            places[one] = node
            loads.add(one, node)


def _place(
    problem: Problem, loads: Loads, places: list[int], movable: list[int], before: list[int]
) -> bool:
    """Whether it is proven that nobody could have a better path. Mutates `loads` and `places`."""
    nodes = {one: problem.candidates[one].all for one in movable}
    if sum(map(len, nodes.values())) <= EXACT_PAIRS_MAX:
        now = dict.fromkeys(movable, NOWHERE)
        found = exact.solve(problem, loads, nodes, now, before, even=True)
        if found.proven:
            for one, node in found.places.items():
                if node != NOWHERE:
                    _put(loads, places, one, node)
            return True
    rounds.place(problem, loads, places, movable)
    _make_room(problem, loads, places, movable, before)
    _lift(problem, loads, places, movable)
    rounds.rematch(problem, loads, places, movable, EVENING_TURNS)
    _lift(problem, loads, places, movable)
    return not any(windows.could_be_better(problem, places, one) for one in movable)


def _put(loads: Loads, places: list[int], one: int, node: int) -> None:
    if places[one] != NOWHERE:
        loads.take(one, places[one])
    places[one] = node
    loads.add(one, node)


def _worst_first(problem: Problem, places: list[int], streams: Iterable[int]) -> list[int]:
    """Those that could be better, by what that would gain."""
    able = [one for one in streams if windows.could_be_better(problem, places, one)]

    def rank(one: int) -> tuple[int, int, int]:
        tier = len(Tier) if places[one] == NOWHERE else int(problem.tier(one, places[one]))
        return -tier, -int(problem.wio[one]), one

    return sorted(able, key=rank)


def _make_room(
    problem: Problem, loads: Loads, places: list[int], movable: Collection[int], before: list[int]
) -> None:
    for one in _worst_first(problem, places, movable)[: windows.WINDOWS_MAX]:
        changed = windows.improve(problem, loads, places, movable, before, one)
        for stream in changed:
            if places[stream] != NOWHERE:
                loads.take(stream, places[stream])
        for stream, node in changed.items():
            places[stream] = node
            if node != NOWHERE:
                loads.add(stream, node)


def _lift(problem: Problem, loads: Loads, places: list[int], movable: Collection[int]) -> None:
    """Take everybody to a better path that has room by now, until there is none.

    Ends, since each step makes the cost less.
    """
    found = True
    while found:
        found = False
        for one in _worst_first(problem, places, movable):
            nodes = problem.candidates[one].better_than(windows.tier_of(problem, places, one))
            nodes = nodes[loads.has_room(np.full(len(nodes), one), nodes)]
            if len(nodes):
                tiers = np.array([problem.tier(one, node) for node in nodes.tolist()])
                more = loads.more(np.full(len(nodes), one), nodes)
                _put(loads, places, one, int(nodes[np.lexsort((nodes, more, tiers))[0]]))
                found = True


def bring_back(fleet: Fleet, running: Mapping[Stream, str], moves_max: int | None = None) -> BringBack:
    """Which streams to move so that fewer cross the spine. Few moves: nobody moves without a gain.

    First whoever finds room on a better path as things are, then windows in which others give way. A
    stream occupies both places while it moves, so room that a move leaves counts for later moves only.
    """
    problem = Problem(fleet, running, {})
    places = [problem.node(running[stream]) for stream in problem.streams]
    loads = problem.empty.copy()
    for one, node in enumerate(places):
        loads.add(one, node)
    before = list(places)
    at_first = cost(problem, loads, places, before)
    moves: list[tuple[int, int]] = []
    limit = len(places) if moves_max is None else moves_max
    everyone = range(len(places))
    for one, node in _direct(problem, loads, places, before)[:limit]:
        moves.append((one, node))
        _put(loads, places, one, node)
    moved = {one for one, _ in moves}
    for one in _worst_first(problem, places, everyone)[: windows.WINDOWS_MAX]:
        movable = [other for other in everyone if other not in moved]
        if one in moved:
            continue
        changed = windows.improve(problem, loads, places, movable, before, one)
        order = _in_order(loads, places, changed)
        if order is None or len(moves) + len(order) > limit:
            continue
        moves += order
        moved |= changed.keys()
        for stream, node in order:
            _put(loads, places, stream, node)
    return BringBack(
        tuple(
            Move(
                problem.streams[one],
                problem.nodes[before[one]].name,
                problem.nodes[node].name,
                problem.tier(one, before[one]),
                problem.tier(one, node),
            )
            for one, node in moves
        ),
        at_first,
        cost(problem, loads, places, before),
        tuple(
            placed(problem, loads, one, places[one], before[one], kept=True)
            for one in everyone
            if problem.tier(one, places[one]) is not Tier.RAIL
        ),
    )


def _direct(
    problem: Problem, loads: Loads, places: list[int], before: list[int]
) -> list[tuple[int, int]]:
    """Moves to better paths that have room while all are still where they were; the heaviest first."""
    able = _worst_first(problem, places, range(len(places)))
    busy = loads.copy()
    target = [NOWHERE] * len(places)
    for tier in (Tier.RAIL, Tier.LEAF):
        waiting = [
            one for one in able if target[one] == NOWHERE and problem.tier(one, before[one]) > tier
        ]
        rounds.place_at(problem, busy, target, waiting, tier)
    return [(one, target[one]) for one in able if target[one] != NOWHERE]


def _in_order(
    loads: Loads, places: list[int], changed: Mapping[int, int]
) -> list[tuple[int, int]] | None:
    """These moves so that each has room at its time; None if they wait for each other in a circle."""
    loads = loads.copy()
    left, order = dict(changed), []
    while left:
        ready = (
            one for one, node in left.items() if loads.has_room(np.array([one]), np.array([node])).all()
        )
        one = next(ready, None)
        if one is None:
            return None
        loads.add(one, left[one])
        loads.take(one, places[one])
        order.append((one, left.pop(one)))
    return order
