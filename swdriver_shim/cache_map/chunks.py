"""Which columns of one org in one namespace are reported, and how long they can be served.

Reported are the ends of chunks: the eighth column of each, and within a chunk where a prefix ends, where
prompts part, what a tail follows, and where there is a state. An end is reported while its chunk is
complete up to it, in all groups that have the whole prefix. Where the layout has windows or states as
well, each end says which columns of its chunk those groups have. A layout of nothing but windows or
states has no prefix to follow, so that each of its columns is reported by itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from swdriver_shim.cache.prefix_map import Account, Column, PrefixMap, State
from swdriver_shim.cache_map.codec import CHUNK, IN_TIER2, NAME_BYTES, NEVER_AT, PREFIX, entry
from swdriver_shim.layout import Group
from swdriver_shim.policy import NEVER, Tiers

MOVED_PART: Final = 10  # of the time that is left: an entry that expires so much later is reported again
LEAVING_MAX: Final = 1 << 14
TIER2_MAX: Final = 1 << 18  # entries of one org that are in tier 2 only
_READY: Final = State.READY
Name = tuple[int, bytes]  # the kind of an entry, and the first bytes of its column's key


@dataclass(slots=True)
class Batch:
    """What has happened to columns of one space since the last time."""

    arrived: list[Column] = field(default_factory=list)
    removed: list[tuple[Column, Column | None]] = field(default_factory=list)  # with their parents
    used: set[Column] = field(default_factory=set)
    altered: list[Column] = field(default_factory=list)  # that have another TTL


@dataclass(frozen=True, slots=True)
class Moment:
    """A time by the ledger's clock, and how far wall time is ahead of it."""

    now: float
    offset: float

    @property
    def wall(self) -> float:
        return self.now + self.offset

    def entry(self, life: float, detail: int) -> int:
        """The value of an entry that expires at this time of the ledger's clock."""
        return entry(life + self.offset, detail)


class Space:
    """The columns of one org in one namespace. `pending` is what brains do not know yet; None stands for
    an entry that is removed."""

    def __init__(self, maps: Sequence[PrefixMap], space: bytes) -> None:
        self.space = space
        self.maps = maps
        self.account: Account = maps[0].account
        self.pending: dict[Name, int | None] = {}
        self._detailed = [one for one in maps if not one.linked]
        self._tables: dict[int, dict[Column, int]] = {PREFIX: {}}
        self._tables |= {1 + one.group: {} for one in self._detailed}

    @property
    def size(self) -> int:
        """How many entries there are."""
        return sum(map(len, self._tables.values()))

    def entries(self) -> Iterator[tuple[int, list[bytes], list[int]]]:
        """All entries: of each kind their names and values."""
        for kind, table in self._tables.items():
            yield kind, [column.key[:NAME_BYTES] for column in table], list(table.values())

    def apply(self, batch: Batch, at: Moment) -> None:
        """Follow what has happened."""
        raise NotImplementedError

    def refresh(self, at: Moment) -> None:
        """The wall clock has changed: look at every entry again."""
        raise NotImplementedError

    def start_over(self, columns: list[Column], at: Moment) -> None:
        """The policy has changed: look at all columns again, those that had no entry as well."""
        before = {
            (kind, name): value
            for kind, names, values in self.entries()
            for name, value in zip(names, values, strict=True)
        }
        known, self.pending = self.pending, {}
        self.clear()
        self.apply(Batch(arrived=columns), at)
        found, self.pending = self.pending, known
        known |= dict.fromkeys(before.keys() - found.keys())
        known |= {name: value for name, value in found.items() if before.get(name) != value}

    def clear(self) -> None:
        """Forget everything, and report nothing."""
        for table in self._tables.values():
            table.clear()

    def check(self, at: Moment) -> None:
        """Drop what does not matter any more."""

    def copied(self, key: bytes, at: Moment) -> None:
        """The column of this key exists in tier 2."""

    def deleted(self, keys: Iterable[bytes]) -> None:
        """These columns are removed from tier 2."""

    def tier2_purged(self) -> None:
        """No column of the org exists in tier 2."""

    def _put(self, kind: int, column: Column, value: int | None, at: Moment) -> None:
        """Report this value, if it is worth it; None if there is no entry."""
        table = self._tables[kind]
        before = table.get(column)
        if value is None:
            if before is not None:
                del table[column]
                self.pending[kind, column.key[:NAME_BYTES]] = None
        elif before is None or _is_worth_it(before, value, at):
            table[column] = value
            self.pending[kind, column.key[:NAME_BYTES]] = value

    def _life(self, columns: Iterable[Column | None]) -> float | None:
        """When the first of these columns expires, by the ledger's clock; None if one can't be
        served."""
        policy = self.account.policy
        most = policy.columns_max
        stored = used = least = NEVER
        for column in columns:
            if (
                column is None
                or column.state is not _READY
                or (most is not None and column.depth >= most)
            ):
                return None
            stored, used = min(stored, column.stored_at), min(used, column.used_at)
            if column.ttl is not None:
                least = min(least, policy.expires_at(column.stored_at, column.used_at, column.ttl))
        return None if policy.tiers is Tiers.NONE else min(least, policy.expires_at(stored, used))


class SingleColumns(Space):
    """Of a layout without a group that has the whole prefix. Tails are not reported."""

    def apply(self, batch: Batch, at: Moment) -> None:
        changed = {*batch.arrived, *(column for column, _ in batch.removed), *batch.used, *batch.altered}
        # Removed ones first: another one may have the same key by now.
        for column in sorted(changed, key=lambda one: one.state is _READY):
            if not column.tail:
                self._refresh(column, at)

    def refresh(self, at: Moment) -> None:
        for table in self._tables.values():
            for column in list(table):
                self._refresh(column, at)

    def _refresh(self, column: Column, at: Moment) -> None:
        life = self._life((column,))
        self._put(1 + column.group, column, None if life is None else at.entry(life, 1), at)


class Chunks(Space):
    """Of a layout with a group that has the whole prefix."""

    def __init__(self, maps: Sequence[PrefixMap], space: bytes, groups: Sequence[Group]) -> None:
        super().__init__(maps, space)
        self._states = {index for index, group in enumerate(groups) if group.is_state}
        self._leader, *self._others = [one for one in maps if one.linked]
        self._ends = self._tables[PREFIX]
        self._tails: dict[Column, Column] = {}  # behind a column: the one that was stored last
        self._waiting: dict[Column, set[Column]] = {}  # for a column of their chunk: ends
        self._fixed: set[Column] = set()  # ends that stay when a prompt goes on behind them
        self._shrunk: set[Column] = set()  # ends behind which something was removed
        self._tier2: dict[bytes, int] = {}  # ends that are there only, by name
        self._leaving: OrderedDict[bytes, int] = OrderedDict()  # by key: were ends, and may be copied

    @property
    def size(self) -> int:
        return super().size + len(self._tier2)

    def entries(self) -> Iterator[tuple[int, list[bytes], list[int]]]:
        yield from super().entries()
        yield PREFIX, list(self._tier2), list(self._tier2.values())

    def apply(self, batch: Batch, at: Moment) -> None:
        touched, fresh = set[Column](), dict[Column, None]()
        dirty: dict[Column, None] = {}
        again: list[Column] = []
        for column, parent in batch.removed:
            if column.state is _READY:
                again.append(column)  # it was away for a while
            elif column.map is self._leader:
                self._remove(column, parent, dirty, touched, at)
            else:
                self._touch(column, touched)
        for column in batch.altered:
            self._touch(column, touched)
        for column in (*batch.arrived, *again):
            if column.state is not _READY:
                continue  # it has been removed since
            if column.map is not self._leader:
                self._touch(column, touched)
                if column.group in self._states and not column.tail:
                    self._add_state(column, dirty)
            elif column.tail:
                self._add_tail(column, dirty)
            else:
                fresh[column] = None
        self._add(fresh, dirty, at)
        touched.difference_update(fresh)
        touched.update(one for one in again if one in fresh)  # its chunk may live longer now
        for column in (*touched, *fresh):
            dirty.update(dict.fromkeys(self._waiting.pop(column, ())))
        if touched:
            dirty.update(dict.fromkeys(self._ends_over(touched)))
        dirty.update((column, None) for column in batch.used if column in self._ends)
        for column in dirty:
            self._refresh(column, at)

    def refresh(self, at: Moment) -> None:
        for column in {*self._ends, *chain.from_iterable(self._waiting.values())}:
            self._refresh(column, at)

    def clear(self) -> None:
        super().clear()
        for cleared in (self._tails, self._waiting, self._fixed, self._shrunk):
            cleared.clear()
        self._tier2.clear()
        self._leaving.clear()

    def check(self, at: Moment) -> None:
        wall = at.wall
        for name in [name for name, value in self._tier2.items() if value >> 8 <= wall]:
            self._remove_from_tier2(name)
        for column in [one for one in self._waiting if one.map.columns.get(one.key) is not one]:
            del self._waiting[column]

    # Columns

    def _touch(self, column: Column, touched: set[Column]) -> None:
        """The column of another group has changed."""
        if leader := self._leader.columns.get(column.key):
            touched.add(leader)

    def _remove(
        self,
        column: Column,
        parent: Column | None,
        dirty: dict[Column, None],
        touched: set[Column],
        at: Moment,
    ) -> None:
        if column.map.columns.get(column.key) is column:
            touched.add(column)  # there are others behind it
        value = None if column in self._shrunk or column.tail else self._ends.get(column)
        self._forget(column, at)
        if value is not None:
            self._leave(column, value, at)
        if parent is None:
            return
        if self._tails.get(parent) is column:
            del self._tails[parent]
            dirty[parent] = None
        elif _is_inside(parent) and parent not in self._ends:
            self._shrunk.add(parent)  # it is the last one now
            dirty[parent] = None

    def _forget(self, column: Column, at: Moment) -> None:
        for kind in self._tables:
            self._put(kind, column, None, at)
        self._fixed.discard(column)
        self._shrunk.discard(column)

    def _add_tail(self, tail: Column, dirty: dict[Column, None]) -> None:
        if tail.parent:  # one at the start of a prompt is not looked for
            self._tails[tail.parent] = tail
            dirty[tail] = dirty[tail.parent] = None

    def _add_state(self, state: Column, dirty: dict[Column, None]) -> None:
        if leader := self._leader.columns.get(state.key):
            self._fixed.add(leader)
            dirty[leader] = None

    def _add(self, fresh: dict[Column, None], dirty: dict[Column, None], at: Moment) -> None:
        """These whole columns can be served: find the ends among them, and before them."""
        behind = Counter(column.parent for column in fresh if column.parent)
        for column in fresh:
            if not _is_inside(column) or behind[column] != 1 or column in self._ends:
                dirty[column] = None
            if behind[column] > 1:
                self._fixed.add(column)
        for parent in behind:
            if parent in fresh or not _is_inside(parent) or parent in self._fixed:
                continue
            if parent in self._ends and parent not in self._tails:
                self._forget(parent, at)  # its prefix goes on
                dirty.pop(parent, None)
            else:
                self._fixed.add(parent)
                dirty[parent] = None

    def _ends_over(self, touched: set[Column]) -> list[Column]:
        """The reported ends whose chunk has one of these columns."""
        chunks = {column.depth // CHUNK for column in touched}
        near = [end for end in self._ends if end.depth // CHUNK in chunks]
        return [end for end in near if not touched.isdisjoint(_chunk_of(end))]

    def _refresh(self, end: Column, at: Moment) -> None:
        life = self._life_of_tail(end) if end.tail else self._life_of_chunk(end)
        if life is None:
            self._forget(end, at)
            return
        tail = self._tails.get(end)
        name = end.key[:NAME_BYTES]
        if self._tier2.pop(name, None) is not None:
            self.pending[PREFIX, name] = None  # unless there is another value
            self._ends.pop(end, None)
        self._put(PREFIX, end, at.entry(life, tail.tokens if tail else 0), at)
        for one in self._detailed:
            self._put(1 + one.group, end, self._detail(one, end, at), at)

    def _life_of_chunk(self, end: Column) -> float | None:
        least, chunk = NEVER, _chunk_of(end)
        parts: list[list[Column | None]] = [list(chunk)]
        parts += [[one.columns.get(column.key) for column in chunk] for one in self._others]
        for part in parts:
            life = self._life(part)
            if life is None:
                for column, its in zip(chunk, part, strict=True):
                    if its is None or its.state is not _READY:
                        self._waiting.setdefault(column, set()).add(end)
                return None
            least = min(least, life)
        return least if len(chunk) == end.depth % CHUNK + 1 else None

    def _life_of_tail(self, tail: Column) -> float | None:
        others = (one.columns.get(tail.key) for one in (*self._others, *self._detailed))
        return self._life((tail, *others))

    def _detail(self, group: PrefixMap, end: Column, at: Moment) -> int | None:
        """Which columns of the chunk this group has."""
        if end.tail:
            return None
        mask, least = 0, NEVER
        for column in _chunk_of(end):
            life = self._life((group.columns.get(column.key),))
            if life is not None and life > at.now:
                mask |= 1 << column.depth % CHUNK
                least = min(least, life)
        return at.entry(least, mask) if mask else None

    # Tier 2

    def _leave(self, end: Column, value: int, at: Moment) -> None:
        """The end is in memory no more. It may be in tier 2, or about to be."""
        if self.account.policy.tiers is not Tiers.TIER2 or self._detailed or value >> 8 <= at.wall:
            return
        if end.tier2_used_at is not None:
            life = self.account.policy.expires_at(end.stored_at, end.tier2_used_at, end.ttl)
            self._add_to_tier2(end.key[:NAME_BYTES], at.entry(life, IN_TIER2))
            return
        self._leaving[end.key] = value & ~0xFF | IN_TIER2
        if len(self._leaving) > LEAVING_MAX:
            self._leaving.popitem(last=False)

    def copied(self, key: bytes, at: Moment) -> None:
        value = self._leaving.pop(key, None)
        if value is not None and value >> 8 > at.wall:
            self._add_to_tier2(key[:NAME_BYTES], value)

    def deleted(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._leaving.pop(key, None)
            self._remove_from_tier2(key[:NAME_BYTES])

    def tier2_purged(self) -> None:
        self._leaving.clear()
        for name in list(self._tier2):
            self._remove_from_tier2(name)

    def _add_to_tier2(self, name: bytes, value: int) -> None:
        self._tier2[name] = self.pending[PREFIX, name] = value
        if len(self._tier2) > TIER2_MAX:
            self._remove_from_tier2(next(iter(self._tier2)))

    def _remove_from_tier2(self, name: bytes) -> None:
        if self._tier2.pop(name, None) is not None:
            self.pending[PREFIX, name] = None


def _is_inside(column: Column) -> bool:
    """Whether its chunk goes on behind it."""
    return column.depth % CHUNK != CHUNK - 1


def _chunk_of(end: Column) -> list[Column]:
    """The columns of its chunk up to this end, the last one first."""
    chunk: list[Column] = []
    column: Column | None = end
    for _ in range(end.depth % CHUNK + 1):
        if column is None:
            break  # removed meanwhile
        chunk.append(column)
        column = column.parent
    return chunk


def _is_worth_it(before: int, value: int, at: Moment) -> bool:
    """Whether it matters to whoever knows the value before."""
    if before & 0xFF != value & 0xFF or value < before:
        return True
    gain, left = (value >> 8) - (before >> 8), (value >> 8) - at.wall
    return gain > 0 and (value >> 8 == NEVER_AT or gain * MOVED_PART >= left)
