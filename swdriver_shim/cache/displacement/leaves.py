"""Leaves in the order of a rank, which is checked again when a leaf comes to the front."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Any, Final, Generic, TypeAlias, cast

from swdriver_shim.cache.displacement.base import C

Rank: TypeAlias = Any  # float or tuple: whatever one heap compares
_SLACK: Final = 64
_AT_ONCE: Final = 1024  # entries that are gone through when many may be of no use, and
_FEW: Final = 8  # so many in each step after that, so that no step takes long


class Leaves(Generic[C]):
    """A heap of candidates, lowest rank first, deeper ones first among equals.

    `rank` is a column's rank now, or None if it belongs to another heap by now. While a column is queued
    its rank only rises, so a stale entry comes to the front too early, never too late. Entries of
    removed and referenced columns are dropped when they may be half of all: of many, a few in each step.

    A column that ranks before the whole heap waits in front of it: that is most often the parent of the
    one displaced last, which goes next.
    """

    __slots__ = ("_aside", "_entries", "_front", "_front_rank", "_heap", "_limit", "_pushed", "_rank")

    def __init__(self, rank: Callable[[C], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, int, C]] = []
        self._aside: list[tuple[Rank, int, int, C]] = []  # another heap, to be gone through
        self._entries: dict[C, tuple[Rank, int, int, C]] = {}
        self._limit = _SLACK
        self._pushed = 0
        self._front: C | None = None
        self._front_rank: Rank = None

    def put(self, column: C) -> None:
        """Queue the column, unless it is queued."""
        if column in self._entries or column is self._front:
            return
        rank = self._rank(column)
        if self._aside:
            self._go_through(_FEW)
        elif self._front is None and self._heap and (rank, -column.needs) < self._heap[0][:2]:
            self._front, self._front_rank = column, rank
            return
        self._push(column, rank)

    def _push(self, column: C, rank: Rank) -> None:
        if len(self._heap) >= self._limit and not self._aside:
            self._compact()
        heappush(self._heap, self._entry(column, rank))

    def drop(self, column: C) -> None:
        """Remove the column, if it is queued."""
        if column is self._front:
            self._front = None
        elif entry := self._entries.pop(column, None):
            for heap in (self._heap, self._aside):
                if heap and heap[0] is entry:
                    heappop(heap)
            if self._aside:
                self._go_through(_FEW)
            elif len(self._heap) > 2 * len(self._entries) + _SLACK:
                self._compact()

    def first(self) -> C | None:
        """The candidate with the lowest rank. It stays queued."""
        if (front := self._front) is not None:
            rank = None if front.ref_count else self._rank(front)
            heap = self._lower() if self._aside else self._heap
            if rank == self._front_rank and (not heap or (rank, -front.needs) < heap[0][:2]):
                return front
            self._front = None
            if rank is not None:
                self._push(front, rank)
        entries = self._entries
        while heap := self._lower() if self._aside else self._heap:
            entry = heap[0]
            column = entry[-1]
            if entries.get(column) is not entry:
                heappop(heap)
                continue
            rank = None if column.ref_count else self._rank(column)
            if rank is None:
                heappop(heap)
                del entries[column]
            elif rank == entry[0]:
                return column
            else:
                heapreplace(heap, self._entry(column, rank))
        return None

    def _lower(self) -> list[tuple[Rank, int, int, C]]:
        """The heap with the first entry, while another is put aside."""
        heap, aside = self._heap, self._aside
        return aside if not heap or aside[0] < heap[0] else heap

    def run(self, most: int) -> list[C]:
        """The first candidate, and those before it that are the first one after the other, once each is
        dropped and its parent put here: at most so many, and perhaps fewer."""
        column = self.first()
        if column is None or self._aside:
            return [] if column is None else [column]
        heap, entries, rank_of = self._heap, self._entries, self._rank
        behind = heap[:1] if column is self._front else heap[1:3]  # one of these is first of the others
        least = min(behind)[:2] if behind else None
        run, before = [column], cast("C | None", column.parent)
        while before is not None and len(run) < most:
            if before.ref_count != 1 or before in entries:
                break
            rank = rank_of(before)
            if rank is None or (least is not None and (rank, -before.needs) >= least):
                break
            run.append(before)
            before = cast("C | None", before.parent)
        return run

    def _entry(self, column: C, rank: Rank) -> tuple[Rank, int, int, C]:
        self._pushed += 1
        made = self._entries[column] = (rank, -column.needs, self._pushed, column)
        return made

    def _compact(self) -> None:
        self._aside, self._heap = self._heap, []
        self._go_through(_AT_ONCE)

    def _go_through(self, most: int) -> None:
        """Put back so many entries that were put aside, if they are of use. What is left of a heap
        without its last ones is one."""
        some = self._aside[-most:]
        del self._aside[-most:]
        for entry in some:
            column = entry[-1]
            if self._entries.get(column) is not entry:
                continue
            if column.ref_count:
                del self._entries[column]
            else:
                heappush(self._heap, entry)
        self._limit = 2 * (len(self._heap) + len(self._aside)) + _SLACK
