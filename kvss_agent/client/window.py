"""A mapped arena in the hands of its only writer: all that an evict and a refill touch on their way.

There are two that do the same: this one, and one in compiled code (`native/window.c`), which a mover may
have. Of a column of 64 KiB, the interpreter's share is a fourth in Python and a twentieth there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from kvss_agent.client.interface import Evict
from kvss_agent.client.requests import Wanted
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard import seal
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.seal import Header, Miss


class Window(Protocol):
    """Slots up to the slot limit, and the count. `number` is that of the last evict.

    `follow` and `shut` are called under the lock, and again whenever the arena has changed.
    """

    number: int

    def follow(self, arena: Arena, /) -> None:
        """Use the slot limit and the memory of this arena from now on."""

    def shut(self) -> None:
        """Nothing goes through here ever again, and nothing is kept mapped by this."""

    def evict(
        self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview, /
    ) -> int | None:
        """`ShardClient.evict`; None, and nothing done, if the slot is leased or all is shut."""

    def evict_batch(self, columns: Sequence[Evict], /) -> int | None:
        """`ShardClient.evict_batch`; None, and nothing done, if any slot is leased or all is shut."""

    def refill(
        self, wanted: Sequence[Wanted], into: Sequence[memoryview], /
    ) -> list[Header | Miss] | None:
        """`ShardClient.refill`; None if it is shut."""


class PythonWindow:
    def __init__(
        self,
        lock: threading.Lock,
        leased: Mapping[int, int],
        words: memoryview,
        number: int,
        mover: Mover,
    ) -> None:
        """`lock` keeps evicts, leases and changes of the memory apart; `words` begin with the count."""
        self.number = number
        self._lock = lock
        self._leased = leased
        self._words = words
        # Without the price of a partial where the default is what is wanted.
        self._write = seal.write if mover is PYTHON else partial(seal.write, mover=mover)
        self._copy_out = seal.copy_out if mover is PYTHON else partial(seal.copy_out, mover=mover)
        self._arena: Arena | None = None
        self._is_shut = False

    def follow(self, arena: Arena, /) -> None:
        self._arena = None if self._is_shut else arena

    def shut(self) -> None:
        self._arena, self._is_shut = None, True

    def evict(
        self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview, /
    ) -> int | None:
        with self._lock:
            arena = self._arena
            if arena is None or (self._leased and slot in self._leased):
                return None
            number = self.number + 1
            if slot < arena.slots:
                self._write(arena.slot(slot), (key, tag, number), tokens, payload)
            self.number = self._words[0] = number
            return number

    def evict_batch(self, columns: Sequence[Evict], /) -> int | None:
        with self._lock:
            arena = self._arena
            if arena is None or self._leased:
                return None
            number, write = self.number, self._write
            try:
                for slot, key, tag, tokens, payload in columns:
                    if slot < arena.slots:
                        write(arena.slot(slot), (key, tag, number + 1), tokens, payload)
                    number += 1
            finally:
                self.number = self._words[0] = number  # once, for those that are there
            return number

    def refill(
        self, wanted: Sequence[Wanted], into: Sequence[memoryview], /
    ) -> list[Header | Miss] | None:
        if len(wanted) != len(into):
            raise ValueError("there is one place for each column")
        with self._lock:
            arena = self._arena
            if arena is None:
                return None
            line = arena.slots
            slots = [arena.slot(slot) if slot < line else None for slot, _ in wanted]
        copy_out = self._copy_out
        return [
            Miss.ABSENT if slot is None else copy_out(slot, column, place)
            for slot, (_, column), place in zip(slots, wanted, into, strict=True)
        ]


def window(
    lock: threading.Lock, leased: Mapping[int, int], words: memoryview, number: int, mover: Mover
) -> Window:
    """The fastest there is with this mover."""
    compiled = getattr(mover, "Window", None)
    if compiled is None:
        return PythonWindow(lock, leased, words, number, mover)
    made: Window = compiled(lock, leased, words, number)
    return made
