"""Planning: streams in, a plan out. Running streams stay where they are, unless they can't.

A handful of streams is solved to the proven optimum. All else goes through rounds of matchings; then, if
somebody could have a better path, one exact program for the paths of all of them, or many small ones,
called windows, if that is too large; then matchings again, which make loads even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np

from console.placement import exact, rounds, windows
from console.placement.grants import Stream
from console.placement.loads import NOWHERE, Loads, Problem, cost
from console.placement.plan import BringBack, Move, Plan
from console.placement.reasons import placed, unplaced
from console.placement.topology import Fleet, Tier

EXACT_PAIRS_MAX: Final = 24  # of a stream and a node: as many as take 0.3 s when loads have to be even
EXACT_PATH_PAIRS_MAX: Final = 2_000  # … when only paths count
EVENING_TURNS: Final = 4

_Moves: TypeAlias = list[tuple[int, int]]  # of streams to nodes, that only make sense together
_Step: TypeAlias = Callable[[Problem, Loads, list[int], list[int]], Iterator[_Moves]]


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
    """Whether it is proven that paths can't be better. Mutates `loads` and `places`."""
    if not movable:
        return True
    pairs = sum(len(problem.candidates[one].all) for one in movable)
    if pairs <= EXACT_PAIRS_MAX and _solve(problem, loads, places, movable, before, even=True):
        return True
    rounds.place(problem, loads, places, [one for one in movable if places[one] == NOWHERE])
    proven = not any(windows.could_be_better(problem, places, one) for one in movable)
    if not proven and pairs <= EXACT_PATH_PAIRS_MAX:
        proven = _solve(problem, loads, places, movable, before, even=False)
    elif not proven:
        _make_room(problem, loads, places, movable, before)
    _lift(problem, loads, places, movable)
    rounds.rematch(problem, loads, places, movable, EVENING_TURNS)
    _lift(problem, loads, places, movable)
    return proven or not any(windows.could_be_better(problem, places, one) for one in movable)


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
        _put(loads, places, one, NOWHERE)
    nodes = {one: problem.candidates[one].all for one in movable}
    found = exact.solve(problem, loads, nodes, now, before, even=even)
    for one, node in found.places.items():
        _put(loads, places, one, node)
    return found.proven


def _put(loads: Loads, places: list[int], one: int, node: int) -> None:
    if places[one] != NOWHERE:
        loads.take(one, places[one])
    places[one] = node
    if node != NOWHERE:
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
        for stream, node in changed.items():
            _put(loads, places, stream, node)


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

    First whoever finds a rail that is free, then windows in which others give way, then who can at least
    leave the spine. A stream occupies both places while it moves, so room that a move leaves counts for
    later moves only.
    """
    problem = Problem(fleet, running, {})
    before = [problem.node(running[stream]) for stream in problem.streams]
    places, loads = list(before), problem.empty.copy()
    for one, node in enumerate(places):
        loads.add(one, node)
    at_first = cost(problem, loads, places, before)
    left = len(places) if moves_max is None else moves_max
    moves: dict[int, int] = {}
    for step in (_to_free(Tier.RAIL), _give_way, _to_free(Tier.LEAF)):
        for group in step(problem, loads, places, before):
            if len(group) <= left:
                left -= len(group)
                for one, node in group:
                    moves[one] = node
                    _put(loads, places, one, node)
    return BringBack(
        tuple(_move(problem, one, before[one], node) for one, node in moves.items()),
        at_first,
        cost(problem, loads, places, before),
        tuple(
            placed(problem, loads, one, places[one], before[one], kept=True)
            for one in range(len(places))
            if problem.tier(one, places[one]) is not Tier.RAIL
        ),
    )


def _move(problem: Problem, one: int, source: int, target: int) -> Move:
    return Move(
        problem.streams[one],
        problem.nodes[source].name,
        problem.nodes[target].name,
        problem.tier(one, source),
        problem.tier(one, target),
    )


def _to_free(tier: Tier) -> _Step:
    """Moves to this tier that have room while everybody is still where they are; the heaviest first."""

    def step(problem: Problem, loads: Loads, places: list[int], before: list[int]) -> Iterator[_Moves]:
        able = [
            one
            for one in _worst_first(problem, places, range(len(places)))
            if places[one] == before[one] and problem.tier(one, places[one]) > tier
        ]
        targets = [NOWHERE] * len(places)
        rounds.place_at(problem, loads.copy(), targets, able, tier)
        return iter([[(one, targets[one])] for one in able if targets[one] != NOWHERE])

    return step


def _give_way(problem: Problem, loads: Loads, places: list[int], before: list[int]) -> Iterator[_Moves]:
    """Moves that make room and use it. Looks at what has been done when it is asked for the next."""
    everybody = range(len(places))
    for one in _worst_first(problem, places, everybody)[: windows.WINDOWS_MAX]:
        movable = [other for other in everybody if places[other] == before[other]]
        if places[one] == before[one]:
            changed = windows.improve(problem, loads, places, movable, before, one)
            yield _in_order(loads, places, changed)


def _in_order(loads: Loads, places: list[int], changed: Mapping[int, int]) -> _Moves:
    """These moves so that each has room at its time; none if they wait for each other in a circle."""
    loads = loads.copy()
    left, order = dict(changed), _Moves()
    while left:
        ready = (
            one for one, node in left.items() if loads.has_room(np.array([one]), np.array([node])).all()
        )
        one = next(ready, None)
        if one is None:
            return []
        loads.add(one, left[one])
        loads.take(one, places[one])
        order.append((one, left.pop(one)))
    return order
