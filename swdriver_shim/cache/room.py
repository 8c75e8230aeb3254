"""Makes room: a slot is found, or somebody gives one up, at once."""

from __future__ import annotations

from typing import Final

from swdriver_shim.cache.payers import Payers
from swdriver_shim.cache.prefix_map import Column, PrefixMap
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import prune
from swdriver_shim.cache.spilling import Spilling
from swdriver_shim.cache.stock import Stock
from swdriver_shim.policy import Tiers

LOWERED_BY_MAX: Final = 500  # columns; who is further above its quota waits for the sweeper


class Room:
    def __init__(self, stock: Stock, spilling: Spilling) -> None:
        self._stock = stock
        self._spilling = spilling

    def payers(self, home: PrefixMap) -> Payers:
        """Who gives up room for columns of this map."""
        return Payers(self._stock.accounts, home.group, home.account, home.column_bytes)

    def take(
        self, home: PrefixMap, parent: Column | None, place: Column | None, payers: Payers, now: float
    ) -> int | None:
        """A slot for a column behind this one, or for this empty place; None if nobody can pay for
        it."""
        limit = home.account.policy.dram_bytes_max
        if limit is None and (slot := self._stock.slots.pools[home.group].take()) is not None:
            return slot
        held = [column for column in (parent, place) if column]  # these must not pay for it
        for column in held:
            column.holds += 1
        slot = self._make(home, payers, now)
        for column in held:
            column.holds -= 1
            if slot is None or not home.linked:  # else it is about to have another behind it, or bytes
                prune(column)
        return slot

    def _make(self, home: PrefixMap, payers: Payers, now: float) -> int | None:
        account, group, pool = home.account, home.group, self._stock.slots.pools[home.group]
        limit, coming_free = account.policy.dram_bytes_max, self._stock.slots.coming_free
        coming = coming_free[group]
        if limit is not None and account.bytes > limit + LOWERED_BY_MAX * home.column_bytes:
            return None
        while limit is not None and account.bytes + home.column_bytes > limit:
            victim = account.victim(group, now)
            if victim is None:
                return None
            self._displace(victim, Reason.QUOTA)
        while (slot := pool.take()) is None:
            if coming_free[group] > coming:
                return None  # a slot is scrubbed first: it is for whoever stores next
            victim = payers.victim(now)
            if victim is None:
                return None
            self._displace(victim, Reason.DISPLACED)
        return slot

    def enforce_quotas(self, most: int, now: float) -> int:
        """Quotas may have been lowered. How many columns had to go."""
        count = 0
        for account in self._stock.accounts.values():
            limit = account.policy.dram_bytes_max
            while count < most and limit is not None and account.bytes > limit:
                victim = account.victim_of_any(now)
                if victim is None:
                    break  # all of it is in use at the moment
                self._displace(victim, Reason.QUOTA)
                count += 1
        return count

    def _displace(self, leaf: Column, reason: Reason) -> None:
        """There is no time to copy it."""
        if leaf.home.account.policy.tiers is Tiers.TIER2:
            self._spilling.displaced(leaf)
        self._stock.remove(leaf, reason, idle=True)
