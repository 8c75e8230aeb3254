"""Placing many streams: rounds of optimal matchings, the largest streams first.

In each round a node gets one stream at most, so whether it fits is a question of the pair alone, and
the best round is a minimum-weight matching. Who is left out waits for the next one; who has no node with
room at this tier goes on to the next tier. A round knows what the nodes have by then: large streams meet
nodes with little, which keeps loads even, or nodes that they just fill, where memory is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from console.placement.loads import NOWHERE, Floats, Ints, Loads, Problem
from console.placement.solvers import matched
from console.placement.topology import Tier

PAIRS_MAX: Final = 200_000  # of a stream and a node, in one matching
TOGETHER: Final = 1e-12  # what it is worth to be where the session is already: decides between equals
SMALLEST: Final = 1e-9  # an edge of weight zero would be none


@dataclass(frozen=True, slots=True)
class Pairs:
    """Streams and the nodes that have room for them, one entry for each pair, stream by stream."""

    streams: Ints  # in the order of `rows`
    rows: Ints  # for each pair, which of the streams
    nodes: Ints

    @classmethod
    def of(cls, problem: Problem, loads: Loads, streams: Sequence[int], tiers: Sequence[Tier]) -> Pairs:
        found = [problem.candidates[one].of(tier) for one, tier in zip(streams, tiers, strict=True)]
        numbers = np.array(streams, dtype=np.int64)
        rows = np.repeat(np.arange(len(streams)), [len(nodes) for nodes in found])
        nodes = np.concatenate(found) if found else numbers
        fits = loads.has_room(numbers[rows], nodes)
        return cls(numbers, rows[fits], nodes[fits])

    @property
    def counts(self) -> Ints:
        return np.bincount(self.rows, minlength=len(self.streams))

    def without(self, gone: Ints) -> Pairs:
        """Less these rows, which have no pairs."""
        renumbered = np.cumsum(~np.isin(np.arange(len(self.streams)), gone)) - 1
        return Pairs(np.delete(self.streams, gone), renumbered[self.rows], self.nodes)


def place(
    problem: Problem, loads: Loads, places: list[int], *groups: Iterable[int], tight: bool = False
) -> None:
    """Fill `places` and `loads` for these streams, as far as there is room. Mutates both.

    Streams of an earlier group choose before those of a later one, but for nodes across the spine. Loads
    get even, or with `tight` nodes get full.
    """
    left: list[int] = []
    for group in groups:
        waiting = list(group)
        for tier in (Tier.RAIL, Tier.LEAF):
            waiting = place_at(problem, loads, places, waiting, tier, tight=tight)
        left += waiting
    place_at(problem, loads, places, left, Tier.SPINE)


def place_at(
    problem: Problem,
    loads: Loads,
    places: list[int],
    wanted: Iterable[int],
    tier: Tier,
    *,
    tight: bool = False,
) -> list[int]:
    """Those that find no room at this tier."""
    waiting = sorted(wanted, key=lambda one: (-problem.memory[one], -problem.wio[one], one))
    without: list[int] = []
    while waiting:
        turn, waiting = _cut(problem, waiting, tier)
        pairs = Pairs.of(problem, loads, turn, [tier] * len(turn))
        gone = np.flatnonzero(pairs.counts == 0)
        without += pairs.streams[gone].tolist()
        pairs = pairs.without(gone)
        left_out = []
        for one, node in zip(
            pairs.streams.tolist(), _match(problem, loads, pairs, leave=True, tight=tight), strict=True
        ):
            if node == NOWHERE:
                left_out.append(one)
            else:
                places[one] = node
                loads.add(one, node)
        waiting = left_out + waiting
    return without


def _cut(problem: Problem, waiting: list[int], tier: Tier) -> tuple[list[int], list[int]]:
    """As many as there are nodes for them in one round, and the others."""
    sizes = np.cumsum([len(problem.candidates[one].of(tier)) for one in waiting[: len(problem.nodes)]])
    count = max(1, int(np.searchsorted(sizes, PAIRS_MAX)))
    return waiting[:count], waiting[count:]


def _match(
    problem: Problem, loads: Loads, pairs: Pairs, *, leave: bool, tight: bool = False
) -> list[int]:
    """A node for each stream: every node once at most, and least in all. NOWHERE only with `leave`."""
    count, first = len(pairs.streams), len(problem.nodes)
    if not count:
        return []
    each = pairs.streams[pairs.rows]
    together = TOGETHER * (loads.parts[problem.session[each], pairs.nodes] > 0)
    if tight:
        price = (loads.free[pairs.nodes] - problem.memory[each]) / problem.memory_of_node[pairs.nodes]
    else:
        price = loads.more(each, pairs.nodes)
    weights = SMALLEST + price - together
    rows, columns = pairs.rows, pairs.nodes
    if leave:
        # Columns behind the nodes are places outside, one for each; heavy streams are kept in first.
        outside: Floats = 4 * weights.max() * problem.wio[pairs.streams]
        rows = np.append(rows, np.arange(count))
        columns = np.append(columns, first + np.arange(count))
        weights = np.append(weights, outside)
    chosen = matched(weights, rows, columns, (count, first + count))
    return [node if node < first else NOWHERE for node in chosen.tolist()]


def rematch(
    problem: Problem, loads: Loads, places: list[int], movable: Sequence[int], turns: int
) -> None:
    """Make loads more even: in each turn, take one stream from every node and match these anew.

    Nobody goes to a worse tier, and what there was is among the choices, so it never gets worse.
    """
    for turn in range(turns):
        chosen = _one_of_each(places, movable, turn)
        for one in chosen:
            loads.take(one, places[one])
        tiers = [problem.tier(one, places[one]) for one in chosen]
        pairs = Pairs.of(problem, loads, chosen, tiers)
        for one, node in zip(chosen, _match(problem, loads, pairs, leave=False), strict=True):
            places[one] = node
            loads.add(one, node)


def _one_of_each(places: Sequence[int], movable: Sequence[int], turn: int) -> list[int]:
    by_node: dict[int, list[int]] = {}
    for one in movable:
        if places[one] != NOWHERE:
            by_node.setdefault(places[one], []).append(one)
    return sorted(streams[turn % len(streams)] for streams in by_node.values())
