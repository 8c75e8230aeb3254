"""All entries of all cache maps, in arrays: one look-up finds any number of names for any number of
drivers.

Drivers are *lanes*, and four lanes are a *block*: a *row* has the values of one name for the lanes of
one block. Rows are hashed. There are two files of buckets, of eight rows each, and a row is in its
bucket of one of them. Where neither has room, a row of one moves to its other bucket (cuckoo hashing);
what finds no room even so is in a small overflow. Each row has a *tag* of one byte, taken from its hash;
zero is a free row. A look-up reads the eight tags of a bucket at once, and names only where tags match,
which is where memory is saved from: names are looked for in random places.

The table grows by splitting buckets, a few with each insert, of one file and then of the other (linear
hashing), and is never built anew. Its arrays are reserved at once, as large as they may become; memory
is taken as they are used.

What drivers report decides where a row is, so names are hashed with a number of this process: nobody can
fill one bucket on purpose.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Indexes = npt.NDArray[np.int64]
Test = Callable[[npt.NDArray[np.uint32]], npt.NDArray[np.bool_]]

LANES: Final = 4  # of a block
_BUCKET_SHIFT: Final = 3
BUCKET: Final = 1 << _BUCKET_SHIFT  # rows
BLOCKS_MAX: Final = 1 << 12
SPACES_MAX: Final = 1 << 20
LOAD_MAX: Final = 0.7
BUCKETS_MIN: Final = 1 << 8
OVERFLOW_MAX: Final = 1 << 12
ROWS_MAX: Final = 1 << 25
ROW_BYTES: Final = 8 + 4 * LANES + 4 + 1
NEVER_CODE: Final = (1 << 24) - 1
CODE_SHIFT: Final = 8
_SCANNED: Final = 1 << 17  # buckets at once
_SPACE_MASK: Final = np.uint32(SPACES_MAX - 1)
_SPACE_BITS: Final = np.uint32(20)
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)
_32: Final = np.uint64(32)
_29: Final = np.uint64(29)
_LOW: Final = np.uint64(0xFFFFFFFF)
_TAG_SHIFT: Final = np.uint64(56)
_TAG_MIN: Final = np.uint8(1)
_KICKS: Final = 50
_BITS: Final = 1 << np.arange(BUCKET)
# Of each set of free rows in a bucket, as bits: how many there are, and which is the first, second ...
_FREE_COUNTS: Final = (np.arange(1 << BUCKET)[:, None] & _BITS).astype(bool).sum(axis=1)
_FREE_ROWS: Final = np.full((1 << BUCKET, BUCKET), -1)
for _free in range(1 << BUCKET):
    _FREE_ROWS[_free, : _FREE_COUNTS[_free]] = np.flatnonzero(_free & _BITS)
_PLACE_BITS: Final = np.uint64(32)
_ORDER_BITS: Final = 32  # of a position in an order, below the number that is put in order
_ORDER_MASK: Final = (1 << _ORDER_BITS) - 1


class MapTable:
    """`epoch`: seconds since 1970 from which the times in values count."""

    def __init__(self, epoch: int, rows_max: int = ROWS_MAX) -> None:
        self.epoch = epoch
        self.rows = 0  # that are used
        self.refused = 0  # entries for which there was no room
        self._set_sizes([BUCKETS_MIN, BUCKETS_MIN], [BUCKETS_MIN, BUCKETS_MIN])
        self._buckets_max = max(2 * BUCKETS_MIN, int(rows_max / LOAD_MAX / BUCKET))
        self._second = self._buckets_max  # where the second file begins: one is at most twice as large
        size = 2 * self._buckets_max * BUCKET + OVERFLOW_MAX
        self._names = np.zeros(size, np.uint64)
        self._values = np.zeros((size, LANES), np.uint32)
        self._owners = np.zeros(size, np.uint32)  # block and space
        self._by_bucket = self._names[: 2 * self._buckets_max * BUCKET].reshape(-1, BUCKET)
        self._tags = np.zeros(2 * self._buckets_max * BUCKET, np.uint8)
        self._bucket_tags = self._tags.view(np.uint64)  # all of a bucket in one number
        self._overflow: dict[int, int] = {}  # rows, by what their names are hashed to
        self._overflow_free = list(range(size - OVERFLOW_MAX, size))
        self._overflow_names = np.zeros(0, np.uint64)  # in order
        self._salt = np.uint64(secrets.randbits(64))
        self._random = np.random.default_rng()

    @property
    def bytes(self) -> int:
        """Memory that is in use."""
        return (sum(self._buckets) * BUCKET + len(self._overflow)) * ROW_BYTES

    # Look-up

    def places(self, space: int, kind: int, blocks: npt.NDArray[np.uint64]) -> Names:
        """What the names of this space and kind are mixed with in each of these blocks."""
        return _mixed((blocks << _PLACE_BITS | np.uint64(space << 8 | kind)) ^ self._salt)

    def find(self, names: Names, places: Names) -> Values:
        """The values of these names in these places, with zero for none. The two arrays are broadcast;
        the result has one dimension more, for the lanes."""
        hashed = _hashed(names, places)
        found = np.zeros((hashed.size, LANES), np.uint32)
        at, rows = self._rows_of(hashed.ravel())
        found[at] = self._values.take(rows, axis=0)
        return found.reshape((*hashed.shape, LANES))

    def _buckets_of(self, hashed: Names) -> Indexes:
        """The buckets of each: in a row those in the first file, and in another those in the second."""
        numbers = np.empty((2, hashed.size), np.uint64)
        np.bitwise_and(hashed, _LOW, out=numbers[0])
        np.right_shift(hashed, _32, out=numbers[1])
        buckets: Indexes = numbers.view(np.int64)
        buckets &= self._high_masks
        buckets -= (buckets >= self._counts) * self._half
        buckets[1] += self._second
        return buckets

    def _bucket_in(self, file: int, hashed: Names) -> Indexes:
        buckets: Indexes = self._buckets_of(hashed)[file]
        return buckets - file * self._second

    def _set_sizes(self, buckets: list[int], levels: list[int]) -> None:
        """How many buckets each file has; and the largest power of two that is not more."""
        self._buckets, self._levels = buckets, levels
        self._counts = np.array(buckets, np.int64)[:, None]
        self._half = np.array(levels, np.int64)[:, None]
        self._high_masks = 2 * self._half - 1

    def _rows_of(self, hashed: Names) -> tuple[Indexes, Indexes]:
        """Which of these are in the table, and in which rows."""
        count = hashed.size
        buckets = self._buckets_of(hashed)
        tags = self._bucket_tags.take(buckets).view(np.uint8).reshape(2, count, BUCKET)
        likely = np.flatnonzero(tags == _tags_of(hashed)[:, None])
        which = likely >> _BUCKET_SHIFT
        rows = buckets.ravel().take(which) << _BUCKET_SHIFT | likely & (BUCKET - 1)
        at = np.where(which < count, which, which - count)
        if at.size:
            is_it = self._names.take(rows) == hashed.take(at)
            if not is_it.all():
                at, rows = at[is_it], rows[is_it]
        if self._overflow and at.size < count:
            is_missing = np.ones(count, bool)
            is_missing[at] = False
            missing = np.flatnonzero(is_missing)
            known = self._overflow_names
            near = np.minimum(np.searchsorted(known, hashed[missing]), known.size - 1)
            more = missing[known[near] == hashed[missing]]
            at = np.concatenate((at, more))
            places = [self._overflow[one] for one in hashed[more].tolist()]
            rows = np.concatenate((rows, np.array(places, np.int64)))
        return at, rows

    # Changes

    def put(self, space: int, kind: int, names: Names, lane: int, values: Values) -> int:
        """Set the values of these names in one lane; of two for one name, any. None is zero. Returns how
        many names had none before, less those for which there is no room."""
        block, at_lane = divmod(lane, LANES)
        hashed = _hashed(names, self.places(space, kind, np.array([block], np.uint64)))
        at, rows = self._rows_of(hashed)
        more = int(np.count_nonzero(self._values[rows, at_lane] == 0))
        self._values[rows, at_lane] = values[at]
        if at.size < hashed.size:
            is_new = np.ones(hashed.size, bool)
            is_new[at] = False
            new, its = hashed[is_new], values[is_new]
            if _has_twins(new):
                new, where = np.unique(new, return_index=True)
                its = its[where]
            lanes = np.zeros((new.size, LANES), np.uint32)
            lanes[:, at_lane] = its
            room = max(0, int(self._buckets_max * BUCKET * LOAD_MAX) - self.rows)
            self.refused += max(0, new.size - room)
            new, lanes = new[:room], lanes[:room]
            self._grow(new.size)
            more += self._settle(new, lanes, np.full(new.size, block << 20 | space, np.uint32))
        return more

    def remove(self, space: int, kind: int, names: Names, lane: int) -> int:
        """There is nothing of these names in this lane any more. Returns how many there were."""
        block, at_lane = divmod(lane, LANES)
        _, rows = self._rows_of(_hashed(names, self.places(space, kind, np.array([block], np.uint64))))
        return self._clear(np.unique(rows), at_lane)

    def remove_lane(self, lane: int) -> None:
        """There is nothing in this lane any more."""
        block, at_lane = divmod(lane, LANES)
        for rows in self._rows_where(lambda owners: owners >> _SPACE_BITS == np.uint32(block)):
            self._clear(rows, at_lane)

    def remove_space(self, space: int) -> dict[int, int]:
        """There is nothing of this space any more. Returns how many entries there were, by lane."""
        removed: Counter[int] = Counter()
        wanted = np.uint32(space)
        for rows in self._rows_where(lambda owners: owners & _SPACE_MASK == wanted):
            row, lane = np.nonzero(self._values[rows])
            lanes = (self._owners[rows[row]] >> _SPACE_BITS).astype(np.int64) * LANES + lane
            numbers, counts = np.unique(lanes, return_counts=True)
            removed.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
            self._values[rows] = 0
            self._free(rows)
        return dict(removed)

    def remove_space_of(self, lane: int, space: int) -> int:
        """There is nothing of this space in this lane any more. Returns how many entries there were."""
        block, at_lane = divmod(lane, LANES)
        owner = np.uint32(block << 20 | space)
        found = self._rows_where(lambda owners: owners == owner)
        return sum(self._clear(rows, at_lane) for rows in found)

    def set_epoch(self, epoch: int) -> None:
        """Count times from another second on. What expired before it expires at it."""
        by = epoch - self.epoch
        for rows in self._rows_where(lambda owners: np.ones(owners.size, bool)):
            values = self._values[rows]
            codes = (values >> CODE_SHIFT).astype(np.int64)
            moved = np.clip(codes - by, 1, NEVER_CODE - 1).astype(np.uint32)
            keeps = (values == 0) | (codes == NEVER_CODE)
            detail = values & np.uint32(0xFF)
            self._values[rows] = np.where(keeps, values, moved << CODE_SHIFT | detail)
        self.epoch = epoch

    def _clear(self, rows: Indexes, at_lane: int) -> int:
        removed = int(np.count_nonzero(self._values[rows, at_lane]))
        self._values[rows, at_lane] = 0
        self._free(rows[~self._values[rows].any(axis=1)])
        return removed

    def _free(self, rows: Indexes) -> None:
        """These rows have no values."""
        self.rows -= rows.size
        edge = self._by_bucket.size
        if self._overflow and (beyond := rows[rows >= edge]).size:
            for row in beyond.tolist():
                del self._overflow[int(self._names[row])]
                self._overflow_free.append(row)
            self._note_overflow()
            self._names[beyond] = 0
            rows = rows[rows < edge]
        self._names[rows] = 0
        self._tags[rows] = 0

    def _rows_where(self, wanted: Test) -> Iterator[Indexes]:
        """The used rows with such owners, in pieces."""
        pieces: list[tuple[int, int]] = []
        for first, count in zip((0, self._second), self._buckets, strict=True):
            end = (first + count) * BUCKET
            pieces += pairwise([*range(first * BUCKET, end, _SCANNED), end])
        for start, end in pieces:
            is_wanted = (self._tags[start:end] != 0) & wanted(self._owners[start:end])
            rows = np.flatnonzero(is_wanted) + start
            if rows.size:
                yield rows
        if self._overflow:
            rows = np.fromiter(self._overflow.values(), np.int64, len(self._overflow))
            rows = rows[wanted(self._owners[rows])]
            if rows.size:
                yield rows

    # Rows

    def _settle(self, names: Names, values: Values, owners: npt.NDArray[np.uint32]) -> int:
        """Find room for these rows, whose names are not there. Returns for how many there is; some are
        lost if there is none."""
        count = names.size
        self.rows += count
        is_left = self._place(names, values, owners)
        for _ in range(_KICKS):
            if not is_left.any():
                return count
            names, values, owners = names[is_left], values[is_left], owners[is_left]
            slots = self._victims(names)
            slots, which = np.unique(slots, return_index=True)
            for array, its in ((self._names, names), (self._values, values), (self._owners, owners)):
                array[slots], its[which] = its[which], array[slots]
            self._tags[slots] = _tags_of(self._names[slots])
            is_left = self._place(names, values, owners)
        left = np.flatnonzero(is_left)
        fits, lost = left[: len(self._overflow_free)], left[len(self._overflow_free) :]
        for one in fits.tolist():
            row = self._overflow[int(names[one])] = self._overflow_free.pop()
            self._names[row], self._values[row], self._owners[row] = names[one], values[one], owners[one]
        self._note_overflow()
        self.rows -= lost.size
        self.refused += lost.size
        return count - lost.size

    def _victims(self, names: Names) -> Indexes:
        """For each of these names, none of whose buckets has room, a row that leaves it its place: one
        whose other bucket has room, if there is one, and any at random else."""
        buckets = self._buckets_of(names).T  # of each name, one in either file
        its = self._by_bucket.take(buckets, axis=0).reshape(-1)
        others = self._buckets_of(its)[::-1].T.reshape(names.size, 2, BUCKET, 2)
        # Of rows in the first file the bucket in the second counts, and the other way round.
        other = np.stack((others[:, 0, :, 0], others[:, 1, :, 1]), axis=1).reshape(names.size, -1)
        weights = _FREE_COUNTS[self._free_in(other.ravel())].reshape(other.shape)
        weights = np.minimum(weights, 1) + self._random.random(other.shape)
        chosen = weights.argmax(axis=1)
        bucket = buckets[np.arange(names.size), chosen // BUCKET]
        rows: Indexes = bucket * BUCKET + chosen % BUCKET
        return rows

    def _place(
        self, names: Names, values: Values, owners: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.bool_]:
        """Put these where one of their buckets has room. Returns which are left."""
        buckets = self._buckets_of(names)
        free = _FREE_COUNTS[self._free_in(buckets)]
        is_first = free[0] >= free[1]
        rows = self._slots_in(np.where(is_first, buckets[0], buckets[1]))
        is_left = rows < 0
        self._tags[rows[~is_left]] = _tags_of(names[~is_left])
        if is_left.any():
            rows[is_left] = self._slots_in(np.where(is_first, buckets[1], buckets[0])[is_left])
            is_left = rows < 0
        placed = rows[~is_left]
        self._names[placed] = names[~is_left]
        self._values[placed] = values[~is_left]
        self._owners[placed] = owners[~is_left]
        self._tags[placed] = _tags_of(names[~is_left])
        return is_left

    def _free_in(self, buckets: Indexes) -> npt.NDArray[np.uint8]:
        """The free rows of each bucket, as bits."""
        tags = self._bucket_tags.take(buckets).view(np.uint8)
        bits: npt.NDArray[np.uint8] = np.packbits(tags.ravel() == 0, bitorder="little")
        return bits.reshape(buckets.shape)

    def _slots_in(self, buckets: Indexes) -> Indexes:
        """A free row for each in its bucket, as far as there are; -1 for none."""
        numbers = np.arange(buckets.size)
        keys = np.sort(buckets << _ORDER_BITS | numbers)  # faster than to ask for the order itself
        ordered, order = keys >> _ORDER_BITS, keys & _ORDER_MASK
        is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        rank = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
        at = _FREE_ROWS[self._free_in(ordered), np.minimum(rank, BUCKET - 1)]
        at[rank >= BUCKET] = -1
        rows = np.empty(ordered.size, np.int64)
        rows[order] = np.where(at < 0, -1, ordered * BUCKET + at)
        return rows

    def _grow(self, more: int) -> None:
        """Split buckets until so many more rows fit."""
        needed = min(self._buckets_max, int((self.rows + more) / LOAD_MAX / BUCKET) + 1)
        while (lacking := needed - sum(self._buckets)) > 0:
            # The files double in turns: the other one is even meanwhile, and takes what is uneven.
            file = int(self._levels[0] > self._levels[1])
            level, had = self._levels[file], self._buckets[file]
            count = min(lacking, 2 * level - had)
            buckets, levels = self._buckets.copy(), self._levels.copy()
            buckets[file] += count
            if buckets[file] == 2 * level:
                levels[file] *= 2
            self._set_sizes(buckets, levels)
            self._split(file, had - level, had, count)

    def _split(self, file: int, old: int, new: int, count: int) -> None:
        """Move rows of `count` buckets from `old` on, which belong to those from `new` on by now. A row
        keeps its place within its bucket."""
        first = file * self._second
        names = self._by_bucket[first + old : first + old + count]
        belongs = self._bucket_in(file, names.ravel()).reshape(count, BUCKET)
        is_used = self._tags[(first + old) * BUCKET : (first + old + count) * BUCKET] != 0
        moves = is_used.reshape(count, BUCKET) & (belongs != np.arange(old, old + count)[:, None])
        places = np.flatnonzero(moves)
        source, target = places + (first + old) * BUCKET, places + (first + new) * BUCKET
        for array in (self._names, self._values, self._owners, self._tags):
            array[target] = array[source]
        self._names[source] = 0
        self._tags[source] = 0
        if self._overflow:
            self._empty_overflow()

    def _note_overflow(self) -> None:
        self._overflow_names = np.sort(np.fromiter(self._overflow, np.uint64, len(self._overflow)))

    def _empty_overflow(self) -> None:
        """Rows of the overflow go where there is room by now."""
        hashed = np.fromiter(self._overflow, np.uint64, len(self._overflow))
        rows = np.fromiter(self._overflow.values(), np.int64, len(self._overflow))
        values, owners = self._values[rows], self._owners[rows]
        self._overflow_free += rows.tolist()
        self._overflow.clear()
        self._note_overflow()
        self._values[rows] = 0
        self._names[rows] = 0
        self.rows -= rows.size
        self._settle(hashed, values, owners)


def _hashed(names: Names, places: Names) -> Names:
    """What the rows of these names are called."""
    return _mixed(names ^ places)


def _has_twins(hashed: Names) -> bool:
    ordered = np.sort(hashed)
    return bool((ordered[1:] == ordered[:-1]).any())


def _tags_of(hashed: Names) -> npt.NDArray[np.uint8]:
    """One byte of each, never zero, of bits that say nothing of its buckets."""
    return np.maximum((hashed >> _TAG_SHIFT).astype(np.uint8), _TAG_MIN)


def _mixed(numbers: Names) -> Names:
    """Each 64 bits from all 64 bits, one to one (the end of SplitMix64's finalizer)."""
    mixed = numbers * _MIX1
    mixed ^= mixed >> _29
    mixed *= _MIX2
    mixed ^= mixed >> _32
    return mixed
