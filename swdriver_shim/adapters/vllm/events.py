"""What vLLM's KV events tell of: units that can be loaded from here on, and those that can't any more.

Whoever routes requests to engines follows these. They know blocks by vLLM's hashes, and the ledger knows
columns by keys; so a request that has both gives its units their names. A unit is there when all of its
columns of the first group are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from swdriver_shim.cache.prefix_map import Column

UNITS_MAX: Final = 1 << 20  # that have names; the oldest are forgotten, and no more told of
NEWS_MAX: Final = 1 << 16  # that nobody has taken yet; then the oldest are dropped, and counted


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


class UnitEvents:
    """Told by the ledger, from any thread and under its lock; taken by the engine."""

    def __init__(self, unit_tokens: int, hash_tokens: int) -> None:
        """`hash_tokens`: so many have one hash of vLLM's."""
        self.hash_tokens = hash_tokens
        self.dropped = 0
        self._hashes = unit_tokens // hash_tokens
        self._units: OrderedDict[bytes, Unit] = OrderedDict()  # by the key of each column
        self._news: list[UnitEvent] = []
        self._lock = threading.Lock()

    def name(self, unit: int, keys: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """These are the columns of a prompt's unit, and these the hashes of all its blocks."""
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

    def arrived(self, column: Column) -> None:
        self._count(column, 1)

    def removed(self, column: Column) -> None:
        self._count(column, -1)

    def _count(self, column: Column, by: int) -> None:
        if column.group:
            return
        with self._lock:
            unit = self._units.get(column.key)
            if unit is None or not 0 <= unit.there + by <= unit.columns:
                return
            was, unit.there = unit.there == unit.columns, unit.there + by
            if (is_there := unit.there == unit.columns) != was:
                self._news.append(UnitEvent(unit.hashes, unit.parent, is_there))
            if len(self._news) > NEWS_MAX:
                self.dropped += 1
                del self._news[0]

    def take(self) -> list[UnitEvent]:
        """All since the last time."""
        with self._lock:
            taken, self._news = self._news, []
        return taken
