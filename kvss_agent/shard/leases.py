"""Which slots are being read, and until when at most. Pure: time is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

FOREVER = float("inf")


class Leases:
    """Slots under lease. A slot may be under several leases; it is free when the last has ended.

    A lease ends when its holder says so or when its deadline has passed, whichever is first: a reader
    that died or stalled keeps a writer away for so long and no longer.
    """

    def __init__(self) -> None:
        self.expired = 0
        self._taken = 0
        self._slots_of: dict[int, Sequence[int]] = {}
        self.uses: dict[int, int] = {}  # by slot: how many leases it is under
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._slots_of)

    def take(self, slots: Sequence[int], until: float) -> int:
        """Put these slots under a new lease; the number by which `end` knows it."""
        self._taken += 1
        self._slots_of[self._taken] = slots
        uses = self.uses
        for slot in slots:
            uses[slot] = uses.get(slot, 0) + 1
        if until != FOREVER:
            heapq.heappush(self._deadlines, (until, self._taken))
        return self._taken

    def end(self, lease: int) -> bool:
        """End a lease; False if it had ended already, by its deadline for example."""
        slots = self._slots_of.pop(lease, None)
        if slots is None:
            return False
        uses = self.uses
        for slot in slots:
            if uses[slot] == 1:
                del uses[slot]
            else:
                uses[slot] -= 1
        if len(self._deadlines) > 2 * len(self._slots_of) + 64:  # mostly of leases that have ended
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._slots_of]
            heapq.heapify(self._deadlines)
        return True

    def expire(self, now: float) -> int:
        """End the leases whose deadline has passed; how many there were."""
        count = 0
        while self._deadlines and self._deadlines[0][0] <= now:
            count += self.end(heapq.heappop(self._deadlines)[1])
        self.expired += count
        return count

    def next_deadline(self) -> float:
        """When `expire` may have something to do; FOREVER if never."""
        while self._deadlines and self._deadlines[0][1] not in self._slots_of:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else FOREVER

    def holds(self, slot: int) -> bool:
        return slot in self.uses

    def any_of(self, slots: Iterable[int]) -> bool:
        return any(slot in self.uses for slot in slots) if self.uses else False

    def any_from(self, line: int) -> bool:
        """Is any slot with this number or a higher one under lease?"""
        return any(slot >= line for slot in self.uses)
