"""vLLM's KV events: units that can be loaded from now on, and units that can't be loaded any more.

Routers of requests follow these events. They know blocks by vLLM's hashes, and the ledger knows columns
by keys, so a request that has both names its units. A unit is loadable when all of its columns of the
first group are. Where there are states, that is the first group with KV; whether there is a state to
go on from, no event tells.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Column

UNITS_MAX: Final = 1 << 20  # that have names; the oldest are dropped, and have no more events
EVENTS_MAX: Final = 1 << 16  # that have not been taken; more drop the oldest, which is counted


class UnitEvent(NamedTuple):
    hashes: tuple[bytes, ...]
    parent: bytes | None  # of the first
    is_there: bool


@dataclass(slots=True)
class Unit:
    hashes: tuple[bytes, ...]
    parent: bytes | None
    columns: int
    there: int = 0


class UnitEvents(Listener):
    """The ledger reports columns, from any thread and under its lock; the engine takes events."""

    def __init__(self, unit_tokens: int, hash_tokens: int, group: int = 0) -> None:
        """`hash_tokens`: the tokens of one of vLLM's hashes. `group`: whose columns are counted."""
        self.hash_tokens = hash_tokens
        self._group = group
        self.dropped = 0
        self._hashes = unit_tokens // hash_tokens
        self._units: OrderedDict[bytes, Unit] = OrderedDict()  # by the key of each column
        self._events: list[UnitEvent] = []
        self._lock = threading.Lock()

    def name(self, unit: int, keys: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """Name a unit of a prompt: the keys of its columns, and the hashes of all the prompt's
        blocks."""
        first = unit * self._hashes
        mine = tuple(hashes[first : first + self._hashes])
        if len(mine) < self._hashes:
            return
        with self._lock:
            if keys[0] in self._units:
                return
            made = Unit(mine, hashes[first - 1] if first else None, len(keys))
            self._units.update(dict.fromkeys(keys, made))
            while len(self._units) > UNITS_MAX:
                self._units.popitem(last=False)

    def arrived(self, columns: Sequence[Column]) -> None:
        for column in columns:
            self._count(column, 1)

    def removed(self, columns: Sequence[Column]) -> None:
        for column in columns:
            self._count(column, -1)

    def _count(self, column: Column, by: int) -> None:
        if column.group != self._group:
            return
        with self._lock:
            unit = self._units.get(column.key)
            if unit is None or not 0 <= unit.there + by <= unit.columns:
                return
            was, unit.there = unit.there == unit.columns, unit.there + by
            if (is_there := unit.there == unit.columns) != was:
                self._events.append(UnitEvent(unit.hashes, unit.parent, is_there))
            if len(self._events) > EVENTS_MAX:
                self.dropped += 1
                del self._events[0]

    def take(self) -> list[UnitEvent]:
        """The events since the last call."""
        with self._lock:
            taken, self._events = self._events, []
        return taken
