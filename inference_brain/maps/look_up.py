"""Looking a prompt up in the maps of many drivers of one model at once.

It mirrors `swdriver_shim.cache.lookup`: the longest prefix that all groups of the layout can serve. What
has expired by the time that is asked for is not there.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Final

import numpy as np
import numpy.typing as npt

from inference_brain.maps.hits import NEVER, NOTHING, Hit, Hits, Numbers
from inference_brain.maps.table import CODE_SHIFT, LANES, NEVER_CODE, MapTable, Names, Values
from swdriver_shim.cache_map.codec import CHUNK, IN_TIER2, PREFIX, TAIL_BITS
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Group, Layout

FEW_BLOCKS: Final = 16  # for so many, everything is looked up at once
PLACES_KEPT: Final = 1 << 12
FIRST_CHUNKS: Final = 2  # for more, these first: few drivers have what follows
_IN_TIER2: Final = np.uint32(IN_TIER2)
_LATEST: Final = np.uint32(0xFFFFFFFF)
_NONE: Final = np.zeros(0, np.int64)
_INSIDE: Final = np.arange(CHUNK - 1)  # the columns of a chunk but the last
Flags = npt.NDArray[np.bool_]


class Drivers:
    """Lanes of drivers, and how they lie in blocks. `columns`: of each, in what is found for the
    blocks. `firsts`: the number of one driver of each block."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = np.array(lanes, np.int64)
        self.of_block, self.at_lane = self.lanes // LANES, self.lanes % LANES
        blocks, self.firsts, self.block_places = np.unique(
            self.of_block, return_index=True, return_inverse=True
        )
        self.blocks = blocks.astype(np.uint64)
        self.columns: Numbers = self.block_places * LANES + self.at_lane
        self.count = len(lanes)
        self._places: dict[tuple[int, int], Names] = {}

    def places(self, table: MapTable, space: int, kind: int) -> Names:
        """Of the blocks."""
        found = self._places.get((space, kind))
        if found is None:
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            found = self._places[space, kind] = table.places(space, kind, self.blocks)
        return found


def look_up(
    table: MapTable, space: int, layout: Layout, prompt: Prompt, drivers: Drivers, now: float
) -> Hits:
    """What each of these drivers can serve of the prompt at this wall time."""
    at = _Asked(table, space, layout, prompt, drivers, max(0, math.floor(now - table.epoch)))
    if not prompt.keys:
        return Hits.of([NOTHING] * drivers.count)
    if not any(group.linked for group in layout.groups):
        return _single_columns(at)
    return _prefixes(at)


class _Asked:
    """A prompt at one time. `served_from`: values from there on have not expired."""

    def __init__(
        self,
        table: MapTable,
        space: int,
        layout: Layout,
        prompt: Prompt,
        drivers: Drivers,
        served_after: int,
    ) -> None:
        self.table, self.space, self.layout = table, space, layout
        self.prompt, self.drivers = prompt, drivers
        self.served_from = np.uint32(min(served_after + 1, NEVER_CODE) << CODE_SHIFT)
        self.unit = prompt.maker.unit_columns
        self.names: Names = np.frombuffer(b"".join(prompt.keys), np.uint64)[::2]

    def of_all(self, drivers: Drivers, kind: int, names: Names) -> Values:
        """The values of these names at all of these drivers: a row for each name."""
        found = self.table.find(names[:, None], drivers.places(self.table, self.space, kind))
        return found.reshape(names.size, drivers.blocks.size * LANES).take(drivers.columns, axis=1)

    def of_each(self, kind: int, names: Names, which: Numbers) -> Values:
        """The values of the names in each row at one driver each, which is given by its number."""
        drivers = self.drivers
        places = drivers.places(self.table, self.space, kind).take(drivers.block_places[which])
        found = self.table.find(names, places[:, None])
        return found[np.arange(which.size), :, drivers.at_lane[which]]

    def behind(self, counts: Numbers) -> Values:
        """The entries of the columns of the next chunk, behind so many whole ones at each driver. Most
        drivers of a block have as many as its first one, and are looked up with it."""
        drivers = self.drivers
        places = drivers.places(self.table, self.space, PREFIX)
        of_block = counts[drivers.firsts]
        which = drivers.block_places
        others = np.flatnonzero(counts != of_block[which])
        if others.size:
            places = np.concatenate((places, places[which[others]]))
            of_block = np.concatenate((of_block, counts[others]))
            which = which.copy()
            which[others] = drivers.blocks.size + np.arange(others.size)
        columns = (of_block * CHUNK)[:, None] + _INSIDE
        names = self.names.take(columns, mode="clip")
        found = self.table.find(names, places[:, None])
        found[columns >= self.names.size] = 0
        return found[which, :, drivers.at_lane]

    def is_served(self, values: Values) -> Flags:
        return values >= self.served_from

    def expiry(self, code: int) -> float:
        return NEVER if code == NEVER_CODE else float(self.table.epoch + code)


class _Reach:
    """How far each driver has the prefix: whole columns, when the first of it expires, and the length of
    a tail that may follow."""

    __slots__ = ("codes", "columns", "tails")

    def __init__(self, columns: Numbers, codes: Numbers, tails: Numbers) -> None:
        self.columns, self.codes, self.tails = columns, codes, tails


class _Chunks:
    """How many chunks each driver has from the first one on, the least value of theirs, and the value of
    the last."""

    __slots__ = ("count", "last", "least")

    def __init__(self, drivers: int) -> None:
        self.count = np.zeros(drivers, np.int64)
        self.least = np.full(drivers, _LATEST, np.uint32)
        self.last = np.zeros(drivers, np.uint32)

    def add(self, drivers: Numbers | slice, is_there: Flags, values: Values) -> None:
        """These drivers have all chunks before these, and of these those that are there."""
        count = np.add.reduce(is_there, axis=0, dtype=np.int64)
        least = np.minimum.reduce(np.where(is_there, values, _LATEST), axis=0)
        last = values[count - 1, np.arange(count.size)]
        self.count[drivers] += count
        self.least[drivers] = np.minimum(self.least[drivers], least)
        self.last[drivers] = np.where(count > 0, last, self.last[drivers])


def _prefixes(at: _Asked) -> Hits:
    """For layouts with a group that has the whole prefix."""
    everywhere, in_memory = _chunks(at)
    parts = at.behind(in_memory.count)
    dram = total = _reach(at, in_memory, parts, tier2=False)
    if in_memory is not everywhere or _has_tier2(parts):
        if in_memory is not everywhere:
            parts = at.behind(everywhere.count)
        total = _reach(at, everywhere, parts, tier2=True)
    if any(not group.linked for group in at.layout.groups):
        return Hits.of([_with_details(at, dram, one) for one in range(at.drivers.count)])
    return _hits(at, dram, total)


def _chunks(at: _Asked) -> tuple[_Chunks, _Chunks]:
    """What there is in all tiers, and in memory: the same object if nothing is in tier 2.

    At few drivers, all chunks at once. At many, the first chunks of all, and then twice as many each
    time at those that have all before, until those are few: most have the beginning of a prompt only.
    """
    drivers, ends = at.drivers, at.names[CHUNK - 1 :: CHUNK]
    everywhere = in_memory = _Chunks(drivers.count)
    which: Numbers | slice = slice(None)
    start, stop = 0, ends.size if drivers.blocks.size <= FEW_BLOCKS else FIRST_CHUNKS
    while start < ends.size:
        values = at.of_all(drivers, PREFIX, ends[start:stop])
        is_there = np.logical_and.accumulate(values >= at.served_from, axis=0)
        if in_memory is everywhere and _has_tier2(values):
            in_memory = deepcopy(everywhere)
        if in_memory is not everywhere:
            is_near = np.logical_and.accumulate(is_there & ((values & _IN_TIER2) == 0), axis=0)
            is_near &= in_memory.count[which] == start
            in_memory.add(which, is_near, values)
        everywhere.add(which, is_there, values)
        further = np.flatnonzero(is_there[-1]) if stop < ends.size else _NONE
        if not further.size:
            break
        if further.size < drivers.count:
            which = further if isinstance(which, slice) else which[further]
            drivers = Drivers(at.drivers.lanes[which].tolist())
        start, stop = stop, 2 * stop if drivers.blocks.size > FEW_BLOCKS else ends.size
    return everywhere, in_memory


def _has_tier2(values: Values) -> bool:
    """Whether any of these is in tier 2."""
    return bool(int(np.bitwise_or.reduce(values, axis=None)) & IN_TIER2)


def _reach(at: _Asked, chunks: _Chunks, parts: Values, *, tier2: bool) -> _Reach:
    """With these chunks, and these parts of the next one."""
    columns = chunks.count * CHUNK
    least, last = chunks.least, chunks.last
    is_part = parts >= at.served_from
    if not tier2:
        is_part &= (parts & _IN_TIER2) == 0
    if is_part.any():
        longest = (is_part * (_INSIDE + 1)).max(axis=1)
        has = np.flatnonzero(longest)
        found = parts[has, longest[has] - 1]
        columns[has] += longest[has]
        least, last = least.copy(), last.copy()
        least[has] = np.minimum(least[has], found)
        last[has] = found
    codes = (least >> np.uint32(CODE_SHIFT)).astype(np.int64)
    return _Reach(columns, codes, (last & np.uint32(TAIL_BITS)).astype(np.int64))


def _hits(at: _Asked, dram: _Reach, total: _Reach) -> Hits:
    unit = at.unit
    columns = dram.columns if unit == 1 else dram.columns - dram.columns % unit
    tokens = columns * COLUMN_TOKENS
    codes = dram.codes
    if unit == 1 and dram.tails.any():
        codes = codes.copy()
        _add_tails(at, dram, tokens, codes)
    more = np.zeros(tokens.size, np.int64)
    if total is not dram:
        further = (total.columns - total.columns % unit) * COLUMN_TOKENS
        more = np.maximum(0, further - tokens)
        codes = np.where(more > 0, total.codes, codes)
    expires = codes.astype(np.float64) + at.table.epoch
    expires[(codes == NEVER_CODE) | (tokens + more == 0)] = NEVER
    return Hits(tokens, more, expires)


def _add_tails(at: _Asked, dram: _Reach, tokens: Numbers, codes: Numbers) -> None:
    """Add the tails that drivers have behind their columns."""
    left = at.prompt.tokens - tokens
    for one in np.flatnonzero((dram.tails > 0) & (dram.tails <= left)).tolist():
        value = _tail(at, int(dram.columns[one]), int(dram.tails[one]), one)
        if value:
            tokens[one] += dram.tails[one]
            codes[one] = min(int(codes[one]), value >> CODE_SHIFT)


def _tail(at: _Asked, columns: int, count: int, driver: int) -> int:
    """The value of the tail of so many tokens behind so many columns; 0 for none."""
    key = at.prompt.tail(columns, count)
    name = np.frombuffer(key[:8], np.uint64)[None, :]
    value = at.of_each(PREFIX, name, np.array([driver]))
    return int(value[0, 0]) if bool(at.is_served(value)[0, 0]) else 0


# Layouts with windows and states


def _with_details(at: _Asked, reach: _Reach, driver: int) -> Hit:
    """What one driver can serve, whose windows and states have to have what they need as well."""
    columns = int(reach.columns[driver])
    if columns == 0:
        return NOTHING
    ends = [*range(CHUNK - 1, columns, CHUNK)]
    if columns % CHUNK:
        ends.append(columns - 1)
    which = np.array([driver])
    paths = []
    for index, group in enumerate(at.layout.groups):
        if group.linked:
            continue
        values = at.of_each(1 + index, at.names[ends][None, :], which)[0]
        there = np.zeros(columns, bool)
        codes = np.full(columns, NEVER_CODE, np.int64)
        for end, value in zip(ends, values.tolist(), strict=True):
            if value >= at.served_from:
                first = end - end % CHUNK
                for column in range(first, end + 1):
                    there[column] = bool(value >> (column - first) & 1)
                codes[first : end + 1] = value >> CODE_SHIFT
        paths.append((group, there, codes))
    whole = columns - columns % at.unit
    code, tail = int(reach.codes[driver]), int(reach.tails[driver])
    if at.unit == 1 and 0 < tail <= at.prompt.tokens - whole * COLUMN_TOKENS:
        tokens = whole * COLUMN_TOKENS + tail
        value = _tail(at, whole, tail, driver)
        if value and _covers(paths, whole, tokens):
            least = _least(paths, whole, tokens)
            return Hit(tokens, 0, at.expiry(min(code, value >> CODE_SHIFT, least)))
    while whole and not _covers(paths, whole, whole * COLUMN_TOKENS):
        whole -= at.unit
    if not whole:
        return NOTHING
    least = _least(paths, whole, whole * COLUMN_TOKENS)
    return Hit(whole * COLUMN_TOKENS, 0, at.expiry(min(code, least)))


_Path = tuple[Group, Flags, Numbers]  # of a group, by column: whether it is there, and its code


def _covers(paths: list[_Path], whole: int, tokens: int) -> bool:
    """Whether all have the whole columns that are needed to go on after so many tokens."""
    return all(bool(there[group.first_needed(tokens) : whole].all()) for group, there, _ in paths)


def _least(paths: list[_Path], whole: int, tokens: int) -> int:
    """When the first of those expires."""
    codes = [its[group.first_needed(tokens) : whole] for group, _, its in paths]
    return min((int(one.min()) for one in codes if one.size), default=NEVER_CODE)


def _single_columns(at: _Asked) -> Hits:
    """For layouts of nothing but windows and states, each of whose columns has an entry."""
    all_values = [at.of_all(at.drivers, 1 + index, at.names) for index in range(len(at.layout.groups))]
    hits = []
    for driver in range(at.drivers.count):
        paths: list[_Path] = []
        for group, values in zip(at.layout.groups, all_values, strict=True):
            its = values[:, driver]
            paths.append((group, at.is_served(its), (its >> CODE_SHIFT).astype(np.int64)))
        last = np.logical_and.reduce([there for _, there, _ in paths])
        ends = np.flatnonzero(last[at.unit - 1 :: at.unit]) * at.unit + at.unit
        hit = NOTHING
        for whole in ends[::-1].tolist():
            if _covers(paths, whole, whole * COLUMN_TOKENS):
                code = _least(paths, whole, whole * COLUMN_TOKENS)
                hit = Hit(whole * COLUMN_TOKENS, 0, at.expiry(code))
                break
        hits.append(hit)
    return Hits.of(hits)
