"""Which columns are copied to tier 2, and when.

- Columns that would be displaced next are copied and then removed, so that slots are free before they
  are needed.
- Columns that were used again are copied while they stay, so that losing an agent costs less.
- Slots that have to be scrubbed are freed ahead of time as well.

Tier 2 itself knows which columns exist there. What a column notes of it (`tier2_used_at`) only saves
copying twice. `Stock.why_no_spill` says which columns stay in memory only.

The policy and the column's priority decide when it is copied whether the copy is redundant. A later
change of either copies nothing again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from swdriver_shim import loops
from swdriver_shim.cache.prefix_map import Account, Column, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import Use
from swdriver_shim.cache.stock import Stock
from swdriver_shim.policy import Tiers

RESERVE_PART: Final = 32  # of the slots, and of a quota, are free before they are needed; or, up to
RESERVE_PART_MAX: Final = 4  # this part, as many as stores have been taking at once
RESERVE_MAX: Final = 4096  # slots
BURST_DECAY: Final = 0.98  # with each store
AHEAD_AT_ONCE: Final = 1000  # columns that are checked, of those to be copied while they stay
AHEAD_MAX: Final = 100_000  # columns to be copied while they stay
_GROUP_OF: Final = attrgetter("map.group")
STALE_PART: Final = 4  # of a TTL: a column used so much later than noted in tier 2 is copied again


class Dates(NamedTuple):
    stored_at: float
    used_at: float


class ColumnCopy(NamedTuple):
    """Copy this column to tier 2; with `again` in place of the copy that exists."""

    group: int
    slot: int
    key: bytes
    tag: bytes
    tokens: int
    dates: Dates
    again: bool
    encrypted_for: str  # an org; empty for unencrypted
    redundant: bool  # as fragments on several agents


@dataclass(slots=True, eq=False)
class Spill(Use):
    """Columns to copy to tier 2. `staying` are the first of `copies`; the slots of the others are freed
    when the spill ends."""

    copies: list[ColumnCopy] = field(default_factory=list)
    staying: list[Column] = field(default_factory=list)

    @property
    def pinned(self) -> Sequence[Column]:
        return self.staying


@dataclass(slots=True)
class Spilled:
    """Columns since the start."""

    columns: int = 0
    redundant: int = 0  # of these, which agents were asked to store redundantly
    bytes: int = 0
    not_spilled: int = 0  # tier 2 had no room, or failed
    no_time: int = 0  # displaced before they could be copied


class SpillPlanner:
    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.spilled = Spilled()
        self._orgs_that_recompute: Container[str] = ()
        self._grown: dict[str, Account] = {}  # orgs with tier 2 that may be close to their quota
        self._burst = [0.0] * len(stock.layout.groups)  # slots that a store takes at once, lately
        self._ahead: deque[Column] = deque()

    @property
    def is_short_of_room(self) -> bool:
        """Whether spilling should continue now, and not at its next turn."""
        groups = range(len(self._stock.layout.groups))
        return bool(self._ahead or self._grown) or any(self._lacks(group) > 0 for group in groups)

    def used(self, account: Account, hit: Sequence[Column]) -> None:
        """These columns were used. Those used for the first time are worth a copy."""
        if account.policy.tiers is Tiers.TIER2 and len(self._ahead) < AHEAD_MAX:
            self._ahead.extend(one for one in hit if one.uses == 1 and one.tier2_used_at is None)

    def displaced(self, leaf: Column) -> None:
        """The column is about to be removed, copied or not."""
        self.spilled.no_time += self._may_copy(leaf) and leaf.tier2_used_at is None

    def stored(self, columns: list[Column]) -> None:
        """A store has taken the slots of these columns; the next ones may take as many at once."""
        maps = loops.current.runs_of(columns, "map")
        taken = Counter({maps[0].group: len(columns)} if len(maps) == 1 else map(_GROUP_OF, columns))
        for group, burst in enumerate(self._burst):
            self._burst[group] = max(burst * BURST_DECAY, taken[group])
        if columns:
            self.grown(columns[0].map.account)

    def grown(self, account: Account) -> None:
        """The org has more in memory, or a smaller quota."""
        if account.policy.dram_bytes_max is not None and account.policy.tiers is Tiers.TIER2:
            self._grown[account.org] = account

    def begin(self, now: float, most: int, orgs_that_recompute: Container[str] = ()) -> Spill | None:
        """About so many columns to copy; None if there are none. Columns that need no copy are displaced
        here. Those of `orgs_that_recompute` are not copied: computing them is faster than recalling."""
        self._orgs_that_recompute = orgs_that_recompute
        stock, spill = self._stock, Spill()
        if not stock.is_reachable:
            return None
        for _ in range(min(AHEAD_AT_ONCE, len(self._ahead))):
            if len(spill.staying) == most:
                break
            column = self._ahead.popleft()
            is_new = column.state is State.READY and column.tier2_used_at is None
            if is_new and self._may_copy(column):
                spill.staying.append(column)
                spill.copies.append(_copy(column))
        stock.slots.begin(spill, now)  # before slots are freed, so that they wait for it
        for group in range(len(stock.layout.groups)):
            self._make_reserve(group, spill, now, most)
        while self._grown and len(spill.copies) < most:
            _, account = self._grown.popitem()
            if not self._make_reserve_of(account, spill, now, most):
                self._grown[account.org] = account
                break
        if spill.copies:
            return spill
        stock.slots.end(spill)
        return None

    def finish(self, spill: Spill, copied: Sequence[bool]) -> None:
        """`copied`: which of its copies exist in tier 2 now; none beyond its length."""
        staying = [(column, column.state, column.slot) for column in spill.staying]
        if not self._stock.slots.end(spill):
            return
        deletes = self._stock.deletes
        for place, copy in enumerate(spill.copies):
            exists = place < len(copied) and copied[place]
            if exists:
                self.spilled.columns += 1
                self.spilled.redundant += copy.redundant
                self.spilled.bytes += self._stock.layout.groups[copy.group].column_bytes
                for listener in self._stock.listeners:
                    listener.copied(copy.tag, copy.key)
            else:
                self.spilled.not_spilled += 1
            if place >= len(staying):
                continue
            column, state, slot = staying[place]
            is_removed = deletes.is_purging(column.map.account) or deletes.is_deleting(
                copy.group, copy.key
            )
            if exists and state is State.READY and slot == copy.slot and not is_removed:
                column.tier2_used_at = copy.dates.used_at

    def _lacks(self, group: int) -> int:
        """How many more slots should be free, or become free soon."""
        if not self._stock.slow_orgs:
            return 0
        slots = self._stock.slots
        pool = slots.pools[group]
        reserve = max(pool.limit // RESERVE_PART, int(self._burst[group]))
        reserve = min(reserve, pool.limit // RESERVE_PART_MAX, RESERVE_MAX)
        return reserve - pool.free - slots.freeing[group]

    def _make_reserve(self, group: int, spill: Spill, now: float, most: int) -> None:
        victims = self._stock.victims(group)
        for _ in range(min(self._lacks(group), most - len(spill.copies))):
            victim = victims.next(now)
            if victim is None:
                return
            self._displace(victim, Reason.DISPLACED, spill, now)

    def _make_reserve_of(self, account: Account, spill: Spill, now: float, most: int) -> bool:
        """Bring the org below its quota, by the reserve. Whether that is done."""
        limit = account.policy.dram_bytes_max
        for _ in range(most - len(spill.copies)):
            if limit is None or account.bytes <= limit - limit // RESERVE_PART:
                return True
            victim = account.victim_of_any(now)
            if victim is None:
                return True
            self._displace(victim, Reason.QUOTA, spill, now)
        return False

    def _displace(self, victim: Column, reason: Reason, spill: Spill, now: float) -> None:
        """Remove the column. If it has to be copied first, its slot is freed when the spill ends."""
        needs_copy = self._may_copy(victim) and (victim.tier2_used_at is None or _is_stale(victim))
        if needs_copy:
            spill.copies.append(_copy(victim))
        self._stock.remove(victim, reason, idle=not needs_copy, displaced_at=now)

    def _may_copy(self, column: Column) -> bool:
        account = column.map.account
        return (
            self._stock.may_use_tier2(account)
            and account.org not in self._orgs_that_recompute
            and self._stock.why_no_spill(column) is None
            and column.map.purged_by is None
        )


def _copy(column: Column) -> ColumnCopy:
    owner = column.map
    return ColumnCopy(
        owner.group,
        column.slot,
        column.key,
        owner.account.makers[owner.namespace].tag,
        column.tokens,
        Dates(column.stored_at, column.used_at),
        column.tier2_used_at is not None,
        owner.account.encrypted_for,
        owner.account.policy.is_redundant(column.priority),
    )


def _is_stale(column: Column) -> bool:
    """Whether the copy in tier 2 would expire much too early."""
    last = column.map.account.policy.ttl_last_use_seconds
    return (
        last is not None
        and column.tier2_used_at is not None
        and column.used_at - column.tier2_used_at > last / STALE_PART
    )
