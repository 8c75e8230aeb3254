"""Keeps what is reported of a driver's cache in step with its ledger.

The ledger's notes cost it an append each. Everything else is done by the thread that calls `follow`,
outside the ledger's lock: it looks at the columns as they are by then, and whatever changes meanwhile
has its own note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Final

from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Account, Column, PrefixMap
from swdriver_shim.cache_map.chunks import Batch, Chunks, Moment, SingleColumns, Space
from swdriver_shim.cache_map.codec import DROPS_MAX, SPACE_BYTES, CachePath, Section, pack_values
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import TAG_BYTES, Namespace
from swdriver_shim.layout import Layout

NOTES_MAX: Final = (
    1 << 20
)  # of each kind, between two calls of `follow`; more, and it looks at everything
CLOCK_SECONDS: Final = 0.5  # a wall clock that moves by more changes every entry
CHECK_SECONDS: Final = 30.0
PENDING_MIN: Final = 1 << 16  # pending entries that are always worth a delta


@dataclass(slots=True)
class _Notes:
    arrived: list[Sequence[Column]] = field(default_factory=list)
    removed: list[tuple[Column, Column | None]] = field(default_factory=list)
    used: list[Sequence[Column]] = field(default_factory=list)
    altered: list[Column] = field(default_factory=list)
    changed: dict[str, Account] = field(default_factory=dict)
    purged: list[PrefixMap] = field(default_factory=list)
    # Tags and keys, in the order in which they came; no key: everything with the tag is purged.
    copied: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    deleted: list[tuple[PrefixMap, Sequence[bytes]]] = field(default_factory=list)


class Follower(Listener):
    """`follow`, `take` and `everything` are called by one thread."""

    def __init__(
        self,
        layout: Layout,
        accounts: Mapping[str, Account],
        lock: FairLock,
        is_reachable: Callable[[], bool],
    ) -> None:
        """`lock` is the ledger's, and `accounts` are its orgs. Raises ValueError for a layout of
        columns that stand alone: of those nobody knows which belong to a prompt."""
        if layout.groups[0].alone:
            raise ValueError("columns that stand alone have no cache map")
        self.serves = False
        self.path: CachePath = ""
        self.path_now: Callable[[], CachePath] = lambda: ""  # who knows the homes sets it
        self.wants_snapshot = True  # rather than a delta
        self.on_purge: Callable[[], None] = lambda: None
        self._accounts = accounts
        self._lock = lock
        self._is_reachable = is_reachable
        self._layout = layout
        self._has_prefix = any(group.linked for group in layout.groups)
        self._notes = _Notes()
        self._has_all = False  # of what was stored before it followed, or of notes that were too many
        self._spaces: dict[tuple[str, Namespace], Space] = {}
        self._by_map: dict[PrefixMap, Space] = {}
        self._by_tag: dict[bytes, list[Space]] = {}
        self._dropped: list[bytes] = []
        self._offset = 0.0
        self._checked_at = 0.0

    @property
    def size(self) -> int:
        """How many entries there are."""
        return sum(space.size for space in self._spaces.values())

    # Notes, under the ledger's lock

    def arrived(self, columns: Sequence[Column]) -> None:
        self._notes.arrived.append(columns)
        self._bound(self._notes.arrived)

    def removed(self, columns: Sequence[Column]) -> None:
        self._notes.removed += [(column, column.parent) for column in columns]
        self._bound(self._notes.removed)

    def used(self, columns: Sequence[Column]) -> None:
        if columns:
            self._notes.used.append(columns)
            self._bound(self._notes.used)

    def ttl_changed(self, columns: Sequence[Column]) -> None:
        self._notes.altered += columns
        self._bound(self._notes.altered)

    def policy_changed(self, account: Account) -> None:
        self._notes.changed[account.org] = account

    def purged(self, maps: Sequence[PrefixMap]) -> None:
        self._notes.purged += maps
        self._bound(self._notes.purged)
        self.on_purge()

    def copied(self, tag: bytes, key: bytes) -> None:
        self._notes.copied.append((tag, key))
        self._bound(self._notes.copied)

    def tier2_purged(self, tags: Collection[bytes]) -> None:
        self._notes.copied += [(tag, None) for tag in tags]
        self._bound(self._notes.copied)
        self.on_purge()

    def deleted(self, prefix_map: PrefixMap, keys: Sequence[bytes]) -> None:
        self._notes.deleted.append((prefix_map, keys))
        self._bound(self._notes.deleted)

    def _bound(self, notes: Sized) -> None:
        if len(notes) > NOTES_MAX:
            self._start_over()

    def _start_over(self) -> None:
        self._notes = _Notes()  # what was purged is not there when everything is looked at
        self._has_all = False

    def start_over(self) -> None:
        """Look at everything again."""
        with self._lock:
            self._start_over()

    # Following

    def follow(self, now: float, wall: float) -> None:
        """Look at everything that has changed. `now`: by the ledger's clock."""
        with self._lock:
            notes, self._notes = self._notes, _Notes()
            self.serves = self._is_reachable()
            accounts = notes.changed if self._has_all else self._accounts
            columns = {org: _columns_of(account) for org, account in accounts.items()}
            has_all, self._has_all = self._has_all, True
        self.path = self.path_now()
        at = Moment(now, wall - now)
        for prefix_map in notes.purged:
            self._drop(prefix_map)
        if not has_all:
            for table in (self._spaces, self._by_map, self._by_tag, self._dropped):
                table.clear()
            self.wants_snapshot = True
            notes = _Notes(arrived=[one for lists in columns.values() for one in lists])
        for space, batch in self._batches(notes):
            space.apply(batch, at)
        if has_all:
            self._follow_policies(columns, at)
        self._follow_tier2(notes, at)
        if abs(at.offset - self._offset) > CLOCK_SECONDS:
            self._offset = at.offset
            for space in self._spaces.values():
                space.refresh(at)
        if not 0 <= now - self._checked_at < CHECK_SECONDS:
            self._checked_at = now
            for space in self._spaces.values():
                space.check(at)
        pending = sum(len(space.pending) for space in self._spaces.values())
        if pending > max(PENDING_MIN, self.size):
            self.wants_snapshot = True
        if self.wants_snapshot:  # which says all of it
            self._dropped.clear()
            for space in self._spaces.values():
                space.pending.clear()

    def _batches(self, notes: _Notes) -> list[tuple[Space, Batch]]:
        batches: dict[Space, Batch] = {}

        def batch_of(column: Column) -> Batch | None:
            space = self._by_map.get(column.map) or self._add_space(column.map)
            return None if space is None else batches.setdefault(space, Batch())

        for columns in notes.arrived:
            for column in columns:
                if batch := batch_of(column):
                    batch.arrived.append(column)
        for removed in notes.removed:
            if batch := batch_of(removed[0]):
                batch.removed.append(removed)
        for columns in notes.used:
            if batch := batch_of(columns[0]):
                batch.used.update(columns)
        for column in notes.altered:
            if batch := batch_of(column):
                batch.altered.append(column)
        return list(batches.items())

    def _follow_policies(self, columns: Mapping[str, list[list[Column]]], at: Moment) -> None:
        """These columns of orgs have another policy."""
        by_space: dict[Space, list[Column]] = {}
        for of_map in (one for lists in columns.values() for one in lists if one):
            if its := self._by_map.get(of_map[0].map):
                by_space.setdefault(its, []).extend(of_map)
        for space in self._spaces.values():
            if space.account.org in columns:
                space.start_over(by_space.get(space, []), at)

    def _follow_tier2(self, notes: _Notes, at: Moment) -> None:
        for tag, key in notes.copied:
            for space in self._by_tag.get(tag, ()):
                if key is None:
                    space.tier2_purged()
                else:
                    space.copied(key, at)
        for prefix_map, keys in notes.deleted:
            if its := self._by_map.get(prefix_map):
                its.deleted(keys)

    def _add_space(self, prefix_map: PrefixMap) -> Space | None:
        """None for a map that is purged."""
        account, namespace = prefix_map.account, prefix_map.namespace
        maps, maker = account.maps.get(namespace), account.makers.get(namespace)
        if maps is None or maker is None or maps[prefix_map.group] is not prefix_map:
            return None
        if before := self._spaces.get((account.org, namespace)):
            self._drop_space(before)  # the ledger forgets namespaces that have no columns
        space = maker.tag + namespace.digest()[:SPACE_BYTES]
        made: Space = SingleColumns(maps, space)
        if self._has_prefix:
            made = Chunks(maps, space, self._layout.groups)
        self._spaces[account.org, namespace] = made
        self._by_map.update(dict.fromkeys(maps, made))
        self._by_tag.setdefault(maker.tag, []).append(made)
        return made

    def _drop(self, prefix_map: PrefixMap) -> None:
        if space := self._by_map.get(prefix_map):
            self._drop_space(space)

    def _drop_space(self, space: Space) -> None:
        del self._spaces[space.account.org, space.maps[0].namespace]
        for prefix_map in space.maps:
            del self._by_map[prefix_map]
        self._by_tag[space.space[:TAG_BYTES]].remove(space)
        self._dropped.append(space.space)
        if len(self._dropped) > DROPS_MAX:
            self.wants_snapshot = True

    # What is reported

    def take(self, base: int) -> tuple[list[Section], list[bytes]]:
        """What has changed since the last call: entries, and dropped spaces, which come first."""
        sections = []
        for space in self._spaces.values():
            if space.pending:
                sections += list(_sections(space.space, space.pending, base))
                space.pending = {}
        dropped, self._dropped = self._dropped, []
        return sections, dropped

    def everything(self, base: int) -> list[Section]:
        """All entries. Nothing is pending from here on."""
        self.wants_snapshot = False
        self._dropped.clear()
        sections = []
        for space in self._spaces.values():
            space.pending = {}
            for kind, names, values in space.entries():
                if names:
                    packed = pack_values(values, base)
                    sections.append(Section(space.space, kind, b"".join(names), packed))
        return sections


def _sections(
    space: bytes, pending: Mapping[tuple[int, bytes], int | None], base: int
) -> Iterator[Section]:
    for kind in {kind for kind, _ in pending}:
        its = [(name, value) for (one, name), value in pending.items() if one == kind]
        there = [(name, value) for name, value in its if value is not None]
        yield Section(
            space,
            kind,
            b"".join(name for name, _ in there),
            pack_values([value for _, value in there], base),
            b"".join(name for name, value in its if value is None),
        )


def _columns_of(account: Account) -> list[list[Column]]:
    """By map. The caller has the lock."""
    return [list(one.columns.values()) for maps in account.maps.values() for one in maps]
