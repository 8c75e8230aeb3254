"""Snapshots that a driver writes when it stops, so that the next one continues with what agents have.

The decider writes which column is in which slot, and its dates; each shard writes which evict wrote each
slot. A snapshot is deleted when it is read. Without one, as after a crash, a driver starts empty, and
agents are emptied.

- A shard continues only at the same memory of an agent that has applied exactly the same evicts.
- A column is served only with the seal that its key, its org and that evict make. So a snapshot that
  does not match the slots costs misses, and never a wrong byte.
- Dates are of the wall clock, since time passes between two drivers. If it was set back, no column is
  restored.
- Slots of unknown content are emptied before anything is served.
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
from swdriver_shim.cache.prefix_map import Column, State, Tail, terms_of
from swdriver_shim.cache.request_log import PromptKeys, cut_keys
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS, KEY_BYTES, Keys, Namespace
from swdriver_shim.policy import Tier2Rule
from telemetry.decoder import Limits, Malformed, unpack

log = logging.getLogger(__name__)

# Another one whenever keys are made in another way: no column is found by its old key.
VERSION: Final = 3
SNAPSHOT_BYTES_MAX: Final = 4 << 30  # of a driver with some ten million columns
NAME: Final = "columns"  # of the file; the files of shards have the shards' names
CLOCK_SECONDS: Final = 1.0  # the wall clock may have been set back by so much

T = TypeVar("T")
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Count = Annotated[int, Meta(ge=0)]
Number = Annotated[int, Meta(ge=0, lt=1 << 31)]  # as columns have them


class ShardSnapshot(Struct, frozen=True):
    """One shard: its memory, how many evicts that has applied, and which of them wrote each slot."""

    incarnation: bytes
    applied: Count
    written: bytes  # one more than the number, 8 bytes for each slot; 0: unknown
    version: int = VERSION

    @property
    def numbers(self) -> array[int]:
        return array("Q", self.written)


class ColumnSnapshot(Struct, frozen=True, array_like=True):
    map: Count  # index into `LedgerSnapshot.maps`
    key: Key
    parent: int  # index into `LedgerSnapshot.columns`, of an earlier one; -1 for none
    depth: Number
    tokens: Annotated[int, Meta(ge=1, le=COLUMN_TOKENS)]
    slot: Number
    stored_at: float  # by the wall clock, as all of these
    used_at: float
    tier2_used_at: float | None
    uses: Number
    priority: int
    ttl: int | None
    tier2_rule: Tier2Rule
    before: bytes  # of a tail: the key of the column before it
    turn: Count = 0


class MapSnapshot(Struct, frozen=True):
    org: str
    namespace: Namespace
    group: Count


class ConversationSnapshot(Struct, frozen=True):
    """The trail of a conversation: the keys of its last prompt, one after the other."""

    org: str
    namespace: Namespace
    continue_id: str
    keys: bytes


class LedgerSnapshot(Struct, frozen=True):
    at: float
    slots: list[Count]  # of each group, that were ever used
    maps: list[MapSnapshot]
    columns: list[ColumnSnapshot]  # a parent before those behind it
    conversations: list[ConversationSnapshot]  # the oldest first
    version: int = VERSION


def write(path: Path, snapshot: ShardSnapshot | LedgerSnapshot) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(path, msgspec.msgpack.encode(snapshot))


def read_once(path: Path, kind: type[T]) -> T | None:
    """Read a snapshot and delete it. None if there is none that can be read."""
    try:
        raw = path.read_bytes()
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("The snapshot of an earlier driver can't be read: %s: %s", path, error.strerror)
        return None
    try:
        snapshot = unpack(
            raw, msgspec.msgpack.Decoder(kind), Limits(SNAPSHOT_BYTES_MAX), has_bounds=True
        )
    except Malformed as error:
        log.warning("The snapshot of an earlier driver is not valid and is ignored: %s: %s", path, error)
        return None
    if (found := getattr(snapshot, "version", None)) != VERSION:
        log.warning(
            "The snapshot of an earlier driver has version %s, and this one reads version %d. It starts "
            "empty: %s",
            *(found, VERSION, path),
        )
        return None
    return snapshot


# The ledger


def take(stock: Stock, now: float, wall: float) -> LedgerSnapshot:
    """A snapshot of all columns that can be served. Nothing may be under way."""
    offset = wall - now
    maps: list[MapSnapshot] = []
    columns: list[ColumnSnapshot] = []
    for account in stock.accounts.values():
        for namespace, prefix_maps in account.maps.items():
            for prefix_map in prefix_maps:
                places: dict[Column, int] = {}
                for column in sorted(prefix_map.columns.values(), key=lambda one: one.depth):
                    parent = places.get(column.parent, -1) if column.parent else -1
                    is_reachable = parent >= 0 or column.parent is None
                    if column.state is not State.READY or not is_reachable:
                        continue
                    places[column] = len(columns)
                    columns.append(
                        ColumnSnapshot(
                            len(maps),
                            column.key,
                            parent,
                            column.depth,
                            column.tokens,
                            column.slot,
                            column.stored_at + offset,
                            column.used_at + offset,
                            None if column.tier2_used_at is None else column.tier2_used_at + offset,
                            column.uses,
                            column.priority,
                            column.ttl,
                            column.tier2_rule,
                            column.before if isinstance(column, Tail) else b"",
                            column.turn,
                        )
                    )
                maps.append(MapSnapshot(account.org, namespace, prefix_map.group))
    conversations = [
        ConversationSnapshot(org, prompt.maker.namespace, continue_id, b"".join(prompt.keys))
        for (org, continue_id), prompt in stock.conversations.items()
    ]
    slots = [pool.ever_used for pool in stock.slots.pools]
    return LedgerSnapshot(wall, slots, maps, columns, conversations)


def restore(
    stock: Stock,
    snapshot: LedgerSnapshot,
    keys: Callable[[str, Namespace], Keys | None],
    now: float,
    wall: float,
) -> list[list[int]]:
    """Restore the columns into an empty stock. Returns the slots of each group that have to be emptied
    before anything is served.

    `keys` of an org in a namespace; None for an org that is not served any more.
    """
    groups = len(stock.layout.groups)
    if len(snapshot.slots) != groups or wall < snapshot.at - CLOCK_SECONDS:
        log.warning("The snapshot of an earlier driver has another layout, or a later time: ignored")
        return [list(range(slots)) for slots in snapshot.slots[:groups]] + [[]] * (
            groups - len(snapshot.slots)
        )
    taken: list[set[int]] = [set() for _ in range(groups)]
    adopted = list(_adopted(snapshot, groups, taken, keys))
    for group, slots in enumerate(taken):
        stock.slots.pools[group].adopt(slots, snapshot.slots[group])
    made: dict[int, Column] = {}
    for index, maker, one in adopted:
        prefix_map = stock.maps_of(maker)[snapshot.maps[one.map].group]
        parent = made.get(one.parent)
        if one.tokens == COLUMN_TOKENS:
            column = prefix_map.add(one.key, parent, one.depth)
        else:
            column = prefix_map.add_tail(one.key, parent, one.depth, one.tokens, one.before)
        made[index] = column
        terms = terms_of(one.priority, one.turn, one.ttl, one.tier2_rule)
        stock.occupy(column, one.slot, State.WRITING, terms)
        column.stored_at = min(now, one.stored_at - wall + now)
        column.used_at = min(now, one.used_at - wall + now)
        column.tier2_used_at = None if one.tier2_used_at is None else one.tier2_used_at - wall + now
        column.uses = one.uses
    for trail in snapshot.conversations:
        if its := keys(trail.org, trail.namespace):
            stock.conversations.add(trail.continue_id, PromptKeys(its, cut_keys(trail.keys)))
    by_org: dict[str, list[Column]] = {}
    for column in sorted(made.values(), key=lambda column: column.used_at):
        by_org.setdefault(column.map.account.org, []).append(column)
    for org, columns in by_org.items():
        stock.accounts[org].ttl_since = now
        stock.arrived(columns, now)
    return [
        [slot for slot in range(had) if slot not in slots]
        for had, slots in zip(snapshot.slots, taken, strict=True)
    ]


def _adopted(
    snapshot: LedgerSnapshot,
    groups: int,
    taken: list[set[int]],
    keys: Callable[[str, Namespace], Keys | None],
) -> Iterator[tuple[int, Keys, ColumnSnapshot]]:
    """The columns that can be restored: of orgs that are served, each in a slot of its own, none without
    its parent."""
    makers = [keys(one.org, one.namespace) if one.group < groups else None for one in snapshot.maps]
    seen: set[tuple[int, bytes]] = set()
    places: set[int] = set()
    for index, one in enumerate(snapshot.columns):
        maker = makers[one.map] if one.map < len(makers) else None
        if maker is None or (one.map, one.key) in seen or (one.parent >= 0 and one.parent not in places):
            continue
        group = snapshot.maps[one.map].group
        if one.slot >= snapshot.slots[group] or one.slot in taken[group]:
            continue
        taken[group].add(one.slot)
        seen.add((one.map, one.key))
        places.add(index)
        yield index, maker, one
