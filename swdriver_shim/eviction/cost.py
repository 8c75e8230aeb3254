"""Cost-aware: the leaf goes that is expected to save least for the room it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, Generic

from swdriver_shim.eviction.base import C, Evictable, Eviction
from swdriver_shim.eviction.returns import SHARE_AT_FIRST, Returns, age_of

USES_TOLD_APART: Final = 5
TAILS_EXPECTED: Final = 0.1
SAME_AGE_S: Final = 1.0  # who was used in the same second is equally old; deeper ones go first then
OFFER_S: Final = 0.25  # how long what a kind offers stands; a leaf's worth changes slowly
_SLACK: Final = 64

# Who came back comes back more likely: as good a guess as any, until there is evidence.
_EXPECTED: Final = [
    (1 + uses) * of_these for uses in range(USES_TOLD_APART + 1) for of_these in (1.0, TAILS_EXPECTED)
]
_KINDS: Final = range(len(_EXPECTED))


class Cost(Eviction[C]):
    """Uses to be expected per second of keeping, times what computing the column again takes, per byte.

    Leaves of one kind (how often used; whole or tail) wait in order of their last use. What keeping them
    yields (`Returns`) falls with age, or rises to the age at which many come back and falls then. So in
    each kind either the oldest or the youngest is worth least, and these are compared. The youngest go
    first where room is so short that nobody could stay until he is wanted: then it is better used by few
    for long than by all in vain.

    `attention_columns`: the depth at which attention to what precedes a column costs as much as all
    else; by default depth does not count (docs/adr/0014-eviction.md). `mark` is true for columns of the
    sample that is learned from.
    """

    name = "cost"
    __slots__ = (
        "_attention_columns",
        "_changed",
        "_kind_of",
        "_kinds",
        "_offers",
        "_offers_until",
        "_returns",
    )

    def __init__(self, attention_columns: float = inf, share: int = SHARE_AT_FIRST) -> None:
        super().__init__()
        self._attention_columns = attention_columns
        self._returns = Returns(_EXPECTED, share)
        self._kinds = [_Ends[C]() for _ in _KINDS]
        self._kind_of: dict[C, int] = {}  # of those that wait
        self._offers: list[tuple[float, C] | None] = [None for _ in _KINDS]
        self._offers_until = 0.0
        self._changed: set[int] = set()

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        if self._returns.follows(column.key):
            column.mark = True
            self._returns.used([(column.key, _kind(column, column.uses))], now)
        if not column.holds:
            self.leaf(column)

    def used(self, path: Sequence[C], now: float) -> None:
        sample = [column for column in path if column.mark]
        if sample:
            self._returns.used(
                [
                    (column.key, _kind(column, column.uses + 1))
                    for column in sample
                    if self._returns.follows(column.key)  # the share may have become smaller
                ],
                now,
            )
        self._forget(path[-1])

    def leaf(self, column: C) -> None:
        self._forget(column)
        kind = self._kind_of[column] = _kind(column, column.uses)
        self._kinds[kind].put(column)
        self._changed.add(kind)

    def victim(self, now: float) -> C | None:
        if not 0 <= self._offers_until - now <= OFFER_S:
            self._offers_until = now + OFFER_S
            self._changed.update(_KINDS)
        while True:
            for kind in self._changed:
                self._offers[kind] = self._offer(kind, now)
            self._changed.clear()
            least = min((offer for offer in self._offers if offer), key=_worth, default=None)
            if least is None:
                return None
            column = least[1]
            if not column.holds:
                self._returns.evicted(now - column.used_at)
                return column
            self._forget(column)

    def removed(self, column: C) -> None:
        self._count -= 1
        self._forget(column)

    def check_integrity(self, columns: Iterable[C]) -> None:
        columns = set(columns)
        assert self._count == len(columns)
        assert self._kind_of.keys() <= columns
        assert all(column.holds or column in self._kind_of for column in columns)
        for kind, ends in enumerate(self._kinds):
            ends.check_integrity({column for column, its in self._kind_of.items() if its == kind})
        self._returns.check_integrity()

    def _forget(self, column: C) -> None:
        kind = self._kind_of.pop(column, None)
        if kind is not None:
            self._kinds[kind].drop(column)
            self._changed.add(kind)

    def _offer(self, kind: int, now: float) -> tuple[float, C] | None:
        """Who is worth least of a kind."""
        rate = self._returns.rate[kind]
        least: tuple[float, C] | None = None
        for column in self._free_ends(kind):
            worth = rate[age_of(now - column.used_at)] * self._price(column)
            if least is None or worth < least[0]:
                least = worth, column
        return least

    def _free_ends(self, kind: int) -> list[C]:
        """The oldest and the youngest of a kind. Who has come to be held is put again when it is let go.

        It has to leave: hits pass through it, so it would look young for ever, and be in front as the
        oldest, with all the others behind it.
        """
        ends = self._kinds[kind]
        while True:
            found = ends.ends()
            held = [column for column in found if column.holds]
            if not held:
                return found
            for column in set(held):  # the oldest may be the youngest
                del self._kind_of[column]
                ends.drop(column)

    def _price(self, column: C) -> float:
        """To compute it again, per byte."""
        return (1 + column.needs / self._attention_columns) / column.bytes


def _kind(column: Evictable, uses: int) -> int:
    return 2 * min(uses, USES_TOLD_APART) + column.tail


def _worth(offer: tuple[float, object]) -> float:
    return offer[0]


class _Ends(Generic[C]):
    """Leaves by their last use, to ask for the first and the last. Whoever is used is put again."""

    __slots__ = ("_heaps", "_places", "_put")

    def __init__(self) -> None:
        self._places: dict[C, int] = {}
        self._put = 0
        self._heaps: tuple[list[tuple[float, int, int, C]], ...] = ([], [])  # oldest, youngest first

    def put(self, column: C) -> None:
        self._put += 1
        self._places[column] = self._put
        oldest, youngest = self._heaps
        at = column.used_at // SAME_AGE_S
        heappush(oldest, (at, -column.needs, self._put, column))
        heappush(youngest, (-at, -column.needs, self._put, column))
        self._compact()

    def drop(self, column: C) -> None:
        del self._places[column]
        self._compact()

    def ends(self) -> list[C]:
        """None, or the oldest and the youngest, the deeper of equals; it may be one and the same."""
        found = []
        for heap in self._heaps:
            while heap and self._places.get(heap[0][3]) != heap[0][2]:
                heappop(heap)
            if heap:
                found.append(heap[0][3])
        return found

    def check_integrity(self, columns: set[C]) -> None:
        assert self._places.keys() == columns
        for heap in self._heaps:
            here = {entry[3]: entry for entry in heap if self._places.get(entry[3]) == entry[2]}
            assert here.keys() == columns
            for column, entry in here.items():
                assert column.holds or abs(entry[0]) == abs(column.used_at // SAME_AGE_S), "used since"
            assert len(heap) <= 2 * len(columns) + _SLACK

    def _compact(self) -> None:
        """Throw away entries of those that left, when they are more than half."""
        for heap in self._heaps:
            if len(heap) > 2 * len(self._places) + _SLACK:
                heap[:] = [entry for entry in heap if self._places.get(entry[3]) == entry[2]]
                heapify(heap)
