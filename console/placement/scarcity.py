"""Who gets what is scarce: the streams that are worth most to have near, before any is placed.

Where rails don't suffice for all, the largest first would be wrong: it is WIO that must not cross the
spine, and memory that is short. A linear program over kinds of streams and pools of nodes, as if memory
were a liquid, says how many of each kind should stay near.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from console.placement.loads import Ints, Loads, Problem
from console.placement.solvers import Sums, least
from console.placement.topology import Tier

WORTH: Final = {Tier.RAIL: 1.0, Tier.LEAF: 0.99}  # of a WIO that does not cross the spine
USABLE: Final = (1.0, 0.96)  # of free memory: what streams, which are not liquid, might get to fill
WHOLE: Final = 1e-6  # so near to the next whole number is that number


def by_worth(
    problem: Problem, loads: Loads, wanted: Iterable[int], usable: float
) -> tuple[list[int], list[int]]:
    """Those that should be placed first, and the others, if so much of the free memory can be used."""
    kinds: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for one in sorted(wanted):
        kinds[id(problem.candidates[one]), int(problem.memory[one]), int(problem.wio[one])].append(one)
    first: list[int] = []
    others: list[int] = []
    for streams, count in zip(
        kinds.values(), _counts(problem, loads, list(kinds.values()), usable), strict=True
    ):
        first += streams[:count]
        others += streams[count:]
    return first, others


def _counts(problem: Problem, loads: Loads, kinds: Sequence[list[int]], usable: float) -> list[int]:
    """How many of each kind are to stay near."""
    pools = _pools(problem)
    columns: list[tuple[int, int, float]] = []  # kind, pool, worth
    for kind, (one, *_) in enumerate(kinds):
        for tier, worth in WORTH.items():
            near = np.unique(pools[problem.candidates[one].of(tier)])
            columns += [(kind, pool, worth * float(problem.wio[one])) for pool in near.tolist()]
    if not columns:
        return [0] * len(kinds)
    of_kind, of_pool, worths = (np.array(each) for each in zip(*columns, strict=True))
    size = int(pools.max()) + 1
    memory = usable * np.bincount(pools, np.maximum(loads.free, 0) * (loads.shards > 0), size)
    shards = np.bincount(pools, np.maximum(loads.shards, 0), size)
    unit = max(1.0, float(memory.max()))  # so that all numbers are near one
    most = np.array([len(streams) for streams in kinds])
    needs = problem.memory[[streams[0] for streams in kinds]] / unit
    ones, each = np.ones(len(columns)), np.arange(len(columns))
    done = least(
        -worths,
        most[of_kind],
        [
            Sums(values, rows, each, (len(upper), len(each)), -np.inf, upper)
            for values, rows, upper in (
                (ones, of_kind, most),
                (needs[of_kind], of_pool, memory / unit),
                (ones, of_pool, shards),
            )
        ],
    )
    if done.x is None:
        raise RuntimeError(f"to place nobody near is always possible: {done.message}")
    return [int(count + WHOLE) for count in np.bincount(of_kind, done.x, len(kinds))]


def _pools(problem: Problem) -> Ints:
    """For each node the number of its pool: nodes with the same leaves."""
    numbers: dict[frozenset[str], int] = {}
    return np.array([numbers.setdefault(node.leaves, len(numbers)) for node in problem.nodes])
