"""The order in which requests of several orgs leave a queue: by tokens served, with virtual token
counters ("Fairness in Serving Large Language Models"). Pure: no clock, no I/O.

Each org has a counter of what it has been served, divided by its weight. The org with the lowest counter
is next. A counter is raised when its request leaves the queue, by what the request is expected to cost,
and corrected when that is known. An org that returns after a pause is raised to about the lowest counter
of those that wait, so that nobody saves up for later.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

CREDIT: Final = 16384.0  # tokens of a prompt, by weight 100, that an org may be behind when it returns
WEIGHT_ONE: Final = 100  # the weight whose counter counts tokens

_sequence = itertools.count()


@dataclass(eq=False, slots=True)
class Item:
    """A request that waits. `cost` in tokens of a prompt; the highest `rank` of an org goes first, then
    who came first."""

    org: str
    weight: int
    rank: int
    cost: float
    sequence: int = field(default_factory=lambda: next(_sequence))

    def __lt__(self, other: Item) -> bool:
        return (-self.rank, self.sequence) < (-other.rank, other.sequence)


I = TypeVar("I", bound=Item)  # noqa: E741 - the type of items


class Told(NamedTuple):
    """What others are told of a counter: what is added to it, once it was raised to the least that it
    has. Several brains may raise it, and then it is raised once."""

    more: float = 0.0
    least: float = 0.0


NOTHING: Final = Told()


class Counters:
    """What each org has been served of one model, divided by its weight. Several brains share them:
    each tells the others what it
    has added."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._unsent: dict[str, Told] = {}
        self._moved: set[str] = set()
        self.elsewhere: float | None = None  # the lowest of orgs that wait in other brains
        self._last = 0.0  # of the org that waited last

    def __getitem__(self, org: str) -> float:
        return self._values.get(org, 0.0)

    def __len__(self) -> int:
        return len(self._values)

    def charge(self, org: str, weight: int, amount: float) -> None:
        """Add service; a negative amount takes back what was charged too much."""
        made = amount * WEIGHT_ONE / weight
        self._values[org] = self[org] + made
        self._moved.add(org)
        more, least = self._unsent.get(org, NOTHING)
        self._unsent[org] = Told(more + made, least)

    def start(self, weight: int, lowest: float | None) -> float:
        """The least that an org begins with which did not wait: a little below the lowest of those that
        do (here: `lowest`)."""
        waiting = [one for one in (lowest, self.elsewhere) if one is not None]
        return min(waiting, default=self._last) - CREDIT * WEIGHT_ONE / weight

    def lift(self, org: str, weight: int, lowest: float | None) -> None:
        """Let an org that returns begin near the others."""
        least = self.start(weight, lowest)
        if least > self[org]:
            self._values[org] = least
            self._moved.add(org)
            more, _ = self._unsent.get(org, NOTHING)
            self._unsent[org] = Told(more, least - more)

    def left(self, org: str) -> None:
        """Nobody waits any more; this org was the last."""
        self._last = max(self._last, self[org])

    def merge(self, shared: Mapping[str, float]) -> None:
        """Take over counters that include what all brains have sent."""
        for org, value in shared.items():
            more, least = self._unsent.get(org, NOTHING)
            self._values[org] = max(value, least) + more
        self._moved.update(shared)

    def take_unsent(self) -> dict[str, Told]:
        """What the others have not been told. It is now the caller's to tell."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    def take_moved(self) -> set[str]:
        """Orgs whose counters have changed since this was asked last."""
        moved, self._moved = self._moved, set()
        return moved


class FairQueue(Generic[I]):
    """Items of several orgs. The next is of the org with the lowest counter; within an org the order is
    that of `Item`."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._queues: dict[str, _OrgQueue[I]] = {}
        self._order: list[tuple[float, int, str]] = []  # heap by counter, with what has moved since
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[I]:
        """In no particular order."""
        return (item for queue in self._queues.values() for item in queue.items)

    @property
    def orgs(self) -> Mapping[str, int]:
        """How many items each org has."""
        return {org: len(queue.items) for org, queue in self._queues.items()}

    @property
    def orgs_count(self) -> int:
        return len(self._queues)

    def count_of(self, org: str) -> int:
        queue = self._queues.get(org)
        return len(queue.items) if queue else 0

    @property
    def lowest(self) -> float | None:
        """The lowest counter of those that wait."""
        return min((self.counters[org] for org in self._queues), default=None)

    def put(self, item: I) -> None:
        queue = self._queues.get(item.org)
        if queue is None:
            self.counters.lift(item.org, item.weight, self.lowest)
            queue = self._start(item.org)
        queue.put(item)
        self._count += 1

    def put_back(self, item: I) -> None:
        """Where it was before it was taken: its org has not been away."""
        queue = self._queues.get(item.org) or self._start(item.org)
        queue.put(item)
        self._count += 1

    def head(self) -> I | None:
        """The next to leave."""
        counters = self.counters
        if len(self._order) > 4 * len(self._queues) + 64:
            self._order = [(counters[org], next(_sequence), org) for org in self._queues]
            heapq.heapify(self._order)
        order = self._order
        for org in counters.take_moved():
            if org in self._queues:
                heapq.heappush(order, (counters[org], next(_sequence), org))
        while order:
            counter, _, org = order[0]
            if org in self._queues and counter == counters[org]:
                return self._queues[org].head
            heapq.heappop(order)  # it has moved, or has nothing left
        return None

    def discard(self, item: I) -> bool:
        """Take it out, wherever it is. Returns whether it was there."""
        queue = self._queues.get(item.org)
        if queue is None or not queue.discard(item):
            return False
        self._count -= 1
        if not queue.items:
            del self._queues[item.org]
            if not self._queues:
                self.counters.left(item.org)
        return True

    def _start(self, org: str) -> _OrgQueue[I]:
        queue = self._queues[org] = _OrgQueue()
        heapq.heappush(self._order, (self.counters[org], next(_sequence), org))
        return queue

    def cost_before(self, org: str, weight: int, rank: int) -> float:
        """What is served before an item of this org and rank that comes now, if nobody else comes."""
        own = self._queues.get(org)
        before = self.own_cost_before(org, rank)
        counter = self.counters[org]
        if own is None:
            counter = max(counter, self.counters.start(weight, self.lowest))
        turn = counter + before * WEIGHT_ONE / weight  # its org's counter when it is the first
        for other, queue in self._queues.items():
            if other != org and (behind := turn - self.counters[other]) > 0:
                before += min(queue.cost, behind * queue.weight / WEIGHT_ONE)
        return before

    def own_cost_before(self, org: str, rank: int) -> float:
        """What is served of its own org before an item of this rank that comes now."""
        own = self._queues.get(org)
        return own.cost_from(rank) if own else 0.0


class _OrgQueue(Generic[I]):
    """Items of one org. Those taken out of the middle stay in the heap until they reach its top."""

    def __init__(self) -> None:
        self.items: set[I] = set()
        self.cost = 0.0
        self.weight = WEIGHT_ONE
        self._heap: list[I] = []
        self._by_rank: dict[int, float] = {}

    @property
    def head(self) -> I:
        while self._heap[0] not in self.items:
            heapq.heappop(self._heap)
        return self._heap[0]

    def put(self, item: I) -> None:
        heapq.heappush(self._heap, item)
        self.items.add(item)
        self.weight = item.weight
        self._add(item.rank, item.cost)

    def discard(self, item: I) -> bool:
        if item not in self.items:
            return False
        self.items.remove(item)
        self._add(item.rank, -item.cost)
        if len(self._heap) > 2 * len(self.items) + 16:
            self._heap = list(self.items)
            heapq.heapify(self._heap)
        return True

    def cost_from(self, rank: int) -> float:
        """Of items that go before one of this rank."""
        return sum(cost for other, cost in self._by_rank.items() if other >= rank)

    def _add(self, rank: int, cost: float) -> None:
        self.cost += cost
        self._by_rank[rank] = self._by_rank.get(rank, 0.0) + cost
