"""What is copied to tier 2, and when: before room is short, the columns that would go next.

They are given up then. Those that were used again are copied while they stay, so that the loss of an
agent costs less. Slots that have to be scrubbed are given up ahead of time as well.

Tier 2 itself knows what it has, and is asked. What a column notes of it (`kept_at`) saves copying twice,
and no more than that depends on it. A tail, and a column with a time to live of its own, stay in memory
only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from swdriver_shim.cache.payers import Payers
from swdriver_shim.cache.prefix_map import Account, Column, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.slots import Place, Use
from swdriver_shim.cache.stock import Stock
from swdriver_shim.policy import Tiers

RESERVE_PART: Final = 32  # of the slots, and of a quota, are free before they are needed; or, up to
RESERVE_PART_MAX: Final = 4  # this part, as many as stores have been taking at once
RESERVE_MAX: Final = 4096  # slots
BURST_FADES: Final = 0.98  # with each store
LOOK_AT: Final = 1000  # of the columns that wait to be copied while they stay, in one go
STALE_PART: Final = 4  # of a time to live: what was used so much later than noted is noted anew
AHEAD_MAX: Final = 100_000  # columns that wait to be copied while they stay


class Dates(NamedTuple):
    stored_at: float
    used_at: float


class Leaving(NamedTuple):
    """Copy this column to tier 2; `again`: in place of the copy that is there."""

    group: int
    slot: int
    key: bytes
    tag: bytes
    tokens: int
    dates: Dates
    again: bool
    encrypted_for: str  # an org; empty for in the clear


@dataclass(slots=True, eq=False)
class Spill(Use):
    """To be copied to tier 2. Some stay in memory; the slots of the others are given up then."""

    leaving: list[Leaving] = field(default_factory=list)
    staying: list[Column] = field(default_factory=list)  # the first of `leaving`

    @property
    def held(self) -> Sequence[Column]:
        return self.staying


@dataclass(slots=True)
class Spilled:
    """Columns since the start."""

    columns: int = 0
    bytes: int = 0
    not_spilled: int = 0  # tier 2 had no room, or failed
    no_time: int = 0  # displaced at once: room was needed sooner than it could be copied


class Spilling:
    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self.spilled = Spilled()
        self.not_worth_it: Collection[str] = ()  # orgs for which computing anew is always faster
        self._grown: dict[str, Account] = {}  # with a tier 2: may be close to their quota
        self._burst = [0.0] * len(stock.layout.groups)  # slots that a store takes at once, lately
        self._ahead: deque[Column] = deque()

    @property
    def is_short_of_room(self) -> bool:
        """Spilling should go on now, not when it is the next turn."""
        groups = range(len(self._stock.layout.groups))
        return bool(self._ahead or self._grown) or any(self._lacks(group) > 0 for group in groups)

    def used(self, account: Account, hit: Sequence[Column]) -> None:
        """These were asked for. What was so for the first time is worth a copy."""
        if account.policy.tiers is Tiers.TIER2 and len(self._ahead) < AHEAD_MAX:
            self._ahead.extend(column for column in hit if column.uses == 1 and column.kept_at is None)

    def displaced(self, leaf: Column) -> None:
        """It goes at once, copied or not."""
        self.spilled.no_time += self._may_keep(leaf) and leaf.kept_at is None

    def stored(self, places: Sequence[Place]) -> None:
        """A store has taken slots; the next ones may take as many at once."""
        taken = Counter(place.column.home.group for place in places)
        for group, burst in enumerate(self._burst):
            self._burst[group] = max(burst * BURST_FADES, taken[group])
        if places:
            self.grown(places[0].column.home.account)

    def grown(self, account: Account) -> None:
        """It has more in memory, or may have less."""
        if account.policy.dram_bytes_max is not None and account.policy.tiers is Tiers.TIER2:
            self._grown[account.org] = account

    def begin(self, now: float, most: int) -> Spill | None:
        """About so many columns to copy now; None if there are none. `finish` has to follow.

        Slots are given up here where nothing has to be copied.
        """
        stock, spill = self._stock, Spill()
        if not stock.reachable:
            return None
        for _ in range(min(LOOK_AT, len(self._ahead))):
            if len(spill.staying) == most:
                break
            column = self._ahead.popleft()
            is_there = column.state is State.READY and column.kept_at is None
            if is_there and self._may_keep(column):
                spill.staying.append(column)
                spill.leaving.append(self._leaving(column))
        stock.slots.begin(spill, now)  # before slots are given up: so they wait for it
        for group in range(len(stock.layout.groups)):
            self._make_reserve(group, spill, now, most)
        while self._grown and len(spill.leaving) < most:
            _, account = self._grown.popitem()
            if not self._make_reserve_of(account, spill, now, most):
                self._grown[account.org] = account
                break
        if spill.leaving:
            return spill
        stock.slots.end(spill)
        return None

    def finish(self, spill: Spill, kept: Sequence[bool]) -> None:
        """Which of those that were leaving tier 2 has now; none of those that are not told of."""
        staying = [(column, column.state, column.slot) for column in spill.staying]
        if not self._stock.slots.end(spill):
            return
        forgetting = self._stock.forgetting
        for place, one in enumerate(spill.leaving):
            is_kept = place < len(kept) and kept[place]
            if is_kept:
                self.spilled.columns += 1
                self.spilled.bytes += self._stock.layout.groups[one.group].column_bytes
            else:
                self.spilled.not_spilled += 1
            if place >= len(staying):
                continue
            column, state, slot = staying[place]
            is_removed = forgetting.is_closed(column.home.account) or forgetting.is_forgetting(
                one.group, one.key
            )
            if is_kept and state is State.READY and slot == one.slot and not is_removed:
                column.kept_at = one.dates.used_at

    def _lacks(self, group: int) -> int:
        """How many slots more should be free, or be so soon."""
        slots = self._stock.slots
        pool = slots.pools[group]
        if not self._stock.slow_orgs:
            return 0
        reserve = max(pool.line // RESERVE_PART, int(self._burst[group]))
        reserve = min(reserve, pool.line // RESERVE_PART_MAX, RESERVE_MAX)
        return reserve - pool.free - slots.coming_free[group]

    def _make_reserve(self, group: int, spill: Spill, now: float, most: int) -> None:
        payers = Payers(self._stock.accounts, group)
        for _ in range(min(self._lacks(group), most - len(spill.leaving))):
            victim = payers.victim(now)
            if victim is None:
                return
            self._give_up(victim, Reason.DISPLACED, spill)

    def _make_reserve_of(self, account: Account, spill: Spill, now: float, most: int) -> bool:
        """Below its quota, where it has one. Whether it is done with."""
        limit = account.policy.dram_bytes_max
        for _ in range(most - len(spill.leaving)):
            if limit is None or account.bytes <= limit - limit // RESERVE_PART:
                return True
            victim = account.victim_of_any(now)
            if victim is None:
                return True
            self._give_up(victim, Reason.QUOTA, spill)
        return False

    def _give_up(self, victim: Column, reason: Reason, spill: Spill) -> None:
        """Its slot is free once it has been copied, if it has to be."""
        has_to = self._may_keep(victim) and (victim.kept_at is None or _is_stale(victim))
        if has_to:
            spill.leaving.append(self._leaving(victim))
        self._stock.remove(victim, reason, idle=not has_to)

    def _leaving(self, column: Column) -> Leaving:
        home = column.home
        return Leaving(
            home.group,
            column.slot,
            column.key,
            home.account.makers[home.namespace].tag,
            column.tokens,
            Dates(column.stored_at, column.used_at),
            column.kept_at is not None,
            home.account.encrypted_for,
        )

    def _may_keep(self, column: Column) -> bool:
        home = column.home
        return (
            self._stock.may_use_tier2(home.account)
            and home.account.org not in self.not_worth_it
            and not column.tail
            and column.ttl is None
            and home.purged_by is None
        )


def _is_stale(column: Column) -> bool:
    """Tier 2 would take it for older than it is, and let it expire too early."""
    last = column.home.account.policy.ttl_last_use_seconds
    return (
        last is not None
        and column.kept_at is not None
        and column.used_at - column.kept_at > last / STALE_PART
    )
