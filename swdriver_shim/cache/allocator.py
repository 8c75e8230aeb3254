"""Allocates slots: a free one, or that of a column that is displaced at once."""

from __future__ import annotations

from typing import Final

from swdriver_shim.cache.prefix_map import Column, PrefixMap
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import prune
from swdriver_shim.cache.spills import SpillPlanner
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.victims import Victims
from swdriver_shim.policy import Tiers

DISPLACED_AT_ONCE: Final = 500  # columns; an org that is further above its quota waits for the sweeper


class SlotAllocator:
    def __init__(self, stock: Stock, spills: SpillPlanner) -> None:
        self._stock = stock
        self._spills = spills

    def victims(self, prefix_map: PrefixMap) -> Victims:
        """The columns to displace for new columns of this map."""
        account = prefix_map.account
        return self._stock.victims(prefix_map.group, account, prefix_map.column_bytes)

    def take(
        self,
        prefix_map: PrefixMap,
        parent: Column | None,
        empty: Column | None,
        victims: Victims,
        now: float,
    ) -> int | None:
        """A slot for a column behind this parent, or for this empty column; None if there is none."""
        limit = prefix_map.account.policy.dram_bytes_max
        if limit is None and (slot := self._stock.slots.pools[prefix_map.group].take()) is not None:
            return slot
        pinned = [column for column in (parent, empty) if column]  # not to be displaced for this
        for column in pinned:
            column.ref_count += 1
        slot = self._make_room(prefix_map, victims, now)
        for column in pinned:
            column.ref_count -= 1
            if slot is None or not prefix_map.linked:  # else it is about to have a child, or bytes
                prune(column)
        return slot

    def _make_room(self, prefix_map: PrefixMap, victims: Victims, now: float) -> int | None:
        account, group, slots = prefix_map.account, prefix_map.group, self._stock.slots
        limit, size, pool = account.policy.dram_bytes_max, prefix_map.column_bytes, slots.pools[group]
        freeing = slots.freeing[group]
        if limit is not None and account.bytes > limit + DISPLACED_AT_ONCE * size:
            return None
        while limit is not None and account.bytes + size > limit:
            run = account.victims(group, now)
            if not run:
                return None
            self._displace(run[0], Reason.QUOTA, now)
        while (slot := pool.take()) is None:
            if slots.freeing[group] > freeing:
                return None  # a slot is scrubbed first: the next store gets it
            victim = victims.next(now)
            if victim is None:
                return None
            self._displace(victim, Reason.DISPLACED, now)
        return slot

    def take_some(self, prefix_map: PrefixMap, most: int, victims: Victims, now: float) -> list[int]:
        """Slots for up to so many new columns, one behind the other, the first one behind a column that
        is new as well. They count as the org's from here on.

        The same slots and victims as `take` chooses for one after the other.
        """
        account, group, slots = prefix_map.account, prefix_map.group, self._stock.slots
        limit, size, pool = account.policy.dram_bytes_max, prefix_map.column_bytes, slots.pools[group]
        taken: list[int] = []
        while more := most - len(taken):
            left = more if limit is None else min(more, (limit - account.bytes) // size)  # of its quota
            some, run = list[int](), list[Column]()
            if left > 0:
                some = pool.take_some(left)
                run = [] if some else victims.run(now, left)
            elif left == 0:
                run = account.victims(group, now, more)
            if run and slots.is_free_at_once(run[0]):
                some = self._displace_run(run, Reason.DISPLACED if left else Reason.QUOTA, now)
            elif not some:
                slot = self._make_room(prefix_map, victims, now)
                if slot is None:
                    break
                some = [slot]
            taken += some
            self._stock.grown(account, group, len(some) * size)
        return taken

    def enforce_quotas(self, most: int, now: float) -> int:
        """Displace up to so many columns of orgs above their quota; returns how many."""
        count = 0
        for account in self._stock.limited.values():
            limit = account.policy.dram_bytes_max
            while count < most and limit is not None and account.bytes > limit:
                victim = account.victim_of_any(now)
                if victim is None:
                    break  # all columns are in use
                self._displace(victim, Reason.QUOTA, now)
                count += 1
        return count

    def _displace_run(self, run: list[Column], reason: Reason, now: float) -> list[int]:
        """Like `_displace` for each; the slots are the caller's."""
        if run[0].map.account.policy.tiers is Tiers.TIER2:
            for column in run:
                self._spills.displaced(column)
        return self._stock.displace(run, reason, now)

    def _displace(self, leaf: Column, reason: Reason, now: float) -> None:
        """Remove the column now, whether or not it was copied to tier 2."""
        if leaf.map.account.policy.tiers is Tiers.TIER2:
            self._spills.displaced(leaf)
        self._stock.remove(leaf, reason, idle=True, displaced_at=now)
