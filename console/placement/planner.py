"""Planning: streams in, a plan out. Running streams stay where they are, unless they can't.

A handful of streams is solved to the proven optimum. All else goes through rounds of matchings; then, if
somebody could have a better path, one exact program for the paths of all of them, or many small ones,
called windows, if that is too large; then matchings again, which make loads even.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import numpy as np

from console.placement import exact, rounds, scarcity, windows
from console.placement.grants import Stream
from console.placement.loads import NOWHERE, Loads, Problem, cost, paths, put
from console.placement.plan import Placed, Plan
from console.placement.reasons import placed, unplaced
from console.placement.topology import Fleet

EXACT_PAIRS_MAX: Final = 24  # of a stream and a node: as many as take 0.3 s when loads have to be even
EXACT_PATH_PAIRS_MAX: Final = 2_000  # … when only paths count
EVENING_TURNS: Final = 8


def plan(fleet: Fleet, wanted: Iterable[Stream], running: Mapping[Stream, str] | None = None) -> Plan:
    """A place for each wanted stream. Raises Misconfigured if the input contradicts itself.

    `running`: what runs where, of these streams and all others; they are the same if their keys are.
    Others stay. Wanted streams that run stay too, at their new size, unless their node has no room for
    it, has to be left, or their path is not allowed any more; then they move. Room that a move leaves
    counts as free, so whoever carries a plan out makes its moves before the rest; those that are `stuck`
    wait for each other's room, since a stream takes both places while it moves.
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
    found = tuple(
        placed(problem, loads, one, places[one], before[one], kept=one in kept)
        for one in range(len(places))
        if places[one] != NOWHERE
    )
    return Plan(
        found,
        tuple(unplaced(problem, loads, one) for one in range(len(places)) if places[one] == NOWHERE),
        cost(problem, loads, places, before),
        proven,
        _stuck(fleet, found, running or {}),
    )


def _stuck(fleet: Fleet, found: Iterable[Placed], running: Mapping[Stream, str]) -> tuple[Placed, ...]:
    """Those that run and are left over where each becomes what it is to be as soon as there is room."""
    free = {node.name: node.memory_bytes for node in fleet.nodes}
    has = {}
    for stream, node in running.items():
        free[node] -= stream.memory_bytes
        has[stream.key] = stream.memory_bytes
    left = [one for one in found if one.before is not None]
    before = len(left) + 1
    while before > len(left):
        before, waiting = len(left), left
        left = []
        for one in waiting:
            own = has[one.stream.key]
            more = one.stream.memory_bytes - (0 if one.moves else own)
            if more > max(0, free[one.node]):
                left.append(one)
                continue
            free[one.node] -= more
            if one.moves and one.before is not None:
                free[one.before] += own
    return tuple(left)


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
    """Whether it is proven that paths can't be better. Mutates `loads` and `places`."""
    if not movable:
        return True
    pairs = sum(len(problem.candidates[one].all) for one in movable)
    if pairs <= EXACT_PAIRS_MAX and _solve(problem, loads, places, movable, before, even=True):
        return True
    _rounds(problem, loads, places, [one for one in movable if places[one] == NOWHERE])
    proven = not any(windows.could_be_better(problem, places, one) for one in movable)
    if not proven and pairs <= EXACT_PATH_PAIRS_MAX:
        proven = _solve(problem, loads, places, movable, before, even=False)
    elif not proven:
        _make_room(problem, loads, places, movable, before)
    _lift(problem, loads, places, movable)
    rounds.rematch(problem, loads, places, movable, EVENING_TURNS)
    _lift(problem, loads, places, movable)
    return proven or not any(windows.could_be_better(problem, places, one) for one in movable)


def _rounds(problem: Problem, loads: Loads, places: list[int], wanted: list[int]) -> None:
    """Rounds that make loads even. Where somebody could be better, others too, that make nodes full,
    with those first who are worth most near; and then whichever gave the better paths.
    """
    rounds.place(problem, loads, places, wanted)
    if not any(windows.could_be_better(problem, places, one) for one in wanted):
        return
    found = [{one: places[one] for one in wanted}]
    for usable in scarcity.USABLE:
        for one in wanted:
            put(loads, places, one, NOWHERE)
        first, others = scarcity.by_worth(problem, loads, wanted, usable)
        rounds.place(problem, loads, places, first, others, tight=True)
        found.append({one: places[one] for one in wanted})
    for one, node in min(found, key=lambda each: paths(problem, each, wanted)).items():
        put(loads, places, one, node)


def _solve(
    problem: Problem,
    loads: Loads,
    places: list[int],
    movable: list[int],
    before: list[int],
    *,
    even: bool,
) -> bool:
    """The best places for all of them. Whether that is proven; if not, they are no worse than before."""
    now = {one: places[one] for one in movable}
    for one in movable:
        put(loads, places, one, NOWHERE)
    nodes = {one: problem.candidates[one].all for one in movable}
    found = exact.solve(problem, loads, nodes, now, before, even=even)
    for one, node in found.places.items():
        put(loads, places, one, node)
    return found.proven


def _make_room(
    problem: Problem, loads: Loads, places: list[int], movable: Collection[int], before: list[int]
) -> None:
    for changed in windows.gains(problem, loads, places, movable, before):
        for stream, node in changed.items():
            put(loads, places, stream, node)


def _lift(problem: Problem, loads: Loads, places: list[int], movable: Collection[int]) -> None:
    """Take everybody to a better path that has room by now, until there is none.

    Ends, since each step makes the cost less.
    """
    found = True
    while found:
        found = False
        for one in windows.worst_first(problem, places, movable):
            nodes = problem.candidates[one].better_than(windows.tier_of(problem, places, one))
            nodes = loads.with_room(one, nodes)
            if len(nodes):
                tiers = np.array([problem.tier(one, node) for node in nodes.tolist()])
                more = loads.more(np.full(len(nodes), one), nodes)
                put(loads, places, one, int(nodes[np.lexsort((nodes, more, tiers))[0]]))
                found = True
