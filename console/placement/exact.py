"""Placing a few streams as well as can be: a mixed-integer program, solved to the proven optimum.

One binary for each stream and node, and the levels of `Cost` one after the other, each with those before
it held. Squares of loads are sums of secants through the whole numbers: loads are whole, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from console.placement.loads import NOWHERE, Floats, Ints, Loads, Problem
from console.placement.topology import Tier

NODES_MAX: Final = 2_000  # of the search. Not a time: a plan must not depend on how busy the machine is
SLACK: Final = 1e-7  # how much of a level the later ones may give up: what floats can't tell apart
LOAD_SCALE: Final = 1e3  # so that tolerances, which are absolute, are small beside it

_OPTIMAL: Final = 0
_LIMIT: Final = 1


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

    def solve(self, objective: Mapping[int, float]) -> tuple[Floats, float, bool] | None:
        """Values, the least sum, and whether it is proven; None if nothing was found within the limit."""
        weights = np.zeros(self.columns)
        weights[list(objective)] = list(objective.values())
        at_rows, at_columns, values = zip(*self.entries, strict=True)
        matrix = csr_array((values, (at_rows, at_columns)), shape=(self.rows, self.columns))
        lower, upper = zip(*self.bounds, strict=True)
        done = milp(
            weights,
            integrality=self.binary,
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(matrix, lower, upper),
            options={"node_limit": NODES_MAX, "mip_rel_gap": 0},
        )
        if done.status not in (_OPTIMAL, _LIMIT):
            raise RuntimeError(f"a placement has always a solution: {done.message}")
        return None if done.x is None else (done.x, float(done.fun), done.status == _OPTIMAL)


def solve(
    problem: Problem,
    without: Loads,
    nodes: Mapping[int, Ints],
    before: Sequence[int],
    *,
    even: bool,
) -> Found | None:
    """The best places for the streams in `nodes`, each at one of its nodes or nowhere.

    `without`: the loads without these streams. `before`: where each stream ran, NOWHERE if it is new.
    With `even` down to the last level of `Cost`, else without those of load and parts. None if nothing
    was found within the limit.
    """
    program = _Program()
    at = {
        (stream, node): program.column(binary=True)
        for stream in sorted(nodes)
        for node in nodes[stream].tolist()
    }
    nowhere = {stream: program.column(binary=True) for stream in sorted(nodes)}
    for stream in nowhere:
        here = [(column, 1.0) for (one, _), column in at.items() if one == stream]
        program.row([*here, (nowhere[stream], 1.0)], 1, 1)
    for node in sorted({node for _, node in at}):
        here = [(stream, column) for (stream, one), column in at.items() if one == node]
        unit = max(1, int(without.free[node]))  # as parts of what is free, so that all rows are alike
        program.row([(column, problem.memory[stream] / unit) for stream, column in here], -np.inf, 1)
        program.row([(column, 1.0) for _, column in here], -np.inf, float(without.shards[node]))
    levels = _levels(problem, at, nowhere, before)
    if even:
        levels += [_load(program, problem, without, at), _parts(program, problem, without, at)]
    proven, values = True, None
    for level in levels:
        answer = program.solve(level) if level else None
        if answer is None:
            proven = proven and not level
            continue
        values, least, is_optimal = answer
        proven = proven and is_optimal
        program.row(level.items(), -np.inf, least + SLACK * max(1.0, abs(least)))
    if values is None:
        return None
    places = dict.fromkeys(nodes, NOWHERE)
    places.update((stream, node) for (stream, node), column in at.items() if values[column] > 0.5)
    return Found(places, proven)


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
        {
            column: 1.0
            for (stream, node), column in at.items()
            if before[stream] not in (NOWHERE, node)
        },
    ]


def _load(
    program: _Program, problem: Problem, without: Loads, at: Mapping[tuple[int, int], int]
) -> dict[int, float]:
    """Columns that are at least the squares of the loads, and what they count."""
    level: dict[int, float] = {}
    for node in sorted({node for _, node in at}):
        here = [(stream, column) for (stream, one), column in at.items() if one == node]
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
