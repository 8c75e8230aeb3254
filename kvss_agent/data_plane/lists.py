"""Lists of the columns of a shard in tier 2, read page by page. A list is made when its first page is
asked for, and stays as it is for the pages that follow."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.store import Tier2

KEPT_SECONDS: Final = 60.0  # for who reads on
FIRST: Final = (bytes(16), bytes(16))  # before all columns

Entry = tuple[bytes, bytes, int, int]  # key, tag, bytes, seconds since 1970
Place = tuple[bytes, bytes]  # tag and key
List = tuple[list[Place], list[Entry]]
_Key = tuple[Tier2, bytes, str]


class Lists:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._kept: dict[_Key, List] = {}
        self._making: dict[_Key, asyncio.Task[List]] = {}
        self._one_at_a_time = asyncio.Lock()  # a store may have a million columns

    async def of(
        self, store: Tier2, namespace: bytes, part: str, after: Place, most: int
    ) -> list[Entry]:
        """The columns of this part that follow this place, in the order of tag and key."""
        key = store, namespace, part
        kept = None if after == FIRST else self._kept.get(key)
        if kept is None:
            making = self._making.get(key)
            if making is None:
                making = self._making[key] = asyncio.create_task(self._made(*key))
                making.add_done_callback(lambda _: self._making.pop(key, None))
            kept = self._kept[key] = await asyncio.shield(making)
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop, key, kept)
        places, entries = kept
        start = bisect_right(places, after)
        return entries[start : start + most]

    async def _made(self, store: Tier2, namespace: bytes, part: str) -> List:
        async with self._one_at_a_time:
            return await asyncio.to_thread(_sorted, await store.listed(namespace, part))

    def _drop(self, key: _Key, kept: List) -> None:
        if self._kept.get(key) is kept:
            del self._kept[key]


def _sorted(listed: Sequence[tuple[Address, int, float]]) -> List:
    mine = sorted(listed, key=lambda one: (one[0].tag, one[0].key))
    places = [(address.tag, address.key) for address, _, _ in mine]
    entries = [(address.key, address.tag, size, max(0, int(written))) for address, size, written in mine]
    return places, entries
