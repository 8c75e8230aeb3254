"""Looking a prompt up in the maps of many drivers of one model at once.

It mirrors `swdriver_shim.cache.lookup`: the longest prefix that all groups of the layout can serve. What
has expired by the time that is asked for is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from inference_brain.maps.hits import NEVER, NOTHING, Hit
from inference_brain.maps.table import CODE_SHIFT, LANES, NEVER_CODE, MapTable, Names, Values
from swdriver_shim.cache_map.codec import CHUNK, IN_TIER2, PREFIX, TAIL_BITS
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Group, Layout

FEW_BLOCKS: Final = 16  # for so many, everything is looked up at once
PLACES_KEPT: Final = 1 << 12
FIRST_CHUNKS: Final = 8  # for more, these first: few drivers have what follows
_DETAIL: Final = np.uint32(0xFF)
_INSIDE: Final = np.arange(CHUNK - 1)  # the columns of a chunk but the last
_hit: Callable[[tuple[int, int, float]], Hit] = partial(tuple.__new__, Hit)  # without a call for each
Codes = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]


class Drivers:
    """Lanes of drivers, and how they lie in blocks. `columns`: of each, in what is found for the
    blocks."""

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = np.array(lanes, np.int64)
        self.of_block, self.at_lane = self.lanes // LANES, self.lanes % LANES
        blocks, self.block_places = np.unique(self.of_block, return_inverse=True)
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
) -> list[Hit]:
    """What each of these drivers can serve of the prompt at this wall time."""
    if not prompt.keys:
        return [NOTHING] * drivers.count
    at = _Asked(table, space, layout, prompt, drivers, max(0, math.floor(now - table.epoch)))
    if not any(group.linked for group in layout.groups):
        return _single_columns(at)
    return _prefixes(at)


class _Asked:
    """A prompt at one time. `served_after`: codes above it have not expired."""

    def __init__(
        self,
        table: MapTable,
        space: int,
        layout: Layout,
        prompt: Prompt,
        drivers: Drivers,
        served_after: int,
        names: Names | None = None,
    ) -> None:
        self.table, self.space, self.layout = table, space, layout
        self.prompt, self.drivers, self.served_after = prompt, drivers, served_after
        self.unit = prompt.maker.unit_columns
        if names is None:
            names = np.frombuffer(b"".join(prompt.keys), np.uint64)[::2]
        self.names = names

    def at(self, drivers: Drivers) -> _Asked:
        """The same at other drivers."""
        return _Asked(
            self.table, self.space, self.layout, self.prompt, drivers, self.served_after, self.names
        )

    def of_all(self, kind: int, names: Names) -> Values:
        """The values of these names at all drivers: a row for each name."""
        drivers = self.drivers
        found = self.table.find(names[:, None], drivers.places(self.table, self.space, kind))
        return found.reshape(names.size, drivers.blocks.size * LANES).take(drivers.columns, axis=1)

    def of_each(self, kind: int, names: Names, which: Numbers) -> Values:
        """The values of the names in each row at one driver each, which is given by its number."""
        drivers = self.drivers
        places = drivers.places(self.table, self.space, kind).take(drivers.block_places[which])
        found = self.table.find(names, places[:, None])
        return found[np.arange(which.size), :, drivers.at_lane[which]]

    def is_served(self, values: Values) -> Flags:
        return values >> CODE_SHIFT > self.served_after

    def expiry(self, code: int) -> float:
        return NEVER if code == NEVER_CODE else float(self.table.epoch + code)


def _prefixes(at: _Asked) -> list[Hit]:
    """Where there are many drivers, all first chunks, and then the whole prompt at those that have all
    of these."""
    ends = at.names[CHUNK - 1 :: CHUNK]
    if at.drivers.blocks.size <= FEW_BLOCKS or ends.size <= FIRST_CHUNKS:
        return _hits_of(at, _Chunks(at, ends))
    chunks = _Chunks(at, ends[:FIRST_CHUNKS])
    further = np.flatnonzero(chunks.is_there[-1])
    hits = _hits_of(at, chunks)
    if further.size:
        some = at.at(Drivers(at.drivers.lanes[further].tolist()))
        for place, hit in zip(further.tolist(), _hits_of(some, _Chunks(some, ends)), strict=True):
            hits[place] = hit
    return hits


def _hits_of(at: _Asked, chunks: _Chunks) -> list[Hit]:
    everywhere = in_memory = chunks.is_there.sum(axis=0)
    there = chunks.is_there
    if has_tier2 := _has_tier2(chunks.values):
        in_tier2 = (chunks.values & np.uint32(IN_TIER2)) != 0
        there = np.logical_and.accumulate(there & ~in_tier2, axis=0)
        in_memory = there.sum(axis=0)
    parts = _parts_of_all(at, in_memory)
    dram = _reach(at, chunks, there, in_memory, parts, tier2=False)
    total = dram
    if has_tier2 or _has_tier2(parts):
        if (further := np.flatnonzero(everywhere > in_memory)).size:
            parts = parts.copy()
            parts[further] = _parts(at, everywhere[further], further)
        total = _reach(at, chunks, chunks.is_there, everywhere, parts, tier2=True)
    if any(not group.linked for group in at.layout.groups):
        return [_with_details(at, dram, one) for one in range(at.drivers.count)]
    return _hits(at, dram, total)


class _Chunks:
    """Which of these chunks of the prompt are there, at each driver. `is_there`: with all before
    them."""

    def __init__(self, at: _Asked, ends: Names) -> None:
        self.values: Values = at.of_all(PREFIX, ends)
        self.codes: Codes = self.values >> np.uint32(CODE_SHIFT)
        self.is_there = np.logical_and.accumulate(self.codes > at.served_after, axis=0)


def _has_tier2(values: Values) -> bool:
    """Whether any of these is in tier 2."""
    return bool(int(np.bitwise_or.reduce(values, axis=None)) & IN_TIER2)


@dataclass(slots=True)
class _Reach:
    """How far each driver has the prefix: whole columns, when the first of it expires, and the length of
    a tail that may follow."""

    columns: Numbers
    codes: Codes
    tails: Numbers


def _parts_of_all(at: _Asked, chunks: Numbers) -> Values:
    """The same at all drivers. Most have the same number of chunks, and are looked up together."""
    drivers = at.drivers
    if drivers.blocks.size <= FEW_BLOCKS:
        return _parts(at, chunks, np.arange(drivers.count))
    asked, which = np.unique(drivers.block_places << 32 | chunks, return_inverse=True)
    places = drivers.places(at.table, at.space, PREFIX).take(asked >> 32)
    columns = ((asked & 0xFFFFFFFF) * CHUNK)[:, None] + _INSIDE
    found = at.table.find(at.names.take(columns, mode="clip"), places[:, None])
    found[columns >= at.names.size] = 0
    return found[which, :, drivers.at_lane]


def _parts(at: _Asked, chunks: Numbers, drivers: Numbers) -> Values:
    """The entries of the columns of the next chunk, behind so many whole ones, at each of these
    drivers."""
    columns = (chunks * CHUNK)[:, None] + _INSIDE
    parts = at.of_each(PREFIX, at.names.take(columns, mode="clip"), drivers)
    parts[columns >= at.names.size] = 0
    return parts


def _reach(
    at: _Asked, chunks: _Chunks, is_there: Flags, count: Numbers, parts: Values, *, tier2: bool
) -> _Reach:
    """With so many chunks, these, and these parts of the next one."""
    columns = count * CHUNK
    codes = np.full(count.size, NEVER_CODE, np.uint32)
    tails = np.zeros(count.size, np.int64)
    if len(chunks.values):
        codes = np.where(is_there, chunks.codes, np.uint32(NEVER_CODE)).min(axis=0)
        last = chunks.values[np.maximum(count - 1, 0), np.arange(count.size)]
        tails = np.where(count > 0, last & np.uint32(TAIL_BITS), 0).astype(np.int64)
    is_part = at.is_served(parts)
    if not tier2:
        is_part &= (parts & np.uint32(IN_TIER2)) == 0
    if is_part.any():
        longest = (is_part * (_INSIDE + 1)).max(axis=1)
        has = np.flatnonzero(longest)
        found = parts[has, longest[has] - 1]
        columns[has] += longest[has]
        codes[has] = np.minimum(codes[has], found >> CODE_SHIFT)
        tails[has] = found & np.uint32(TAIL_BITS)
    return _Reach(columns, codes, tails)


def _hits(at: _Asked, dram: _Reach, total: _Reach) -> list[Hit]:
    unit = at.unit
    tokens = (dram.columns - dram.columns % unit) * COLUMN_TOKENS
    codes = dram.codes
    if unit == 1 and dram.tails.any():
        codes = codes.copy()
        _add_tails(at, dram, tokens, codes)
    more = np.zeros(tokens.size, np.int64)
    if total is not dram:
        further = (total.columns - total.columns % unit) * COLUMN_TOKENS
        more = np.maximum(0, further - tokens)
        codes = np.where(more > 0, total.codes, codes)
    expires = np.where(codes == NEVER_CODE, NEVER, at.table.epoch + codes.astype(np.float64))
    expires[(tokens == 0) & (more == 0)] = NEVER
    return list(map(_hit, zip(tokens.tolist(), more.tolist(), expires.tolist(), strict=True)))


def _add_tails(at: _Asked, dram: _Reach, tokens: Numbers, codes: Codes) -> None:
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
            if value >> CODE_SHIFT > at.served_after:
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


def _single_columns(at: _Asked) -> list[Hit]:
    """For layouts of nothing but windows and states, each of whose columns has an entry."""
    all_values = [at.of_all(1 + index, at.names) for index in range(len(at.layout.groups))]
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
    return hits
