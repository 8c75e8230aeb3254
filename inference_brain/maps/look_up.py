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
from inference_brain.maps.holders import LANES_MAX, Holders, Values
from inference_brain.maps.table import CODE_SHIFT, NEVER_CODE, MapTable, Names
from swdriver_shim.cache_map.codec import CHUNK, IN_TIER2, PREFIX, TAIL_BITS
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Group, Layout

FEW_DRIVERS: Final = 64  # of so many, everything is compared at once
_IN_TIER2: Final = np.uint32(IN_TIER2)
_LATEST: Final = np.uint32(0xFFFFFFFF)
_INSIDE: Final = np.arange(CHUNK - 1)  # the columns of a chunk but the last
Flags = npt.NDArray[np.bool_]


class Drivers:
    """Drivers by their lanes. `numbers`: of each lane that there may be; `count` where nobody of these
    has it."""

    def __init__(self, lanes: Numbers) -> None:
        self.lanes = lanes
        self.count = lanes.size
        self.numbers: Numbers = np.full(LANES_MAX, lanes.size)
        self.numbers[lanes] = np.arange(lanes.size)


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

    def who_has(self, kind: int, names: Names) -> Holders:
        return self.table.find(self.space, kind, names)

    def of_all(self, kind: int, names: Names) -> Values:
        """The values of these names at all drivers: a row for each name."""
        return _spread(self.who_has(kind, names), names.size, self.drivers)

    def behind(self, counts: Numbers) -> Values:
        """The entries of the columns of the next chunk, behind so many whole ones at each driver: a row
        for each driver."""
        drivers = self.drivers
        columns = (np.unique(counts) * CHUNK)[:, None] + _INSIDE
        columns = columns[columns < self.names.size]
        which, lanes, values = self.who_has(PREFIX, self.names.take(columns))
        parts = np.zeros((drivers.count, CHUNK - 1), np.uint32)
        if which.size:
            columns, numbers = columns[which], drivers.numbers.take(lanes)
            chunk, inside = np.divmod(columns, CHUNK)
            is_next = np.append(counts, -1).take(numbers) == chunk
            parts[numbers[is_next], inside[is_next]] = values[is_next]
        return parts

    def is_served(self, values: Values) -> Flags:
        return values >= self.served_from

    def expiry(self, code: int) -> float:
        return NEVER if code == NEVER_CODE else float(self.table.epoch + code)


def _spread(found: Holders, names: int, drivers: Drivers) -> Values:
    """Values that were found for so many names: a row for each name, a column for each driver."""
    width = drivers.count + 1
    spread = np.zeros(names * width, np.uint32)
    spread[found.which * width + drivers.numbers.take(found.lanes)] = found.values
    return spread.reshape(names, width)[:, :-1]


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

    def add(self, drivers: Numbers, is_there: Flags, values: Values) -> None:
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
        return _details(at, dram)
    return _hits(at, dram, total)


def _chunks(at: _Asked) -> tuple[_Chunks, _Chunks]:
    """What there is in all tiers, and in memory: the same object if nothing is in tier 2.

    Of many drivers most have the beginning of a prompt only. So as many chunks as many drivers have are
    compared at all drivers, and what follows at the few that have all of those.
    """
    drivers, ends = at.drivers, at.names[CHUNK - 1 :: CHUNK]
    everywhere = in_memory = _Chunks(drivers.count)
    found = at.who_has(PREFIX, ends)
    which, start, stop = np.arange(drivers.count), 0, ends.size
    if drivers.count > FEW_DRIVERS:
        is_few = np.bincount(found.which, minlength=ends.size) <= FEW_DRIVERS
        if is_few.any():
            stop = int(is_few.argmax()) + 1
    while start < stop:
        if stop - start < ends.size:
            [here] = ((found.which >= start) & (found.which < stop)).nonzero()
            some = Holders(found.which[here] - start, found.lanes[here], found.values[here])
        else:
            some = found
        values = _spread(some, stop - start, drivers)
        is_there = np.logical_and.accumulate(values >= at.served_from, axis=0)
        if in_memory is everywhere and _has_tier2(values):
            in_memory = deepcopy(everywhere)
        if in_memory is not everywhere:
            is_near = np.logical_and.accumulate(is_there & ((values & _IN_TIER2) == 0), axis=0)
            is_near &= in_memory.count[which] == start
            in_memory.add(which, is_near, values)
        everywhere.add(which, is_there, values)
        start, stop = stop, ends.size
        [further] = is_there[-1].nonzero()
        if start == stop or not further.size:
            break
        which, drivers = further, Drivers(drivers.lanes[further])
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
    which = np.flatnonzero((dram.tails > 0) & (dram.tails <= left))
    values = _tails(at, dram.columns[which], dram.tails[which], which)
    has = np.flatnonzero(at.is_served(values))
    which, values = which[has], values[has]
    tokens[which] += dram.tails[which]
    codes[which] = np.minimum(codes[which], (values >> np.uint32(CODE_SHIFT)).astype(np.int64))


def _tails(at: _Asked, columns: Numbers, counts: Numbers, drivers: Numbers) -> Values:
    """The values of the tails of so many tokens behind so many columns, at one driver each."""
    wanted, of = np.unique(columns * COLUMN_TOKENS + counts, return_inverse=True)
    keys = [at.prompt.tail(*divmod(one, COLUMN_TOKENS))[:8] for one in wanted.tolist()]
    found = at.who_has(PREFIX, np.frombuffer(b"".join(keys), np.uint64))
    numbers = at.drivers.numbers.take(found.lanes)
    place = np.full(at.drivers.count + 1, -1)
    place[drivers] = np.arange(drivers.size)
    theirs = place.take(numbers)
    is_it = np.flatnonzero(theirs >= 0)
    is_it = is_it[of[theirs[is_it]] == found.which[is_it]]
    values = np.zeros(drivers.size, np.uint32)
    values[theirs[is_it]] = found.values[is_it]
    return values


# Layouts with windows and states


def _details(at: _Asked, reach: _Reach) -> Hits:
    """What each driver can serve, whose windows and states have to have what they need as well."""
    kinds = [1 + index for index, group in enumerate(at.layout.groups) if not group.linked]
    lasts = np.unique(np.concatenate((np.arange(CHUNK - 1, at.names.size, CHUNK), reach.columns - 1)))
    lasts = lasts[lasts >= 0]
    values = [at.of_all(kind, at.names[lasts]) for kind in kinds]
    tails = np.zeros(at.drivers.count, np.uint32)
    left = at.prompt.tokens - reach.columns * COLUMN_TOKENS
    which = np.flatnonzero((reach.tails > 0) & (reach.tails <= left))
    if at.unit == 1 and which.size:
        tails[which] = _tails(at, reach.columns[which], reach.tails[which], which)
    return Hits.of(
        _with_details(at, reach, driver, int(tails[driver]), lasts, values)
        for driver in range(at.drivers.count)
    )


def _with_details(
    at: _Asked, reach: _Reach, driver: int, behind: int, lasts: Numbers, found: list[Values]
) -> Hit:
    """Of one driver. `behind`: the value of the tail behind its columns. `found`: for each group that is
    not linked, entries whose last columns are these."""
    columns = int(reach.columns[driver])
    if columns == 0:
        return NOTHING
    ends = np.arange(CHUNK - 1, columns, CHUNK)
    if columns % CHUNK:
        ends = np.append(ends, columns - 1)
    groups = [group for group in at.layout.groups if not group.linked]
    paths = []
    for group, its in zip(groups, found, strict=True):
        there = np.zeros(columns, bool)
        codes = np.full(columns, NEVER_CODE, np.int64)
        values = its[np.searchsorted(lasts, ends), driver]
        for end, value in zip(ends.tolist(), values.tolist(), strict=True):
            if value >= at.served_from:
                first = end - end % CHUNK
                for column in range(first, end + 1):
                    there[column] = bool(value >> (column - first) & 1)
                codes[first : end + 1] = value >> CODE_SHIFT
        paths.append((group, there, codes))
    whole = columns - columns % at.unit
    code, tail = int(reach.codes[driver]), int(reach.tails[driver])
    if behind >= at.served_from:
        tokens = whole * COLUMN_TOKENS + tail
        if _covers(paths, whole, tokens):
            least = _least(paths, whole, tokens)
            return Hit(tokens, 0, at.expiry(min(code, behind >> CODE_SHIFT, least)))
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
    return Hits.of(hits)
