"""Streams and nodes as numbers, and what an assignment of one to the other costs.

Everything is put in order by name first, so that the order of the input makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from console.placement.grants import Stream
from console.placement.plan import Cost
from console.placement.topology import Fleet, Misconfigured, Node, State, Tier

FILL: Final = 256  # a node's memory in so many parts, when evenness is measured
NOWHERE: Final = -1
_TIERS: Final = tuple(Tier)

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_NO_NODES: Final[Ints] = np.zeros(0, dtype=np.int64)


class Candidates:
    """For ports on the same leaves: the tier of each node, and the ready nodes that a stream may get."""

    __slots__ = ("_by_tier", "all", "best", "tiers")

    def __init__(self, tiers: NDArray[np.int8], ready: NDArray[np.bool_], worst: Tier) -> None:
        self.tiers = tiers
        self._by_tier = [np.flatnonzero(ready & (tiers == tier) & (tier <= worst)) for tier in Tier]
        self.all: Ints = np.concatenate(self._by_tier)
        self.best = next((tier for tier in Tier if len(self.of(tier))), None)  # if nodes were empty

    def of(self, tier: Tier) -> Ints:
        return self._by_tier[tier]

    def up_to(self, tier: Tier) -> Ints:
        return np.concatenate(self._by_tier[: tier + 1])

    def better_than(self, tier: Tier | None) -> Ints:
        """Of all better tiers; all nodes if there is none to compare with."""
        return self.all if tier is None else np.concatenate([_NO_NODES, *self._by_tier[:tier]])


class Problem:
    """The streams to place, the nodes, and what runs on these already and stays."""

    def __init__(self, fleet: Fleet, streams: Iterable[Stream], staying: Mapping[Stream, str]) -> None:
        self.fleet = fleet
        self.nodes: Sequence[Node] = sorted(fleet.nodes, key=lambda node: node.name)
        self.streams: Sequence[Stream] = sorted(streams, key=lambda stream: stream.key)
        self.number = {node.name: number for number, node in enumerate(self.nodes)}
        everything = [stream.key for stream in (*self.streams, *staying)]
        if len(set(everything)) != len(everything):
            twice = next(key for key in everything if everything.count(key) > 1)
            raise Misconfigured(f"The stream {twice} is there twice.")
        self.memory = _ints(stream.memory_bytes for stream in self.streams)
        self.wio = _ints(stream.wio for stream in self.streams)
        self.memory_of_node = _ints(node.memory_bytes for node in self.nodes)
        self.shards_max = _ints(node.shards_max for node in self.nodes)
        self.weights = _Weights(self.nodes)
        sessions = sorted({stream.session for stream in self.streams})
        numbers = {session: number for number, session in enumerate(sessions)}
        self.session = _ints(numbers[stream.session] for stream in self.streams)
        self.empty = Loads(self, len(sessions))
        for stream, name in staying.items():
            self.empty.stays(stream, self.node(name), numbers.get(stream.session))
        self.states = np.array([node.state for node in self.nodes], dtype=object)
        self._ready: NDArray[np.bool_] = self.states == State.READY
        self._on_leaf = _by_leaf(self.nodes)
        known: dict[tuple[frozenset[str], frozenset[str], Tier], Candidates] = {}
        self.candidates: list[Candidates] = []
        for stream in self.streams:
            port = frozenset(fleet.domain(stream.box, stream.domain).leaves)
            key = port, fleet.box[stream.box].leaves, stream.limit.worst
            if key not in known:
                known[key] = self._candidates(*key)
            self.candidates.append(known[key])

    def node(self, name: str) -> int:
        """Raises Misconfigured if there is none."""
        if name not in self.number:
            raise Misconfigured(f"There is no node {name} in the fleet.")
        return self.number[name]

    def _candidates(self, port: Iterable[str], box: Iterable[str], worst: Tier) -> Candidates:
        tiers = np.full(len(self.nodes), Tier.SPINE, dtype=np.int8)
        tiers[self._with_nic_on(box)] = Tier.LEAF
        tiers[self._with_nic_on(port)] = Tier.RAIL
        return Candidates(tiers, self._ready, worst)

    def _with_nic_on(self, leaves: Iterable[str]) -> NDArray[np.bool_]:
        found = np.zeros(len(self.nodes), dtype=bool)
        for leaf in leaves:
            found |= self._on_leaf.get(leaf, False)
        return found

    def fill(self, streams: Ints | int, nodes: Ints | int) -> Ints:
        """For each pair: what the stream takes of the node's memory, in parts, rounded up."""
        return -(-FILL * self.memory[streams] // self.memory_of_node[nodes])

    def tier(self, stream: int, node: int) -> Tier:
        return _TIERS[int(self.candidates[stream].tiers[node])]


class _Weights:
    """What a square of WIO and of filled memory counts. A larger node counts for more."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        wio = np.array([node.wio for node in nodes], dtype=np.float64)
        memory = np.array([node.memory_bytes for node in nodes], dtype=np.float64)
        self.wio: Floats = 1 / (wio * wio.sum())
        self.fill: Floats = memory / memory.sum() / FILL**2


class Loads:
    """What nodes have left and carry. `add` and `take` are each other's reverse."""

    def __init__(self, problem: Problem, sessions: int) -> None:
        self._problem = problem
        self.free = problem.memory_of_node.copy()
        self.shards = problem.shards_max.copy()
        self.wio: Ints = np.zeros(len(problem.nodes), dtype=np.int64)
        self.fill: Ints = np.zeros(len(problem.nodes), dtype=np.int64)
        self.parts: Ints = np.zeros((sessions, len(problem.nodes)), dtype=np.int64)

    def copy(self) -> Loads:
        other = Loads.__new__(Loads)
        other._problem = self._problem  # noqa: SLF001
        other.free, other.shards = self.free.copy(), self.shards.copy()
        other.wio, other.fill, other.parts = self.wio.copy(), self.fill.copy(), self.parts.copy()
        return other

    def stays(self, stream: Stream, node: int, session: int | None) -> None:
        self.free[node] -= stream.memory_bytes
        self.shards[node] -= 1
        self.wio[node] += stream.wio
        self.fill[node] += -(-FILL * stream.memory_bytes // int(self._problem.memory_of_node[node]))
        if session is not None:
            self.parts[session, node] += 1

    def add(self, stream: int, node: int) -> None:
        self._change(stream, node, 1)

    def take(self, stream: int, node: int) -> None:
        self._change(stream, node, -1)

    def _change(self, stream: int, node: int, by: int) -> None:
        problem = self._problem
        self.free[node] -= by * problem.memory[stream]
        self.shards[node] -= by
        self.wio[node] += by * problem.wio[stream]
        self.fill[node] += by * problem.fill(stream, node)
        self.parts[problem.session[stream], node] += by

    def has_room(self, streams: Ints, nodes: Ints) -> NDArray[np.bool_]:
        """For each pair: could the node take the stream?"""
        fits: NDArray[np.bool_] = self.free[nodes] >= self._problem.memory[streams]
        return fits & (self.shards[nodes] > 0)

    def with_room(self, stream: int, nodes: Ints) -> Ints:
        """Those of the nodes that could take the stream."""
        found: Ints = nodes[self.has_room(np.full(len(nodes), stream), nodes)]
        return found

    def is_within(self, nodes: Ints) -> NDArray[np.bool_]:
        """For each node: has it no more than it may have? It may have been larger once."""
        fits: NDArray[np.bool_] = self.free[nodes] >= 0
        return fits & (self.shards[nodes] >= 0)

    def forgiven(self) -> Loads:
        """The same, but who has more than it may have is full, and may keep it."""
        other = self.copy()
        other.free, other.shards = np.maximum(self.free, 0), np.maximum(self.shards, 0)
        return other

    def more(self, streams: Ints, nodes: Ints) -> Floats:
        """For each pair: by how much does the load grow?"""
        weights, wio = self._problem.weights, self._problem.wio[streams]
        fill = self._problem.fill(streams, nodes)
        found: Floats = weights.wio[nodes] * wio * (2 * self.wio[nodes] + wio)
        found += weights.fill[nodes] * fill * (2 * self.fill[nodes] + fill)
        return found

    @property
    def load(self) -> float:
        weights = self._problem.weights
        # Of floats: who has far more than it may have has a fill whose square is no int64.
        return float((weights.wio * self.wio**2).sum() + (weights.fill * self.fill * self.fill).sum())


def cost(problem: Problem, loads: Loads, places: Sequence[int], before: Sequence[int]) -> Cost:
    """`before`: where the streams ran, NOWHERE if they are new."""
    moves = sum(was not in (NOWHERE, node) for node, was in zip(places, before, strict=True))
    parts = int((loads.parts > 0).sum())
    return Cost(*paths(problem, dict(enumerate(places)), range(len(places))), moves, loads.load, parts)


def paths(problem: Problem, places: Mapping[int, int], streams: Iterable[int]) -> tuple[int, int, int]:
    """The WIO of these streams that is nowhere, over the spine, and over the leaf of another port."""
    wio = dict.fromkeys((None, *Tier), 0)
    for one in streams:
        tier = None if places[one] == NOWHERE else problem.tier(one, places[one])
        wio[tier] += int(problem.wio[one])
    return wio[None], wio[Tier.SPINE], wio[Tier.LEAF]


def put(loads: Loads, places: list[int], one: int, node: int) -> None:
    """Place a stream anew, or take it away. Mutates both."""
    if places[one] != NOWHERE:
        loads.take(one, places[one])
    places[one] = node
    if node != NOWHERE:
        loads.add(one, node)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _by_leaf(nodes: Sequence[Node]) -> dict[str, NDArray[np.bool_]]:
    found: dict[str, NDArray[np.bool_]] = {}
    for number, node in enumerate(nodes):
        for leaf in node.leaves:
            found.setdefault(leaf, np.zeros(len(nodes), dtype=bool))[number] = True
    return found
