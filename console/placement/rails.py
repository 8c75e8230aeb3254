"""Bringing streams back on rails while they run: few moves, each of which gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from console.placement import rounds, windows
from console.placement.grants import Stream
from console.placement.loads import NOWHERE, Loads, Problem, cost, put
from console.placement.plan import Move, RailsPlan
from console.placement.reasons import placed
from console.placement.topology import Fleet, Tier

_Moves: TypeAlias = list[tuple[int, int]]  # of streams to nodes, that only make sense together
_Step: TypeAlias = Callable[[Problem, Loads, list[int], list[int]], Iterator[_Moves]]


def restore_rails(
    fleet: Fleet, running: Mapping[Stream, str], moves_max: int | None = None
) -> RailsPlan:
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
                    put(loads, places, one, node)
    return RailsPlan(
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
            for one in windows.worst_first(problem, places, range(len(places)))
            if places[one] == before[one] and problem.tier(one, places[one]) > tier
        ]
        targets = [NOWHERE] * len(places)
        rounds.place_at(problem, loads.copy(), targets, able, tier)
        return iter([[(one, targets[one])] for one in able if targets[one] != NOWHERE])

    return step


def _give_way(problem: Problem, loads: Loads, places: list[int], before: list[int]) -> Iterator[_Moves]:
    """Moves that make room and use it. Looks at what has been done when it is asked for the next."""
    everybody = range(len(places))
    for one in windows.worst_first(problem, places, everybody)[: windows.WINDOWS_MAX]:
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
