"""What a driver leaves when it is stopped, so that its next life goes on with what agents still have.

Whoever decides leaves which column is in which slot, of whom, and its dates; each shard leaves which
evict wrote each slot. Both are read once, at the next start, and are gone then: who was killed, or could
not write them, begins with nothing, as ever, and agents are emptied.

- A shard goes on only at the same memory of an agent that has applied just the same evicts.
- A column is served only with the seal that its key, its org and that evict make. So a note that does
  not fit what is in the slots costs misses, and never a wrong byte.
- Time goes on while nobody runs: dates are those of the calendar. If that was put back, none is taken.
- Slots of which nobody knows any more what is in them are emptied before anything is served.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvss_agent.process.durable_file import write_durably
from swdriver_shim.cache.prefix_map import Column, State, Tail
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS, KEY_BYTES, Keys, Namespace
from telemetry.decoder import Limits, Malformed, unpack

log = logging.getLogger(__name__)

VERSION: Final = 1
NOTE_BYTES_MAX: Final = 4 << 30  # of a driver with some ten million columns
NAME: Final = "columns"  # of the file; those of shards are called after them
CLOCK_SECONDS: Final = 1.0  # the calendar may have been put back by so much

T = TypeVar("T")
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Count = Annotated[int, Meta(ge=0)]


class ShardNote(Struct, frozen=True):
    """Of one shard: its memory, how many evicts that has applied, and which of them wrote each slot."""

    incarnation: bytes
    applied: Count
    written: bytes  # one more than the number, 8 bytes for each slot; 0: unknown
    version: int = VERSION

    @property
    def numbers(self) -> array[int]:
        return array("Q", self.written)


class ColumnNote(Struct, frozen=True, array_like=True):
    map: Count  # which of the note's
    key: Key
    parent: int  # which of the columns before it in the note; -1 for none
    depth: Count
    tokens: Annotated[int, Meta(ge=1, le=COLUMN_TOKENS)]
    slot: Count
    stored_at: float  # by the calendar, as all of these
    used_at: float
    kept_at: float | None
    uses: Count
    priority: int
    ttl: int | None
    before: bytes  # of a tail: the key of the column before it


class MapNote(Struct, frozen=True):
    org: str
    namespace: Namespace
    group: Count


class LedgerNote(Struct, frozen=True):
    at: float
    slots: list[Count]  # of each group, that anybody has ever had
    maps: list[MapNote]
    columns: list[ColumnNote]  # a parent before those behind it
    version: int = VERSION


def write(path: Path, note: ShardNote | LedgerNote) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(path, msgspec.msgpack.encode(note))


def take(path: Path, kind: type[T]) -> T | None:
    """What is written there, once. None if there is nothing, or nothing that can be read."""
    try:
        raw = path.read_bytes()
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("What an earlier driver has left can't be read: %s: %s", path, error.strerror)
        return None
    try:
        note = unpack(raw, msgspec.msgpack.Decoder(kind), Limits(NOTE_BYTES_MAX), has_bounds=True)
    except Malformed as error:
        log.warning("What an earlier driver has left is not valid, and is ignored: %s: %s", path, error)
        return None
    return note if getattr(note, "version", None) == VERSION else None


# The ledger


def left_by(stock: Stock, now: float, wall: float) -> LedgerNote:
    """What is known of columns that can be served. Nothing may be under way."""
    offset = wall - now
    maps: list[MapNote] = []
    columns: list[ColumnNote] = []
    for account in stock.accounts.values():
        for namespace, homes in account.maps.items():
            for home in homes:
                places: dict[Column, int] = {}
                for column in sorted(home.columns.values(), key=lambda one: one.depth):
                    parent = places.get(column.parent, -1) if column.parent else -1
                    is_reachable = parent >= 0 or column.parent is None
                    if column.state is not State.READY or not is_reachable:
                        continue
                    places[column] = len(columns)
                    columns.append(
                        ColumnNote(
                            len(maps),
                            column.key,
                            parent,
                            column.depth,
                            column.tokens,
                            column.slot,
                            column.stored_at + offset,
                            column.used_at + offset,
                            None if column.kept_at is None else column.kept_at + offset,
                            column.uses,
                            column.priority,
                            column.ttl,
                            column.before if isinstance(column, Tail) else b"",
                        )
                    )
                maps.append(MapNote(account.org, namespace, home.group))
    return LedgerNote(wall, [pool.had for pool in stock.slots.pools], maps, columns)


def go_on(
    stock: Stock,
    note: LedgerNote,
    keys: Callable[[str, Namespace], Keys | None],
    now: float,
    wall: float,
) -> list[list[int]]:
    """Put it into a stock that has nothing yet. Of each group the slots that have to be emptied before
    they are used: nobody knows what is in them.

    `keys` of an org in a namespace; None for those that are not served any more.
    """
    groups = len(stock.layout.groups)
    if len(note.slots) != groups or wall < note.at - CLOCK_SECONDS:
        log.warning("What an earlier driver has left is of another layout, or of a later time: ignored")
        return [list(range(slots)) for slots in note.slots[:groups]] + [[]] * (groups - len(note.slots))
    taken: list[set[int]] = [set() for _ in range(groups)]
    adopted = list(_adopted(note, groups, taken, keys))
    for group, slots in enumerate(taken):
        stock.slots.pools[group].adopt(slots, note.slots[group])
    made: dict[int, Column] = {}
    for index, maker, one in adopted:
        home = stock.maps_of(maker)[note.maps[one.map].group]
        parent = made.get(one.parent)
        if one.tokens == COLUMN_TOKENS:
            column = home.add(one.key, parent, one.depth)
        else:
            column = home.add_tail(one.key, parent, one.depth, one.tokens, one.before)
        made[index] = column
        stock.occupy(column, one.slot, State.WRITING)
        column.stored_at = min(now, one.stored_at - wall + now)
        column.used_at = min(now, one.used_at - wall + now)
        column.kept_at = None if one.kept_at is None else one.kept_at - wall + now
        column.uses, column.priority, column.ttl = one.uses, one.priority, one.ttl
    by_org: dict[str, list[Column]] = {}
    for column in sorted(made.values(), key=lambda column: column.used_at):
        by_org.setdefault(column.home.account.org, []).append(column)
    for org, columns in by_org.items():
        stock.accounts[org].held_since = now
        stock.arrived(columns, now)
    return [
        [slot for slot in range(had) if slot not in slots]
        for had, slots in zip(note.slots, taken, strict=True)
    ]


def _adopted(
    note: LedgerNote,
    groups: int,
    taken: list[set[int]],
    keys: Callable[[str, Namespace], Keys | None],
) -> Iterator[tuple[int, Keys, ColumnNote]]:
    """The columns that fit what is here: of orgs that are served, each in a slot of its own, none
    without its parent."""
    makers = [keys(one.org, one.namespace) if one.group < groups else None for one in note.maps]
    seen: set[tuple[int, bytes]] = set()
    places: set[int] = set()
    for index, one in enumerate(note.columns):
        maker = makers[one.map] if one.map < len(makers) else None
        if maker is None or (one.map, one.key) in seen or (one.parent >= 0 and one.parent not in places):
            continue
        group = note.maps[one.map].group
        if one.slot >= note.slots[group] or one.slot in taken[group]:
            continue
        taken[group].add(one.slot)
        seen.add((one.map, one.key))
        places.add(index)
        yield index, maker, one
