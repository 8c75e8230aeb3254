"""Copying to the front what has been read from behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvss_agent.tier2.address import Address, part_of
from kvss_agent.tier2.backend import Outgoing
from kvss_agent.tier2.column_file import plausible
from kvss_agent.tier2.front.departures import Departures
from kvss_agent.tier2.front.disk import FrontDisk
from kvss_agent.tier2.front.workers import Workers

PROMOTED_BYTES_MAX: Final = 64 << 20  # in memory, on their way to the front; no more is copied then


class Promotions:
    def __init__(self, disk: FrontDisk, departures: Departures, workers: Workers) -> None:
        self._disk, self._departures, self._workers = disk, departures, workers
        self._contents = disk.contents

    def begin(self, address: Address, parts: Sequence[memoryview], size: int) -> None:
        """The bytes are copied before this returns, and without the lock: they are many. The column may
        be removed meanwhile, and its promotion with it."""
        with self._disk.lock:
            if not self._has_room(address, size):
                return
            promotion = self._contents.begin_promotion(address, size)
        try:
            promotion.content = _first(parts, size)
        finally:
            with self._disk.lock:
                is_wanted = self._contents.promotions.get(address) is promotion
                if is_wanted and promotion.content is None:  # there is no memory for it
                    self._contents.drop_promotion(address)
        if is_wanted:
            self._workers.submit(self._put, address)

    def _has_room(self, address: Address, size: int) -> bool:
        """With the lock held: it is not here, nobody changes it, and there is memory for it. Copies of
        shards that have left are of no use."""
        return (
            self._contents.promoting_bytes + size <= PROMOTED_BYTES_MAX
            and plausible(size)
            and size <= self._contents.index.caps.total
            and address not in self._contents.promotions
            and not self._contents.index.knows(address)
            and self._disk.claims.is_free(address)
            and not self._departures.has_left(part_of(address))
        )

    def _put(self, address: Address) -> None:
        is_there = False
        with self._disk.lock:
            promotion = self._contents.promotions.get(address)
            if promotion is None or promotion.content is None:
                return  # it was purged or deleted meanwhile, and perhaps read again
            if not self._disk.claims.take([address]):
                self._contents.drop_promotion(address)
                return
        try:
            file = Outgoing(address.name, [promotion.content], lambda: True)
            is_there = self._disk.put([file], waits=False).get(0) is True
        finally:
            with self._disk.lock:
                self._disk.counts["promoted"] += is_there
                self._contents.drop_promotion(address)
                self._disk.claims.release([address])


def _first(parts: Sequence[memoryview], size: int) -> memoryview:
    """So many bytes of these, in memory of their own."""
    found = bytearray(size)
    filled = 0
    for part in parts:
        piece = part[: size - filled]
        found[filled : filled + len(piece)] = piece
        filled += len(piece)
    return memoryview(found)
