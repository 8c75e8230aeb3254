"""Lists of the columns of a shard in tier 2, read page by page. A list is made when its first page is
asked for, and stays as it is for the pages that follow."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from typing import Final

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.store import Tier2

KEPT_SECONDS: Final = 60.0  # for who reads on
KEPT_MAX: Final = 8
FIRST: Final = (bytes(16), bytes(16))  # before all columns

Entry = tuple[bytes, bytes, int, int]  # key, tag, bytes, seconds since 1970
Place = tuple[bytes, bytes]  # tag and key


class Lists:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Tier2, bytes, str], tuple[float, list[Place], list[Entry]]] = {}

    async def of(
        self, store: Tier2, namespace: bytes, part: str, after: Place, most: int
    ) -> list[Entry]:
        """The columns of this part that follow this place, in the order of tag and key."""
        now = time.monotonic()
        for old in [one for one, (at, *_) in self._kept.items() if now - at > KEPT_SECONDS]:
            del self._kept[old]
        key = store, namespace, part
        kept = None if after == FIRST else self._kept.get(key)
        if kept is None:
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            places, entries = await asyncio.to_thread(_sorted, store.listed(), namespace, part)
            kept = self._kept[key] = now, places, entries
        _, places, entries = kept
        start = bisect_right(places, after)
        return entries[start : start + most]


def _sorted(
    listed: list[tuple[Address, int, float]], namespace: bytes, part: str
) -> tuple[list[Place], list[Entry]]:
    mine = [one for one in listed if one[0].namespace == namespace and one[0].shard == part]
    mine.sort(key=lambda one: (one[0].tag, one[0].key))
    places = [(address.tag, address.key) for address, _, _ in mine]
    entries = [(address.key, address.tag, size, int(written)) for address, size, written in mine]
    return places, entries
