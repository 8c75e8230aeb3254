"""Cost-aware: displaces the leaf that is expected to save least for its size."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from operator import itemgetter
from typing import Final, TypeAlias

from swdriver_shim import loops
from swdriver_shim.cache.displacement.base import C, Displaceable, DisplacementPolicy
from swdriver_shim.cache.displacement.gone import Gone
from swdriver_shim.cache.displacement.returns import SHARE_AT_FIRST, Returns, age_of

AGAIN: Final = "again"  # the mark of a column that was displaced not long before it was stored
USES_TOLD_APART: Final = 6  # 0 to 4, and more
TURNS_TOLD_APART: Final = 3
TAILS_EXPECTED: Final = 0.1
_KIND_BY: Final = ("uses", "terms", "mark")  # whole columns with the same of these are of one kind,
_ALIKE: Final = ("used_at", *_KIND_BY)  # and with the same time of one rank
SAME_AGE_S: Final = 1.0  # leaves used in the same second are equally old: the deeper ones come first
OFFER_S: Final = 0.25  # how long the offer of a kind is valid; a leaf's value changes slowly
_SLACK: Final = 64
_AT_ONCE: Final = 256  # entries that are gone through when many are stale, and
_FEW: Final = 8  # so many in each step after that, so that no step takes long

# How often columns come back, compared with those of a first turn that nobody used, by turn and uses: an
# average of what was learned on some traces (docs/adr/0142-learning-sooner.md), a guess until there is
# evidence. Then tails, unused and used.
_OF_TAILS: Final = TURNS_TOLD_APART * USES_TOLD_APART
EXPECTED: Final = [
    1.0, 2.7, 3.4, 3.9, 3.9, 8.0,
    1.3, 2.0, 2.7, 3.0, 3.0, 4.5,
    3.3, 3.5, 4.0, 4.0, 4.5, 4.5,
    TAILS_EXPECTED, TAILS_EXPECTED,
]  # fmt: skip
OFTEN: Final = range(USES_TOLD_APART - 1, _OF_TAILS, USES_TOLD_APART)  # kinds with most uses
_KINDS: Final = range(len(EXPECTED))

_Offer: TypeAlias = tuple[float, C | None, int, int]  # its value, the column, its ticket and kind
_WORTH: Final = itemgetter(0)
_NOBODY: Final[tuple[float, None, int, int]] = (inf, None, 0, 0)
_Entry: TypeAlias = tuple[float, int, int, C]  # by last use, deeper ones first; ticket and column
_Heap: TypeAlias = list[_Entry[C]]


class Cost(DisplacementPolicy[C]):
    """Displaces the leaf with the fewest expected uses per second, times its cost to compute, per byte.

    Leaves of one kind (of which turn, and how often used; or a tail) wait in order of their last use.
    What keeping them yields (`Returns`) falls with age, or rises to the age at which many come back and
    falls then. So in each kind either the oldest or the youngest is worth least, and these are compared.
    The youngest go first where room is so short that nobody could stay until he is wanted: then it is
    better used by few for long than by all in vain.

    The parent of a victim is the next one if it is of the same kind and age: prompts go as a whole.

    A column that is stored again soon after it was displaced counts one use more, and `mark` says so: it
    was asked for, and was missed only because there was no room for it.

    `attention_columns`: the depth at which attention to what precedes a column costs as much as all
    else; by default depth does not count (docs/adr/0014-displacement.md). `returns`: what the caller
    learns; by default the policy learns by itself.
    """

    name = "cost"
    __slots__ = (
        "_aside",
        "_attention_columns",
        "_changed",
        "_entries",
        "_front",
        "_front_rank",
        "_gone",
        "_kinds",
        "_learns",
        "_offers",
        "_offers_at",
        "_returns",
        "_ticket",
        "_waiting",
    )

    def __init__(
        self,
        attention_columns: float = inf,
        share: int = SHARE_AT_FIRST,
        returns: Returns | None = None,
    ) -> None:
        super().__init__()
        self._attention_columns = attention_columns
        self._learns = returns is None
        self._returns = Returns(EXPECTED, share, OFTEN) if returns is None else returns
        self._waiting: dict[C, int] = {}  # by the ticket of its entries; those with others are stale
        self._ticket = 0
        self._kinds: list[tuple[_Heap[C], _Heap[C]]] = [([], []) for _ in _KINDS]  # oldest, youngest
        self._entries = 0  # of each end, at most, beside those
        self._aside: dict[tuple[int, int], _Heap[C]] = {}  # to be gone through, by kind and end
        self._offers: list[_Offer[C]] = [_NOBODY for _ in _KINDS]
        self._offers_at = -inf
        self._changed: set[int] = set()  # where somebody has come who may be worth less
        self._front: C | None = None  # the parent of the victim before, if it is worth as little
        self._front_rank: tuple[int, float] = (-1, 0.0)  # kind and time of use of that victim
        self._gone = Gone()

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        if column.key in self._gone:
            column.mark = AGAIN
        if self._learns and column.used_at >= now and self._returns.follows(column.key):
            # Else it comes back, to be used after that.
            self._returns.stored(column.key, kind_of(column, column.uses), now)
        if not column.ref_count:
            self.leaf(column)

    def used(self, path: Sequence[C], now: float) -> None:
        if self._learns and (sample := loops.current.sampled(path, self._returns.mask)):
            self._returns.used(*keys_and_kinds(sample), now)
        self._forget(path[-1])

    def leaf(self, column: C) -> None:
        rank = _rank(column)
        if rank == self._front_rank and (self._front is None or self._front is column):
            self._forget(column)
            self._front = column
        else:
            self._queue(column, *rank)

    def _queue(self, column: C, kind: int, at: float) -> None:
        if self._front is column:
            self._front = None
        self._ticket += 1
        self._waiting[column] = self._ticket
        (oldest, youngest), deeper_first = self._kinds[kind], -column.needs
        heappush(oldest, (at, deeper_first, self._ticket, column))
        heappush(youngest, (-at, deeper_first, self._ticket, column))
        self._changed.add(kind)
        self._entries += 1
        self._throw_away_stale()

    def victim(self, now: float) -> C | None:
        if self._learns:
            self._returns.refresh(now)
        if not 0 <= now - self._offers_at <= OFFER_S:
            self._offers_at = now
            self._changed.update(kind for kind in _KINDS if self._offers[kind][1] is not None)
        if (front := self._front) is not None:
            if front.ref_count:
                self._front = None
            elif self._changed:
                self._queue(front, *_rank(front))
            else:
                return front
        while True:
            for kind in self._changed:
                self._offers[kind] = self._offer(kind, now)
            self._changed.clear()
            _, column, ticket, kind = min(self._offers, key=_WORTH)
            if column is None:
                return None
            if not column.ref_count and self._waiting.get(column) == ticket:
                self._front_rank = kind, column.used_at // SAME_AGE_S
                return column
            self._changed.add(kind)

    def victims(self, now: float, most: int) -> list[C]:
        column = self.victim(now)
        if column is None:
            return []
        run, rank, before = [column], self._front_rank, column.parent
        if _rank(column) != rank:
            return run
        while before is not None and len(run) < most and before.ref_count == 1 and _rank(before) == rank:
            run += loops.current.line_to(before, _ALIKE, most - len(run))
            before = run[-1].parent
        return run

    def displaced(self, run: Sequence[C], now: float) -> None:
        self._gone.add_all(loops.current.values_of(list(run), "key"), self._count)
        if self._learns:
            self._returns.displaced_run(run, now)
        self._count -= len(run)
        self._gone.shrink(self._count)
        self._forget(run[0])
        for column in filter(self._waiting.__contains__, run[1:]):
            del self._waiting[column]

    def stored_all(self, columns: Sequence[C], now: float) -> None:
        self._note_who_comes_back(columns)
        if self._learns:
            super().stored_all(columns, now)
            return
        self._count += len(columns)
        for column in columns:
            if not column.ref_count:
                self.leaf(column)

    def _note_who_comes_back(self, columns: Sequence[C]) -> None:
        """Whoever is in front of one that was displaced was stored with it, and displaced after it: of a
        prompt all up to the last one that is still known of."""
        known = self._gone.which(loops.current.values_of(list(columns), "key"))
        if True in known:
            last = len(known) - known[::-1].index(True)
            loops.current.put(list(columns[:last]), "mark", AGAIN)

    def removed(self, column: C) -> None:
        self._count -= 1
        self._gone.shrink(self._count)
        for end in (0, 1):
            for heap in self._heaps(kind_of(column, column.uses), end):
                if heap and heap[0][3] is column:
                    heappop(heap)  # else there may be any number of stale ones in front, later
        self._forget(column)

    def _heaps(self, kind: int, end: int) -> list[_Heap[C]]:
        heap = self._kinds[kind][end]
        return [heap, self._aside[kind, end]] if (kind, end) in self._aside else [heap]

    def _offer(self, kind: int, now: float) -> _Offer[C]:
        """Who is worth least of a kind: the oldest or the youngest, the deeper of equals.

        Who has come to be held leaves, and is put again when it is let go: hits pass through it, so it
        would look young for ever, and be in front as the oldest, with all the others behind it.
        """
        rate, waited = self._returns.rate[kind], len(self._waiting)
        least: _Offer[C] = _NOBODY
        for end, heap in enumerate(self._kinds[kind]):
            entry = self._first(heap)
            if self._aside and (aside := self._aside.get((kind, end))):
                entry = min(filter(None, (entry, self._first(aside))), default=None)
            if entry is not None:
                _, _, ticket, column = entry
                worth = rate[age_of(now - column.used_at)] / column.bytes
                if self._attention_columns < inf:
                    worth *= 1 + column.needs / self._attention_columns
                if worth < least[0]:
                    least = worth, column, ticket, kind
        if len(self._waiting) < waited:
            self._throw_away_stale()  # their entries at the other end are
        return least

    def _first(self, heap: _Heap[C]) -> _Entry[C] | None:
        """The first entry that is not stale. Those of held leaves are not any more."""
        waiting = self._waiting
        while heap:
            entry = heap[0]
            column = entry[3]
            if waiting.get(column) == entry[2]:
                if not column.ref_count:
                    return entry
                del waiting[column]
            heappop(heap)
        return None

    def _forget(self, column: C) -> None:
        if column is self._front:
            self._front = None
        elif self._waiting.pop(column, None):
            self._throw_away_stale()

    def _throw_away_stale(self) -> None:
        """As soon as they may be more than half; of many a few in each step."""
        if self._aside:
            self._go_through(_FEW)
        elif self._entries > 2 * len(self._waiting) + _SLACK:
            for kind, heaps in enumerate(self._kinds):
                self._aside |= {(kind, end): heap for end, heap in enumerate(heaps) if heap}
            self._kinds = [([], []) for _ in _KINDS]
            self._entries = len(self._waiting)
            self._go_through(_AT_ONCE)

    def _go_through(self, most: int) -> None:
        """Put back so many entries that were put aside, if they are not stale. What is left of a heap
        without its last ones is one."""
        while self._aside and most > 0:
            (kind, end), heap = next(iter(self._aside.items()))
            some = heap[-most:]
            del heap[-most:]
            most -= len(some)
            for entry in some:
                if self._waiting.get(entry[3]) == entry[2]:
                    heappush(self._kinds[kind][end], entry)
            if not heap:
                del self._aside[kind, end]


def kind_of(column: Displaceable, uses: int) -> int:
    """Its kind with so many uses since it was stored."""
    if column.tail:
        return _OF_TAILS + (uses > 0)
    if column.mark is AGAIN:
        uses += 1
    turn = column.turn
    if turn >= TURNS_TOLD_APART:
        turn = TURNS_TOLD_APART - 1
    return USES_TOLD_APART * turn + (uses if uses < USES_TOLD_APART else USES_TOLD_APART - 1)


def keys_and_kinds(used: list[C]) -> tuple[list[bytes], list[int]]:
    """The keys of columns of a prompt that are about to be used, and their kinds from then on."""
    do, last = loops.current, used[-1]
    if not last.tail and do.alike(used, _KIND_BY):  # nearly always: only the last one may be a tail
        kinds = [kind_of(last, last.uses + 1)] * len(used)
    else:
        kinds = [kind_of(one, one.uses + 1) for one in used]
    return do.values_of(used, "key"), kinds


def _rank(column: Displaceable) -> tuple[int, float]:
    """Its kind, and the second of its last use."""
    return kind_of(column, column.uses), column.used_at // SAME_AGE_S
