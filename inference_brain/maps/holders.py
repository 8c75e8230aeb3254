"""Who has a name that several drivers have: a *set* of lanes, each with its value.

Sets have room for 4, 16, 64 ... lanes; one that is full moves to the next size. Those of one size are
rows of two arrays, which are reserved at once, as large as they may become: memory is taken as they are
used. A set is called by a number of 32 bits: its size, and its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint32]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Change = Callable[[Values], Values]

SIZES: Final = (4, 16, 64, 256, 1024, 4096)
LANES_MAX: Final = SIZES[-1] - 2
_SIZE_SHIFT: Final = 28
_ROW_MASK: Final = (1 << _SIZE_SHIFT) - 1
_LANE_BYTES: Final = 2 + 4
_AT_ONCE: Final = 1 << 19  # lanes that are compared at once


class Holders(NamedTuple):
    """Lanes that have something. `which`: of each, the place of its name, or set, among those that were
    asked for."""

    which: Indexes
    lanes: Indexes
    values: Values


class _Sets:
    """Those of one size. A lane is stored as its number and one; 0 is nobody."""

    def __init__(self, size: int, most: int) -> None:
        self.size, self.most = size, most
        self.lanes = np.zeros((most, size), np.uint16)
        self.values = np.zeros((most, size), np.uint32)
        self.used = 0  # rows from the first one on, among them those that are free again
        self.free: list[int] = []

    def take(self, count: int) -> Indexes:
        """Rows for so many sets; fewer if there is no more room."""
        again = [self.free.pop() for _ in range(min(count, len(self.free)))]
        more = min(count - len(again), self.most - self.used)
        unused = np.arange(self.used, self.used + more)
        rows: Indexes = np.concatenate((np.array(again, np.int64), unused))
        self.used += more
        return rows

    def find(self, rows: Indexes, stored: int) -> Indexes:
        """The place of a lane, as it is stored, in each of these; -1 for none."""
        places = np.empty(rows.size, np.int64)
        step = max(1, _AT_ONCE // self.size)
        for start in range(0, rows.size, step):
            is_it = self.lanes[rows[start : start + step]] == stored
            at = is_it.argmax(axis=1)
            at[~is_it[np.arange(at.size), at]] = -1
            places[start : start + step] = at
        return places


class HolderSets:
    """`bytes_max`: of all sets together."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0  # of sets that are used
        self._bytes_max = bytes_max
        self._sizes = [
            _Sets(size, max(1, min(_ROW_MASK, bytes_max // (size * _LANE_BYTES)))) for size in SIZES
        ]

    def make(self, lanes: Indexes, values: Values) -> Indexes:
        """Sets with one lane each. There are fewer if there is no more room."""
        rows = self._take(0, lanes.size)
        of = self._sizes[0]
        of.lanes[rows, 0] = lanes[: rows.size] + 1
        of.values[rows, 0] = values[: rows.size]
        return rows

    def put(self, sets: Indexes, lane: int, values: Values) -> tuple[Indexes, Flags, Flags]:
        """Set the value of a lane in each of these different sets. Returns the sets, some of which have
        moved, which of them did not have the lane before, and in which there was no room for it."""
        sets, is_new = sets.copy(), np.zeros(sets.size, bool)
        is_refused = np.zeros(sets.size, bool)
        for number, places, rows in self._by_size(sets):
            of = self._sizes[number]
            at = of.find(rows, lane + 1)
            missing = np.flatnonzero(at < 0)
            if missing.size:
                at[missing] = of.find(rows[missing], 0)
                is_new[places[missing]] = True
                full = missing[at[missing] < 0]
                if full.size:
                    moved = self._move(number, rows[full])
                    sets[places[full[: moved.size]]] = moved
                    self._add(moved, number + 1, lane, values[places[full[: moved.size]]])
                    is_refused[places[full[moved.size :]]] = True
            there = np.flatnonzero(at >= 0)
            of.lanes[rows[there], at[there]] = lane + 1
            of.values[rows[there], at[there]] = values[places[there]]
        return sets, is_new, is_refused

    def remove(self, sets: Indexes, lane: int) -> tuple[Indexes, Indexes]:
        """Remove a lane from these. Returns the places of those that had it, and those that are free
        now."""
        removed, emptied = [np.zeros(0, np.int64)], []
        for number, places, rows in self._by_size(sets):
            of = self._sizes[number]
            at = of.find(rows, lane + 1)
            had = np.flatnonzero(at >= 0)
            of.lanes[rows[had], at[had]] = 0
            of.values[rows[had], at[had]] = 0
            removed.append(places[had])
            empty = had[~of.lanes[rows[had]].any(axis=1)]
            emptied.append(sets[places[empty]])
        gone = np.concatenate(emptied) if emptied else np.zeros(0, np.int64)
        self.free(gone)
        return np.concatenate(removed), gone

    def remove_lane(self, lane: int) -> Indexes:
        """Remove it everywhere. Returns the sets that are free now."""
        emptied = [np.zeros(0, np.int64)]
        for number, of in enumerate(self._sizes):
            step = max(1, _AT_ONCE // of.size)
            for start in range(0, of.used, step):
                its = of.lanes[start : min(of.used, start + step)]
                rows, at = np.nonzero(its == lane + 1)
                its[rows, at] = 0
                of.values[start + rows, at] = 0
                empty = rows[~its[rows].any(axis=1)]
                emptied.append(number << _SIZE_SHIFT | start + empty)
        gone = np.concatenate(emptied)
        self.free(gone)
        return gone

    def holders(self, sets: Indexes) -> Holders:
        """All lanes of these."""
        found = []
        for number, places, rows in self._by_size(sets):
            of = self._sizes[number]
            lanes = of.lanes.take(rows, axis=0).ravel()
            values = of.values.take(rows, axis=0).ravel()
            [at] = lanes.nonzero()
            found.append((places[at // of.size], lanes[at].astype(np.int64) - 1, values[at]))
        if not found:
            nothing = np.zeros(0, np.int64)
            return Holders(nothing, nothing, np.zeros(0, np.uint32))
        if len(found) == 1:
            return Holders(*found[0])
        which, lanes_of, values_of = zip(*found, strict=True)
        return Holders(np.concatenate(which), np.concatenate(lanes_of), np.concatenate(values_of))

    def free(self, sets: Indexes) -> None:
        """There is nothing in these any more."""
        for number, _, rows in self._by_size(sets):
            of = self._sizes[number]
            of.lanes[rows] = 0
            of.values[rows] = 0
            of.free += rows.tolist()
            self.bytes -= rows.size * of.size * _LANE_BYTES

    def change(self, by: Change) -> None:
        """Change all values."""
        for of in self._sizes:
            step = max(1, _AT_ONCE // of.size)
            for start in range(0, of.used, step):
                its = of.values[start : min(of.used, start + step)]
                its[:] = by(its)

    # Inside

    def _by_size(self, sets: Indexes) -> Iterator[tuple[int, Indexes, Indexes]]:
        """Of each size that is among these: its number, their places among these, and their rows."""
        if not sets.size:
            return
        sizes = sets >> _SIZE_SHIFT
        if (sizes == sizes[0]).all():  # which is likely
            yield int(sizes[0]), np.arange(sets.size), sets & _ROW_MASK
            return
        for number in range(int(sizes.min()), int(sizes.max()) + 1):
            [places] = (sizes == number).nonzero()
            if places.size:
                yield number, places, sets[places] & _ROW_MASK

    def _take(self, number: int, count: int) -> Indexes:
        of = self._sizes[number]
        each = of.size * _LANE_BYTES
        rows = of.take(max(0, min(count, (self._bytes_max - self.bytes) // each)))
        self.bytes += rows.size * each
        return rows

    def _move(self, number: int, rows: Indexes) -> Indexes:
        """Full sets move to the next size. Returns what they are called then; there are fewer if there
        is no more room, and the last ones stay."""
        if number + 1 == len(SIZES):
            return np.zeros(0, np.int64)
        to, of = self._take(number + 1, rows.size), self._sizes[number]
        larger = self._sizes[number + 1]
        larger.lanes[to, : of.size] = of.lanes[rows[: to.size]]
        larger.values[to, : of.size] = of.values[rows[: to.size]]
        self.free(number << _SIZE_SHIFT | rows[: to.size])
        return (number + 1) << _SIZE_SHIFT | to

    def _add(self, moved: Indexes, number: int, lane: int, values: Values) -> None:
        """Add a lane to sets that have just moved to this size."""
        of, rows, at = self._sizes[number], moved & _ROW_MASK, SIZES[number - 1]
        of.lanes[rows, at] = lane + 1
        of.values[rows, at] = values
