"""Shards that leave an agent, and those that have left columns in front."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from kvss_agent.tier2.address import Address, Part, part_of
from kvss_agent.tier2.front.disk import FrontDisk
from kvss_agent.tier2.front.faults import BEHIND
from kvss_agent.tier2.front.flushes import Flushes
from telemetry.units import counted

log = logging.getLogger(__name__)

CLEARED: Final = 1000  # copies of a shard that has left that are removed at once
GIVE_UP_SECONDS: Final = 600.0  # without progress; then what waits of a shard that left is dropped
ASKED_SECONDS: Final = 60.0  # whoever asks for that does so at least as often


@dataclass(slots=True)
class Leaving:
    """What waits of a shard that leaves. Times are of the monotonic clock."""

    addresses: set[Address]
    since: float  # none of it was copied behind
    asked_at: float


class Departures:
    def __init__(self, disk: FrontDisk, flushes: Flushes) -> None:
        self._disk, self._flushes = disk, flushes
        self._contents = disk.contents
        self._leaving: dict[Part, Leaving] = {}
        self._attended: frozenset[Part] | None = None  # None: nobody has said which shards there are
        self._left: set[Part] = set()  # those with columns here that the agent does not have

    def attend(self, parts: Collection[Part]) -> None:
        """The agent has these shards."""
        with self._disk.lock:
            self._attended = frozenset(parts)
            self.find_left()

    def has_left(self, part: Part) -> bool:
        """With the lock held: whether the agent is known not to have this shard."""
        return self._attended is not None and part not in self._attended

    def find_left(self) -> None:
        """With the lock held: which shards the agent does not have, of those with columns here."""
        if self._attended is not None:
            self._left = self._contents.parts() - self._attended

    def orphaned(self) -> set[Part]:
        """With the lock held. What was on its way here when its shard left is found while it waits."""
        if self._attended is not None:
            self._left |= set(map(part_of, self._contents.lone)) - self._attended
        return self._left

    @property
    def orphans(self) -> int:
        """How many columns are here of shards that the agent does not have."""
        with self._disk.lock:
            left = self.orphaned()
            return sum(part_of(one) in left for one in self._contents.addresses()) if left else 0

    def flush_orphaned(self) -> None:
        with self._disk.lock:
            orphaned = sorted(self.orphaned())
        for part in orphaned:
            self.flush(part)

    def flush(self, part: Part) -> int:
        """See `Fronted.flush`."""
        now = time.monotonic()
        with self._disk.lock:
            waiting = {one for one in self._contents.lone if part_of(one) == part}
            leaving = self._leaving.get(part)
            if leaving is None or now > leaving.asked_at + ASKED_SECONDS:  # it left at another time
                leaving = self._leaving[part] = Leaving(waiting, now, now)
            leaving.asked_at = now
            left = leaving.addresses & waiting
            if len(left) < len(leaving.addresses):
                leaving.addresses, leaving.since = left, now
            is_over = now > leaving.since + GIVE_UP_SECONDS
            ordered = [one for one in self._contents.lone if one in left]
        if not left:
            return self._clear_copies(part)
        if is_over:
            dropped = sum(map(self._disk.drop, ordered))
            with self._disk.lock:
                self._disk.counts["given up"] += dropped
            log.warning(
                "%s: %s of %s dropped, since its shard has left and none could be copied",
                *(BEHIND, counted(dropped, "column"), part[1]),
            )
            return len(left) - dropped
        self._flushes.begin_some(ordered)
        return len(left)

    def _clear_copies(self, part: Part) -> int:
        """Remove the copies of a shard that leaves, some at a time. How many are left."""
        with self._disk.lock:
            promoted = [one for one in self._contents.promotions if part_of(one) == part]
            free = [one for one in promoted if self._disk.claims.is_free(one)]
            for address in free:
                self._contents.drop_promotion(address)
            copies = [
                one
                for one in self._contents.addresses()
                if part_of(one) == part and one not in self._contents.lone
            ]
        left = len(promoted) - len(free) + len(copies) - sum(map(self._disk.drop, copies[:CLEARED]))
        if not left:
            with self._disk.lock:
                self._leaving.pop(part, None)
                self._left.discard(part)
        return left
