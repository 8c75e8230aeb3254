"""All entries of all cache maps, in arrays: one look-up finds who has a name, among any number of
drivers.

Drivers are *lanes*. A *row* has a name, and the lane that has it with its value, or the number of a set
of lanes if several have it (`holders.py`). So what a look-up costs depends on the names that are looked
for, and hardly on how many drivers there are. Rows are hashed. There are two files of buckets, of eight
rows each, and a row is in its bucket of one of them. Where neither has room, a row of one moves to its
other bucket (cuckoo hashing); what finds no room even so is in a small overflow. Each row has a *tag* of
one byte, taken from its hash; zero is a free row. A look-up reads the eight tags of a bucket at once,
and rows only where tags match, which is where memory is saved from: names are looked for in random
places. For the same reason a row is 16 bytes together, which are written and read at once.

The table grows by splitting buckets, a few with each insert, of one file and then of the other (linear
hashing), and is never built anew. Its arrays are reserved at once, as large as they may become; memory
is taken as they are used.

What drivers report decides where a row is, so names are hashed with a number of this process: nobody can
fill one bucket on purpose.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from inference_brain.maps.holders import Holders, HolderSets, Indexes, Values

Names = npt.NDArray[np.uint64]
Tags = npt.NDArray[np.uint8]
Test = Callable[[Names], npt.NDArray[np.bool_]]

_BUCKET_SHIFT: Final = 3
BUCKET: Final = 1 << _BUCKET_SHIFT  # rows
SPACES_MAX: Final = 1 << 20
LOAD_MAX: Final = 0.7
BUCKETS_MIN: Final = 1 << 8
OVERFLOW_MAX: Final = 1 << 12
ROWS_MAX: Final = 1 << 26  # 1.6 GB when it is full, and as much for sets of lanes
ROW_BYTES: Final = 8 + 8 + 1
SHARED_BYTES: Final = 24  # for sets, for each row that there may be
NEVER_CODE: Final = (1 << 24) - 1
CODE_SHIFT: Final = 8
# Of a row beside its name: a value or the number of a set, a space, and a lane.
_VALUE_SHIFT: Final = np.uint64(32)
_SPACE_SHIFT: Final = np.uint64(12)
_SPACE_MASK: Final = np.uint64((SPACES_MAX - 1) << 12)
_LANE_MASK: Final = np.uint64((1 << 12) - 1)
_OWNER_MASK: Final = np.uint64((1 << 32) - 1)
_SHARED: Final = _LANE_MASK  # instead of a lane: several have it
_WHOLE: Final = np.dtype("V16")  # a row, moved at once
_SCANNED: Final = 1 << 17  # buckets at once
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)
_32: Final = np.uint64(32)
_29: Final = np.uint64(29)
_LOW: Final = np.uint64(0xFFFFFFFF)
_TAG_SHIFT: Final = np.uint64(56)
_TAG_MIN: Final = np.uint8(1)
_CHOICE_SHIFT: Final = np.uint64(53)  # of a name, three bits that choose a row of a bucket
_KICKS: Final = 50
_BITS: Final = 1 << np.arange(BUCKET)
# Of each set of free rows in a bucket, as bits: how many there are, and for each of eight choices one.
_FREE_COUNTS: Final = (np.arange(1 << BUCKET)[:, None] & _BITS).astype(bool).sum(axis=1)
_FREE_ROWS: Final = np.full((1 << BUCKET, BUCKET), -1)
for _free in range(1, 1 << BUCKET):
    _FREE_ROWS[_free] = np.resize(np.flatnonzero(_free & _BITS), BUCKET)


class Run(NamedTuple):
    """So many names that follow each other, of one space and one class of entries."""

    space: int
    kind: int
    size: int


class _Found(NamedTuple):
    """Names that are in the table: their places among those that were looked for, their rows, and what
    these have beside the name."""

    at: Indexes
    rows: Indexes
    rests: Names


class _Probe(NamedTuple):
    """Of names, the bucket in either file, and the tags in it."""

    buckets: Indexes
    tags: Tags


class MapTable:
    """`epoch`: seconds since 1970 from which the times in values count."""

    def __init__(self, epoch: int, rows_max: int = ROWS_MAX) -> None:
        self.epoch = epoch
        self.rows = 0  # that are used
        self.refused = 0  # entries for which there was no room
        self._set_sizes([BUCKETS_MIN, BUCKETS_MIN], [BUCKETS_MIN, BUCKETS_MIN])
        self._buckets_max = max(2 * BUCKETS_MIN, int(rows_max / LOAD_MAX / BUCKET))
        self._second = self._buckets_max  # where the second file begins: one is at most twice as large
        self._edge = 2 * self._buckets_max * BUCKET
        self._rows = np.zeros((self._edge + OVERFLOW_MAX, 2), np.uint64)  # name, and the rest
        self._whole = self._rows.view(_WHOLE)[:, 0]
        self._tags = np.zeros(self._edge, np.uint8)
        self._bucket_tags = self._tags.view(np.uint64)  # all of a bucket in one number
        self._sets = HolderSets(SHARED_BYTES * rows_max)
        self._overflow: dict[int, int] = {}  # rows, by what their names are hashed to
        self._overflow_free = list(range(self._edge, self._edge + OVERFLOW_MAX))
        self._overflow_names = np.zeros(0, np.uint64)  # in order
        # How many entries there are, by lane and space: never fewer than there are, so that nobody goes
        # through the table for nothing, and nothing stays in it.
        self._entries: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._salt = secrets.randbits(64)
        self._places: dict[int, np.uint64] = {}
        self._random = np.random.default_rng()

    @property
    def bytes(self) -> int:
        """Memory that is in use."""
        return (sum(self._buckets) * BUCKET + len(self._overflow)) * ROW_BYTES + self._sets.bytes

    # Look-up

    def find(self, space: int, kind: int, names: Names) -> Holders:
        """Who has these names of this space and kind."""
        found = self._find(_mixed(names ^ self._place_of(space, kind)))
        lanes = found.rests & _LANE_MASK
        [shared] = (lanes == _SHARED).nonzero()
        values = (found.rests >> _VALUE_SHIFT).astype(np.uint32)
        if not shared.size:
            return Holders(found.at, lanes.astype(np.int64), values)
        which, others, theirs = self._sets.holders(values[shared].astype(np.int64))
        which = found.at[shared[which]]
        if shared.size == lanes.size:
            return Holders(which, others, theirs)
        [single] = (lanes != _SHARED).nonzero()
        return Holders(
            np.concatenate((found.at[single], which)),
            np.concatenate((lanes[single].astype(np.int64), others)),
            np.concatenate((values[single], theirs)),
        )

    def _hashed(self, runs: Sequence[Run], names: Names) -> Names:
        """What the rows of these names are called."""
        places = [self._place_of(space, kind) for space, kind, _ in runs]
        return _mixed(names ^ _repeated(places, runs))

    def _place_of(self, space: int, kind: int) -> np.uint64:
        wanted = space << 8 | kind
        place = self._places.get(wanted)
        if place is None:
            if len(self._places) >= SPACES_MAX:
                self._places.clear()
            [place] = _mixed(np.array([wanted ^ self._salt], np.uint64))
            self._places[wanted] = place
        return place

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

    def _probe(self, hashed: Names) -> _Probe:
        buckets = self._buckets_of(hashed)
        tags = self._bucket_tags.take(buckets).view(np.uint8)
        return _Probe(buckets, tags.reshape(2, hashed.size, BUCKET))

    def _find(self, hashed: Names, probe: _Probe | None = None) -> _Found:
        count = hashed.size
        buckets, tags = probe or self._probe(hashed)
        [likely] = (tags == _tags_of(hashed)[:, None]).ravel().nonzero()
        which = likely >> _BUCKET_SHIFT
        rows = buckets.ravel().take(which) << _BUCKET_SHIFT | likely & (BUCKET - 1)
        at = np.where(which < count, which, which - count)
        its = self._whole.take(rows).view(np.uint64).reshape(-1, 2)
        is_it = its[:, 0] == hashed.take(at)
        rests = its[:, 1]
        if not is_it.all():
            at, rows, rests = at[is_it], rows[is_it], rests[is_it]
        if self._overflow and at.size < count:
            is_missing = np.ones(count, bool)
            is_missing[at] = False
            missing = np.flatnonzero(is_missing)
            known = self._overflow_names
            near = np.minimum(np.searchsorted(known, hashed[missing]), known.size - 1)
            more = missing[known[near] == hashed[missing]]
            beyond = np.array([self._overflow[one] for one in hashed[more].tolist()], np.int64)
            at, rows = np.concatenate((at, more)), np.concatenate((rows, beyond))
            rests = np.concatenate((rests, self._rows[beyond, 1]))
        return _Found(at, rows, rests)

    # Changes

    def put(self, runs: Sequence[Run], names: Names, lane: int, values: Values) -> int:
        """Set the values of these names in one lane; of two for one name, any. None is zero. Returns how
        many names had none before, less those for which there is no room."""
        hashed = self._hashed(runs, names)
        owners = _repeated([space << 12 | lane for space, _, _ in runs], runs)
        if _has_twins(hashed):
            hashed, where = np.unique(hashed, return_index=True)
            values, owners = values[where], owners[where]
        self._grow(hashed.size)  # first, since buckets split: after that all stay where they are
        probe = self._probe(hashed)
        found = self._find(hashed, probe)
        more = self._put_known(found, lane, values[found.at]) if found.at.size else 0
        if found.at.size == hashed.size:
            return more
        rests = values.astype(np.uint64) << _VALUE_SHIFT | owners
        if found.at.size:
            is_new = np.ones(hashed.size, bool)
            is_new[found.at] = False
            hashed, rests = hashed[is_new], rests[is_new]
            probe = _Probe(probe.buckets[:, is_new], probe.tags[:, is_new])
        room = max(0, int(self._buckets_max * BUCKET * LOAD_MAX) - self.rows)
        if hashed.size > room:
            self.refused += hashed.size - room
            hashed, rests = hashed[:room], rests[:room]
            probe = _Probe(probe.buckets[:, :room], probe.tags[:, :room])
        self._count(lane, rests)
        return more + self._settle(hashed, rests, probe)

    def _put_known(self, found: _Found, lane: int, values: Values) -> int:
        """Set values of names that are there, of this lane or of others."""
        lanes = found.rests & _LANE_MASK
        owners = found.rests & _OWNER_MASK
        more = 0
        shared = np.flatnonzero(lanes == _SHARED)
        if shared.size:
            sets = (found.rests[shared] >> _VALUE_SHIFT).astype(np.int64)
            sets, is_new, is_refused = self._sets.put(sets, lane, values[shared])
            self._rows[found.rows[shared], 1] = sets.astype(np.uint64) << _VALUE_SHIFT | owners[shared]
            self.refused += int(np.count_nonzero(is_refused))
            is_more = is_new & ~is_refused
            more += int(np.count_nonzero(is_more))
            self._count(lane, owners[shared[is_more]])
        own = np.flatnonzero(lanes == lane)
        if own.size:
            its = values[own].astype(np.uint64) << _VALUE_SHIFT | owners[own]
            self._rows[found.rows[own], 1] = its
        if shared.size + own.size < lanes.size:
            others = np.flatnonzero((lanes != lane) & (lanes != _SHARED))
            before = (found.rests[others] >> _VALUE_SHIFT).astype(np.uint32)
            sets = self._sets.make(lanes[others].astype(np.int64), before)
            self.refused += others.size - sets.size
            others = others[: sets.size]
            more += others.size
            self._count(lane, owners[others])
            self._sets.put(sets, lane, values[others])
            its = sets.astype(np.uint64) << _VALUE_SHIFT | owners[others] | _SHARED
            self._rows[found.rows[others], 1] = its
        return more

    def remove(self, runs: Sequence[Run], names: Names, lane: int) -> int:
        """There is nothing of these names in this lane any more. Returns how many there were."""
        hashed = self._hashed(runs, names)
        if _has_twins(hashed):
            hashed = np.unique(hashed)
        _, rows, rests = self._find(hashed)
        lanes = rests & _LANE_MASK
        is_own = lanes == lane
        own = rows[is_own]
        self._free(own)
        self._discount(lane, rests[is_own])
        return int(own.size) + self._remove_shared(rows, rests, lane)

    def has(self, lane: int, spaces: Iterable[int] | None = None) -> bool:
        """Whether there may be anything of these spaces in a lane, or of any: to remove it takes a look
        at the whole table."""
        counts: Mapping[int, int] = self._entries.get(lane, {})
        return bool(counts) if spaces is None else any(space in counts for space in spaces)

    def remove_lane(self, lane: int) -> None:
        """There is nothing in this lane any more."""
        if not self.has(lane):
            return
        del self._entries[lane]
        for rows in self._rows_where(lambda rests: rests & _LANE_MASK == lane):
            self._free(rows)
        if (emptied := self._sets.remove_lane(lane)).size:
            self._free_rows_of(emptied)

    def remove_space(self, space: int) -> dict[int, int]:
        """There is nothing of this space any more. Returns how many entries there were, by lane."""
        removed: Counter[int] = Counter()
        having = [of for of in self._entries.values() if space in of]
        if not having:
            return {}
        for of in having:
            del of[space]
        wanted = np.uint64(space << 12)
        for rows in self._rows_where(lambda rests: rests & _SPACE_MASK == wanted):
            rests = self._rows[rows, 1]
            lanes = (rests & _LANE_MASK).astype(np.int64)
            is_shared = lanes == int(_SHARED)
            sets = (rests[is_shared] >> _VALUE_SHIFT).astype(np.int64)
            every = np.concatenate((lanes[~is_shared], self._sets.holders(sets).lanes))
            numbers, counts = np.unique(every, return_counts=True)
            removed.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
            self._sets.free(sets)
            self._free(rows)
        return dict(removed)

    def remove_spaces_of(self, lane: int, spaces: Sequence[int]) -> int:
        """There is nothing of these spaces in this lane any more. Returns how many entries there were.
        It goes through the whole table, once."""
        removed = 0
        wanted = np.array(spaces, np.uint64) << _SPACE_SHIFT
        for rows in self._rows_where(lambda rests: np.isin(rests & _SPACE_MASK, wanted)):
            rests = self._rows[rows, 1]
            own = rows[rests & _LANE_MASK == lane]
            self._free(own)
            removed += own.size + self._remove_shared(rows, rests, lane)
        for space in spaces:
            self._entries[lane].pop(space, None)
        return removed

    def set_epoch(self, epoch: int) -> None:
        """Count times from another second on. What expired before it expires at it."""
        by = epoch - self.epoch

        def moved(values: Values) -> Values:
            codes = (values >> CODE_SHIFT).astype(np.int64)
            later = np.clip(codes - by, 1, NEVER_CODE - 1).astype(np.uint32)
            keeps = (values == 0) | (codes == NEVER_CODE)
            return np.where(keeps, values, later << CODE_SHIFT | values & np.uint32(0xFF))

        for rows in self._rows_where(lambda rests: rests & _LANE_MASK != _SHARED):
            rests = self._rows[rows, 1]
            values = moved((rests >> _VALUE_SHIFT).astype(np.uint32)).astype(np.uint64)
            self._rows[rows, 1] = values << _VALUE_SHIFT | rests & _OWNER_MASK
        self._sets.change(moved)
        self.epoch = epoch

    def _remove_shared(self, rows: Indexes, rests: Names, lane: int) -> int:
        """Remove a lane from the sets of these rows. Returns how many had it."""
        is_shared = rests & _LANE_MASK == _SHARED
        if not is_shared.any():
            return 0
        rows, rests = rows[is_shared], rests[is_shared]
        sets = (rests >> _VALUE_SHIFT).astype(np.int64)
        removed, emptied = self._sets.remove(sets, lane)
        self._discount(lane, rests[removed])
        if emptied.size:
            self._free(rows[np.isin(sets, emptied)])
        return removed.size

    def _count(self, lane: int, rests: Names) -> None:
        """A lane has so many entries more, of the spaces of these."""
        if rests.size:
            counts = self._entries[lane]
            for space, count in _by_space(rests):
                counts[space] += count

    def _discount(self, lane: int, rests: Names) -> None:
        """It has so many fewer."""
        if rests.size:
            counts = self._entries[lane]
            for space, count in _by_space(rests):
                counts[space] -= count
                if counts[space] <= 0:
                    del counts[space]

    def _free_rows_of(self, sets: Indexes) -> None:
        """The rows of these sets are used no more."""
        wanted = np.sort(sets.astype(np.uint64) << _VALUE_SHIFT)

        def is_one(rests: Names) -> npt.NDArray[np.bool_]:
            found = np.zeros(rests.size, bool)
            shared = np.flatnonzero(rests & _LANE_MASK == _SHARED)
            its = rests[shared] & ~_OWNER_MASK
            near = np.minimum(np.searchsorted(wanted, its), wanted.size - 1)
            found[shared] = wanted[near] == its
            return found

        for rows in self._rows_where(is_one):
            self._free(rows)

    def _free(self, rows: Indexes) -> None:
        """These rows have nothing any more."""
        self.rows -= rows.size
        if self._overflow and (beyond := rows[rows >= self._edge]).size:
            for row in beyond.tolist():
                del self._overflow[int(self._rows[row, 0])]
                self._overflow_free.append(row)
            self._note_overflow()
            rows = rows[rows < self._edge]
        self._tags[rows] = 0

    def _rows_where(self, wanted: Test) -> Iterator[Indexes]:
        """The used rows that have such things beside their names, in pieces."""
        pieces: list[tuple[int, int]] = []
        for first, count in zip((0, self._second), self._buckets, strict=True):
            end = (first + count) * BUCKET
            pieces += pairwise([*range(first * BUCKET, end, _SCANNED), end])
        for start, end in pieces:
            is_wanted = (self._tags[start:end] != 0) & wanted(self._rows[start:end, 1])
            rows = np.flatnonzero(is_wanted) + start
            if rows.size:
                yield rows
        if self._overflow:
            rows = np.fromiter(self._overflow.values(), np.int64, len(self._overflow))
            rows = rows[wanted(self._rows[rows, 1])]
            if rows.size:
                yield rows

    # Rows

    def _settle(self, names: Names, rests: Names, probe: _Probe | None = None) -> int:
        """Find room for these rows, whose names are not there. Returns for how many there is; some are
        lost if there is none."""
        count = names.size
        self.rows += count
        names, rests = self._place(names, rests, probe)
        for _ in range(_KICKS):
            if not names.size:
                return count
            slots = self._victims(names)
            slots, which = np.unique(slots, return_index=True)
            others = self._whole.take(slots).view(np.uint64).reshape(-1, 2)
            self._whole[slots] = _whole(names[which], rests[which])
            self._tags[slots] = _tags_of(names[which])
            names[which], rests[which] = others.T
            names, rests = self._place(names, rests)
        fits = min(names.size, len(self._overflow_free))
        for one in range(fits):
            row = self._overflow[int(names[one])] = self._overflow_free.pop()
            self._rows[row] = names[one], rests[one]
        self._note_overflow()
        for rest in rests[fits:].tolist():
            self._lose(rest)
        self.rows -= names.size - fits
        return count - (names.size - fits)

    def _lose(self, rest: int) -> None:
        """There is no room for a row."""
        lost = 1
        if rest & int(_LANE_MASK) == int(_SHARED):
            own = np.array([rest >> int(_VALUE_SHIFT)])
            lost = self._sets.holders(own).lanes.size
            self._sets.free(own)
        self.refused += lost

    def _victims(self, names: Names) -> Indexes:
        """For each of these names, none of whose buckets has room, a row that leaves it its place: one
        whose other bucket has room, if there is one, and any at random else."""
        buckets = self._buckets_of(names).T  # of each name, one in either file
        places = (buckets[:, :, None] << _BUCKET_SHIFT) + np.arange(BUCKET)
        its = self._rows[places.ravel(), 0]
        others = self._buckets_of(its)[::-1].T.reshape(names.size, 2, BUCKET, 2)
        # Of rows in the first file the bucket in the second counts, and the other way round.
        other = np.stack((others[:, 0, :, 0], others[:, 1, :, 1]), axis=1).reshape(names.size, -1)
        tags = self._bucket_tags.take(other.ravel()).view(np.uint8)
        weights = _FREE_COUNTS[_free_in(tags)].reshape(other.shape)
        weights = np.minimum(weights, 1) + self._random.random(other.shape)
        rows: Indexes = places.reshape(names.size, -1)[np.arange(names.size), weights.argmax(axis=1)]
        return rows

    def _place(self, names: Names, rests: Names, probe: _Probe | None = None) -> tuple[Names, Names]:
        """Put these where one of their buckets has room: of two that want one row the last gets it, and
        the other one tries again. Returns those none of whose buckets has room."""
        while names.size:
            buckets, tags = probe or self._probe(names)
            probe = None
            free = _free_in(tags).reshape(2, names.size)
            counts = _FREE_COUNTS.take(free)
            is_first = counts[0] >= counts[1]
            choice = (names >> _CHOICE_SHIFT & np.uint64(BUCKET - 1)).astype(np.int64)
            at = _FREE_ROWS[np.where(is_first, free[0], free[1]), choice]
            rows = (np.where(is_first, buckets[0], buckets[1]) << _BUCKET_SHIFT) + at
            is_stuck = at < 0
            if is_stuck.any():
                fits = np.flatnonzero(~is_stuck)
                wanted, theirs, rows = names[fits], rests[fits], rows[fits]
            else:
                wanted, theirs = names, rests
            self._whole[rows] = _whole(wanted, theirs)
            is_in = self._whole.take(rows).view(np.uint64)[::2] == wanted
            if is_in.all():
                self._tags[rows] = _tags_of(wanted)
                return names[is_stuck], rests[is_stuck]
            self._tags[rows[is_in]] = _tags_of(wanted[is_in])
            is_left = is_stuck
            is_left[~is_stuck] = ~is_in
            names, rests = names[is_left], rests[is_left]
        return names, rests

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
        first = (file * self._second + old) * BUCKET
        places = np.flatnonzero(self._tags[first : first + count * BUCKET])
        belongs = self._bucket_in(file, self._rows[first + places, 0])
        moves = places[belongs != old + (places >> _BUCKET_SHIFT)]
        source = first + moves
        target = source + (new - old) * BUCKET
        self._whole[target] = self._whole.take(source)
        self._tags[target] = self._tags.take(source)
        self._tags[source] = 0
        if self._overflow:
            self._empty_overflow()

    def _note_overflow(self) -> None:
        self._overflow_names = np.sort(np.fromiter(self._overflow, np.uint64, len(self._overflow)))

    def _empty_overflow(self) -> None:
        """Rows of the overflow go where there is room by now."""
        rows = np.fromiter(self._overflow.values(), np.int64, len(self._overflow))
        names, rests = self._rows[rows].T.copy()
        self._overflow_free += rows.tolist()
        self._overflow.clear()
        self._note_overflow()
        self.rows -= rows.size
        self._settle(names, rests)


def _repeated(each: Sequence[int] | Sequence[np.uint64], runs: Sequence[Run]) -> Names:
    """Something of each run, for each of its names."""
    return np.repeat(np.array(each, np.uint64), [size for _, _, size in runs])


def _by_space(rests: Names) -> Iterator[tuple[int, int]]:
    """The spaces of rows, and how many each has."""
    spaces = (rests & _SPACE_MASK) >> _SPACE_SHIFT
    if (spaces == spaces[0]).all():  # which is likely
        yield int(spaces[0]), spaces.size
        return
    yield from Counter(spaces.tolist()).items()


def _whole(names: Names, rests: Names) -> npt.NDArray[np.void]:
    """Rows, each in one piece."""
    whole: npt.NDArray[np.void] = np.stack((names, rests), axis=1).view(_WHOLE)[:, 0]
    return whole


def _free_in(tags: Tags) -> Tags:
    """Of each bucket with these tags the free rows, as bits."""
    return np.packbits(tags.ravel() == 0, bitorder="little")


def _has_twins(hashed: Names) -> bool:
    ordered = np.sort(hashed)
    return bool((ordered[1:] == ordered[:-1]).any())


def _tags_of(hashed: Names) -> Tags:
    """One byte of each, never zero, of bits that say nothing of its buckets."""
    return np.maximum((hashed >> _TAG_SHIFT).astype(np.uint8), _TAG_MIN)


def _mixed(numbers: Names) -> Names:
    """Each 64 bits from all 64 bits, one to one (the end of SplitMix64's finalizer)."""
    mixed = numbers * _MIX1
    mixed ^= mixed >> _29
    mixed *= _MIX2
    mixed ^= mixed >> _32
    return mixed
