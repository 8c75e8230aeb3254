"""What a shard knows of its slots."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Collection, Iterable, Iterator

from kvss_agent.client import Column, Wanted


class SlotTable:
    """Which evict wrote each slot, and which slots' bytes are still at the home that the shard is
    leaving. All methods need the shard's lock."""

    def __init__(self, lock: threading.RLock) -> None:
        self._numbers = array("Q")  # one more than the number of the evict; 0 where none is known
        self.at_old_home: set[int] = set()
        self._pulled: frozenset[int] = frozenset()
        self._pull_ended = threading.Condition(lock)

    def __len__(self) -> int:
        return len(self._numbers)

    # Numbers of evicts

    def reset(self, count: int) -> None:
        """Nothing is known of the slots of a new memory."""
        self._numbers = array("Q", bytes(8 * count))

    def restore(self, numbers: array[int]) -> None:
        self._numbers = numbers

    def dump(self) -> bytes:
        """All numbers, for `restore` in a later process."""
        return self._numbers.tobytes()

    def grow(self, slot: int) -> None:
        """Have room for this slot: a shard may grow."""
        if slot >= len(self._numbers):
            self._numbers.frombytes(bytes(8 * (slot + 1 - len(self._numbers))))

    def set_number(self, slot: int, number: int) -> None:
        """This evict has written the slot."""
        self._numbers[slot] = number + 1

    def clear(self, slot: int) -> None:
        """What the slot holds is unknown from now on."""
        if slot < len(self._numbers):
            self._numbers[slot] = 0

    def wanted(self, slot: int, key: bytes, tag: bytes) -> Wanted:
        """What to ask an agent for: the bytes of a slot if they are this column."""
        return Wanted(slot, Column(key, tag, self._numbers[slot] - 1))

    def is_written(self, slot: int) -> bool:
        return slot < len(self._numbers) and bool(self._numbers[slot])

    def written(self) -> list[int]:
        return [slot for slot, number in enumerate(self._numbers) if number]

    def written_after(self, number: int) -> Iterator[int]:
        """Slots at the present home that were written by later evicts than this one."""
        for slot, written in enumerate(self._numbers):
            if written - 1 > number and slot not in self.at_old_home:
                yield slot

    def last_number(self, slots: Collection[int] | None = None) -> int:
        """The highest number of an evict to these slots, or to any; 0 if none is known."""
        numbers = self._numbers if slots is None else [self._numbers[slot] for slot in slots]
        return max(0, max(numbers, default=0) - 1)

    # Pulls from the old home

    def begin_pull(self, slots: Iterable[int]) -> None:
        """Nobody may write to these slots until `end_pull`."""
        self._pulled = frozenset(slots)

    def end_pull(self) -> None:
        self._pulled = frozenset()
        self._pull_ended.notify_all()

    def wait_for_pull(self, slots: Iterable[int]) -> None:
        """Wait until no other agent is writing to these slots."""
        while self._pulled and not self._pulled.isdisjoint(slots):
            self._pull_ended.wait()
