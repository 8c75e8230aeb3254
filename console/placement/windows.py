"""Making room for a stream: who stands where it should be goes aside, if that costs less.

A window is the stream, a few nodes of a better path, who runs on them, and a few nodes to which these
could go. It is small enough to be solved exactly, whatever the size of the fleet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from console.placement import exact
from console.placement.loads import NOWHERE, Ints, Loads, Problem, paths
from console.placement.topology import Tier

TARGETS: Final = 4  # nodes at which room is looked for
ASIDE: Final = 2  # nodes to which each of those who run there may go
WINDOWS_MAX: Final = 64  # in one plan
IN_VAIN_MAX: Final = 3  # one after the other: then there is no room to be made
# Nodes of a search: what a window gains it gains early, if memory is not too short.
SEARCH_MAX: Final = 20


def tier_of(problem: Problem, places: Sequence[int], one: int) -> Tier | None:
    return None if places[one] == NOWHERE else problem.tier(one, places[one])


def could_be_better(problem: Problem, places: Sequence[int], one: int) -> bool:
    """Is there a node in the fleet, full or not, that would give it a better path?"""
    best, tier = problem.candidates[one].best, tier_of(problem, places, one)
    return best is not None and (tier is None or best < tier)


def worst_first(problem: Problem, places: Sequence[int], streams: Iterable[int]) -> list[int]:
    """Those that could be better, by what that would gain."""
    able = [one for one in streams if could_be_better(problem, places, one)]

    def rank(one: int) -> tuple[int, int, int]:
        tier = len(Tier) if places[one] == NOWHERE else int(problem.tier(one, places[one]))
        return -tier, -int(problem.wio[one]), one

    return sorted(able, key=rank)


def gains(
    problem: Problem,
    loads: Loads,
    places: Sequence[int],
    movable: Collection[int],
    before: Sequence[int],
) -> Iterator[dict[int, int]]:
    """Other places that cost less, window by window, of what can be better the worst first.

    Whoever takes them changes `loads` and `places` before asking for the next.
    """
    in_vain = 0
    for one in worst_first(problem, places, movable)[:WINDOWS_MAX]:
        if could_be_better(problem, places, one):
            changed = improve(problem, loads, places, movable, before, one)
            in_vain = 0 if changed else in_vain + 1
            yield changed
        if in_vain == IN_VAIN_MAX:
            return


def improve(
    problem: Problem,
    loads: Loads,
    places: Sequence[int],
    movable: Collection[int],
    before: Sequence[int],
    one: int,
) -> dict[int, int]:
    """Other places that cost less, for this stream and those who give way; nothing if there are none."""
    targets = problem.candidates[one].better_than(tier_of(problem, places, one))
    targets = _freest(loads, targets[loads.is_within(targets)], TARGETS)
    here = set(targets.tolist())
    residents = [other for other in sorted(movable) if other != one and places[other] in here]
    nodes = {one: _with_own(targets, places[one])}
    for other in residents:
        nodes[other] = _with_own(_choices(problem, loads, places, other, targets), places[other])
    without = loads.forgiven()
    for stream in nodes:
        if places[stream] != NOWHERE:
            without.take(stream, places[stream])
    was = {stream: places[stream] for stream in nodes}
    found = exact.solve(problem, without, nodes, was, before, even=False, nodes_max=SEARCH_MAX)
    if _price(problem, found.places, before) >= _price(problem, was, before):
        return {}
    return {stream: node for stream, node in found.places.items() if node != was[stream]}


def _choices(problem: Problem, loads: Loads, places: Sequence[int], other: int, targets: Ints) -> Ints:
    """Where somebody who runs at a target may go: another target, or aside to where there is room."""
    nodes = problem.candidates[other].up_to(problem.tier(other, places[other]))
    aside = _freest(loads, loads.with_room(other, nodes), ASIDE)
    return np.union1d(np.intersect1d(nodes, targets), aside)


def _freest(loads: Loads, nodes: Ints, count: int) -> Ints:
    """Those with most memory free; a node whose CPU guard is reached comes after all others."""
    order = np.lexsort((nodes, -loads.free[nodes], loads.shards[nodes] <= 0))
    first: Ints = nodes[order[:count]]
    return first


def _with_own(nodes: Ints, own: int) -> Ints:
    return nodes if own == NOWHERE else np.union1d(nodes, np.array([own]))


def _price(problem: Problem, places: Mapping[int, int], before: Sequence[int]) -> tuple[int, ...]:
    """The first levels of `Cost`, of these streams only."""
    moves = sum(node != NOWHERE and before[one] not in (NOWHERE, node) for one, node in places.items())
    return *paths(problem, places, places), moves
