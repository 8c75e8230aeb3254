"""Columns that siblings borrow: they keep their slots for a while.

A loan is no use of a slot: what is removed leaves at once, and the borrower finds out by the seal. It
only keeps columns from being displaced, for as long as the bytes may take to be fetched, and as long as
not too many are kept so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from swdriver_shim.cache.lookup import Lookup
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.lending import LentColumn

LOAN_SECONDS: Final = 5.0
LOANS_MAX: Final = 256  # at once; of further ones nothing is kept
PINNED_PART: Final = 8  # of a group's slots so a part at most is kept: the lender has to store as well


class Loans:
    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._loans: deque[tuple[float, list[Column], list[int]]] = deque()  # the earliest to end first
        self._pinned = [0] * len(stock.layout.groups)  # slots
        self.columns = 0  # lent since the start

    def lend(self, prompt: HasKeys, start: int, now: float) -> list[list[LentColumn]]:
        """What each group has of the prompt, for somebody who has so many columns of it."""
        self.end(now)
        lent: list[list[LentColumn]] = []
        pinned: list[Column] = []
        sizes: list[int] = []  # of each group: the slots that are pinned
        lookup = Lookup(self._stock, prompt, now)
        groups = self._stock.layout.groups
        linked = [path.fresh for path in lookup.paths if path.map.linked]
        whole = min(linked, default=len(prompt.keys))
        for path, group in zip(lookup.paths, groups, strict=True):
            first = start if path.map.linked else group.first_needed((start + 1) * COLUMN_TOKENS)
            reach = [1] * path.fresh if path.map.linked else path.reach
            found = [
                column
                for column, is_fresh in zip(path.found[first:whole], reach[first:whole], strict=False)
                if column and is_fresh
            ]
            lent.append([_lent(column, now) for column in found])
            last = found[-1:]
            pinned += last if path.map.linked else found
            # In a linked group the last column keeps all before it.
            sizes.append(sum(one.depth + 1 for one in last) if path.map.linked else len(found))
        if pinned and len(self._loans) < LOANS_MAX and self._has_room(sizes):
            self._stock.slots.pin(pinned)
            self._pinned = [one + more for one, more in zip(self._pinned, sizes, strict=True)]
            self._loans.append((now + LOAN_SECONDS, pinned, sizes))
        self.columns += sum(map(len, lent))
        return lent

    def end(self, now: float) -> None:
        """End those whose time is over."""
        while self._loans and self._loans[0][0] <= now:
            _, pinned, sizes = self._loans.popleft()
            self._stock.slots.unpin(pinned)
            self._pinned = [one - less for one, less in zip(self._pinned, sizes, strict=True)]

    def _has_room(self, sizes: Sequence[int]) -> bool:
        pools = self._stock.slots.pools
        return all(
            before + more <= pool.limit // PINNED_PART
            for before, more, pool in zip(self._pinned, sizes, pools, strict=True)
        )


def _lent(column: Column, now: float) -> LentColumn:
    return LentColumn(
        column.depth,
        column.slot,
        max(0.0, now - column.stored_at),
        max(0.0, now - column.used_at),
        column.ttl,
        column.tier2_rule,
    )
