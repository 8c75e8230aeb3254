"""Placing a few streams as well as can be: a mixed-integer program, solved to the proven optimum.

One binary for each stream and node, and the levels of `Cost` one after the other, each with those
before it held. A square is what lies above its secants from one possible load to the next: nothing is
lost, since loads are whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from console.placement.loads import NOWHERE, Floats, Ints, Loads, Problem
from console.placement.solvers import Sums, least
from console.placement.topology import Tier

# Of the search. Not a time: a plan must not depend on how busy the machine is.
NODES_MAX: Final = 200
SLACK: Final = 1e-7  # how much of a level the later ones may give up: what floats can't tell apart
LOAD_SCALE: Final = 1e3  # so that tolerances, which are absolute, are small beside it

_OF_PLACES: Final = 4  # so many levels can't be below zero, and are whole numbers
_OPTIMAL: Final = 0


@dataclass(frozen=True, slots=True)
class Found:
    places: dict[int, int]  # of the streams that were asked about
    proven: bool  # nothing better exists


@dataclass(slots=True)
class _Program:
    """Rows and columns as they are added: lower ≤ sum of coefficients ≤ upper."""

    columns: int = 0
    rows: int = 0
    binary: list[int] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def column(self, *, binary: bool) -> int:
        self.binary.append(int(binary))
        self.upper.append(1 if binary else np.inf)
        self.columns += 1
        return self.columns - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        self.entries += [(self.rows, column, value) for column, value in terms]
        self.bounds.append((lower, upper))
        self.rows += 1

    def solve(self, objective: Mapping[int, float], nodes_max: int) -> tuple[Floats, float, bool] | None:
        """Values, the least sum, and whether it is proven; None if the solver found nothing.

        It may reach its limit first. And what is possible it may call impossible, since a level is held
        by sums that floats can't tell apart.
        """
        weights = np.zeros(self.columns)
        weights[list(objective)] = list(objective.values())
        at_rows, at_columns, values = zip(*self.entries, strict=True)
        lower, upper = zip(*self.bounds, strict=True)
        done = least(
            weights,
            self.upper,
            [Sums(values, at_rows, at_columns, (self.rows, self.columns), lower, upper)],
            integrality=self.binary,
            options={"node_limit": nodes_max, "mip_rel_gap": 0},
        )
        return None if done.x is None else (done.x, float(done.fun), done.status == _OPTIMAL)


def solve(
    problem: Problem,
    without: Loads,
    nodes: Mapping[int, Ints],
    now: Mapping[int, int],
    before: Sequence[int],
    *,
    even: bool,
    nodes_max: int = NODES_MAX,
) -> Found:
    """The best places for the streams in `nodes`, each at one of its nodes or nowhere.

    `without`: the loads without these streams. `now`: places that are possible, to begin with. `before`:
    where each stream ran, NOWHERE if it is new. With `even` down to the last level of `Cost`, else
    without those of load and parts. Where a search ends at `nodes_max` or in vain, what was found until
    then.
    """
    program = _Program()
    at = {
        (stream, node): program.column(binary=True)
        for stream in sorted(nodes)
        for node in without.with_room(stream, nodes[stream]).tolist()
    }
    nowhere = {stream: program.column(binary=True) for stream in sorted(nodes)}
    _one_place_each(program, at, nowhere)
    _no_node_too_full(program, problem, without, at)
    levels = _levels(problem, at, nowhere, before)
    if even:
        levels += [_load(program, problem, without, at), _parts(program, problem, without, at)]
    values = np.zeros(program.columns)
    values[[nowhere[one] if node == NOWHERE else at[one, node] for one, node in now.items()]] = 1
    proven = True
    for number, level in enumerate(levels):
        if not level:
            continue
        least = sum(values[column] * weight for column, weight in level.items())
        if number >= _OF_PLACES or least > 0:  # nothing is less than nothing
            answer = program.solve(level, nodes_max)
            while answer and (cut := _too_full(problem, without, at, answer[0])):
                program.row([(column, 1.0) for column in cut], 0, len(cut) - 1)
                answer = program.solve(level, nodes_max)
            if answer is None:
                proven = False
                break
            values, least, is_optimal = answer
            proven = proven and is_optimal
        program.row(level.items(), -np.inf, least + SLACK * max(1.0, least))
    places = dict.fromkeys(nodes, NOWHERE)
    places.update((stream, node) for (stream, node), column in at.items() if values[column] > 0.5)
    return Found(places, proven)


def _one_place_each(
    program: _Program, at: Mapping[tuple[int, int], int], nowhere: Mapping[int, int]
) -> None:
    here: dict[int, list[tuple[int, float]]] = {one: [(column, 1.0)] for one, column in nowhere.items()}
    for (stream, _), column in at.items():
        here[stream].append((column, 1.0))
    for terms in here.values():
        program.row(terms, 1, 1)


def _no_node_too_full(
    program: _Program, problem: Problem, without: Loads, at: Mapping[tuple[int, int], int]
) -> None:
    """Memory as parts of what is free: numbers near one. To the solver a millionth too much is nothing;
    it is a megabyte of a terabyte, so `_too_full` looks at what it says.
    """
    for node, here in _by_node(at).items():
        unit = int(without.free[node])  # above zero: somebody has room here
        program.row([(column, problem.memory[stream] / unit) for stream, column in here], -np.inf, 1)
        program.row([(column, 1.0) for _, column in here], -np.inf, int(without.shards[node]))


def _too_full(
    problem: Problem, without: Loads, at: Mapping[tuple[int, int], int], values: Floats
) -> list[int]:
    """Columns that together ask more of a node than it has, to the byte; empty if there are none."""
    for node, here in _by_node(at).items():
        chosen = [(stream, column) for stream, column in here if values[column] > 0.5]
        if sum(int(problem.memory[stream]) for stream, _ in chosen) > without.free[node]:
            return [column for _, column in chosen]
    return []


def _by_node(at: Mapping[tuple[int, int], int]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for (stream, node), column in at.items():
        found.setdefault(node, []).append((stream, column))
    return found


def _levels(
    problem: Problem,
    at: Mapping[tuple[int, int], int],
    nowhere: Mapping[int, int],
    before: Sequence[int],
) -> list[dict[int, float]]:
    """Unplaced, spine, leaf, moves, as `Cost` has them. A level with nothing in it is empty."""
    tiers = {pair: problem.tier(*pair) for pair in at}
    return [
        {column: float(problem.wio[stream]) for stream, column in nowhere.items()},
        *(
            {column: float(problem.wio[pair[0]]) for pair, column in at.items() if tiers[pair] is tier}
            for tier in (Tier.SPINE, Tier.LEAF)
        ),
        {column: 1.0 for (stream, node), column in at.items() if before[stream] not in (NOWHERE, node)},
    ]


def _load(
    program: _Program, problem: Problem, without: Loads, at: Mapping[tuple[int, int], int]
) -> dict[int, float]:
    """Columns that are at least the squares of the loads, and what they count."""
    level: dict[int, float] = {}
    for node, here in _by_node(at).items():
        wio = [(column, int(problem.wio[stream])) for stream, column in here]
        fill = [(column, int(problem.fill(stream, node))) for stream, column in here]
        for start, weight, terms in (
            (int(without.wio[node]), problem.weights.wio[node], wio),
            (int(without.fill[node]), problem.weights.fill[node], fill),
        ):
            square = program.column(binary=False)
            level[square] = float(weight) * LOAD_SCALE
            for low, high in pairwise(_sums(start, [size for _, size in terms])):
                # Through (low, low²) and (high, high²); the sum of the load begins at `start`.
                slope = low + high
                rest = [(column, -float(slope * size)) for column, size in terms]
                program.row([(square, 1.0), *rest], slope * start - low * high, np.inf)
    return level


def _sums(start: int, sizes: Iterable[int]) -> list[int]:
    """Every load that is possible."""
    found = {start}
    for size in sizes:
        found |= {one + size for one in found}
    return sorted(found)


def _parts(
    program: _Program, problem: Problem, without: Loads, at: Mapping[tuple[int, int], int]
) -> dict[int, float]:
    """A column for each session and node that come together anew."""
    level: dict[int, float] = {}
    known: dict[tuple[int, int], int] = {}
    for (stream, node), column in at.items():
        part = int(problem.session[stream]), node
        if without.parts[part]:
            continue
        if part not in known:
            known[part] = program.column(binary=True)
            level[known[part]] = 1.0
        program.row([(known[part], 1.0), (column, -1.0)], 0, np.inf)
    return level
