"""Promotion: which prompts are recalled from tier 2 before they are requested, by when they came back
before.

The planner remembers the last prompt of each conversation, as keys, and how long it took each time until
a longer one came, or the same one again. A prompt is promoted when keeping it is expected to yield a use
within half a minute, within a budget of bytes, into slots that are free. Then its columns stay for a
minute. Everything that holds for a recall holds for these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from swdriver_shim.cache.displacement.returns import Returns, age_of
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Account, Column, State
from swdriver_shim.cache.recalls import RECALL_AT_ONCE, Recall, RecallPlanner
from swdriver_shim.cache.request_log import HasKeys, PromptKeys, cut_keys
from swdriver_shim.cache.spills import RESERVE_MAX, RESERVE_PART_MAX
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.trails import Trail, Trails
from swdriver_shim.policy import Tiers

CHECKED_AT_ONCE: Final = 256  # trails
USES_TOLD_APART: Final = 4
INTERVALS: Final = (15.0, 60.0, 240.0)  # seconds: between these, last intervals are of one class
RATE_MIN: Final = 1 / 30  # uses per second that keeping the columns is expected to yield
MARGIN: Final = 4.0  # times what the column yields that would be displaced
HOLD_SECONDS: Final = 60.0  # promoted columns are not displaced for so long
HELD_PART: Final = 16  # of a group's slots so a part at most
BURST_SECONDS: Final = 1.0  # of the budget that may be spent at once


@dataclass(slots=True)
class Promoted:
    """Columns since the start."""

    columns: int = 0
    bytes: int = 0
    used: int = 0  # of those: a request found them in memory
    unused: int = 0  # were removed before a request came


@dataclass(slots=True)
class Hold:
    """Columns that are not displaced until then, and how many slots of each group that keeps."""

    until: float
    pinned: list[Column]
    slots: list[int]


@dataclass(slots=True)
class Budget:
    """Bytes per second. A batch may overdraw it; the next one waits until that is made good."""

    bytes_per_second: float = 0.0
    left: float = 0.0
    _at: float | None = field(default=None, init=False)

    def has_some(self, now: float) -> bool:
        if self._at is not None and now > self._at:
            most = self.bytes_per_second * BURST_SECONDS
            self.left = min(most, self.left + (now - self._at) * self.bytes_per_second)
        self._at = now if self._at is None else max(self._at, now)
        return self.left > 0


class PromotionPlanner(Listener):
    """Off until it has a budget. The caller searches tier 2 and moves the bytes."""

    def __init__(self, stock: Stock, recalls: RecallPlanner) -> None:
        self._stock = stock
        self._recalls = recalls
        self._budget = Budget()
        self._trails: Trails = stock.trails
        self._unchecked: list[Trail] = []
        self._returns = Returns([1.0] * (USES_TOLD_APART * (len(INTERVALS) + 2)), share=1)
        self._waiting: set[Column] = set()  # promoted, and not used since
        self._holds: deque[Hold] = deque()  # the earliest to end first
        self._held = [0] * len(stock.layout.groups)  # slots
        self.promoted = Promoted()

    @property
    def bytes_per_second(self) -> float:
        """The budget; 0 for off."""
        return self._budget.bytes_per_second

    def set_budget(self, bytes_per_second: float) -> None:
        """Promote at most so many bytes per second; 0 for off. Raises ValueError below 0, and for
        objects, of which nobody knows which belong together."""
        if not 0 <= bytes_per_second < math.inf:
            raise ValueError(f"a budget is a number of bytes per second, not {bytes_per_second}")
        if bytes_per_second and self._stock.layout.groups[0].alone:
            raise ValueError("objects are not promoted: nobody knows which belong together")
        was_off = not self.bytes_per_second
        self._budget = Budget(bytes_per_second, bytes_per_second * BURST_SECONDS)
        if bytes_per_second and was_off:
            self._stock.listeners.append(self)
        elif not bytes_per_second and not was_off:
            self._stock.listeners.remove(self)
            self._trails.clear()
            self._unchecked.clear()
            self._waiting.clear()
            self.end(math.inf)

    # What happens

    def requested(self, prompt: HasKeys, now: float) -> None:
        """A request asks for this prompt."""
        if not self.bytes_per_second or not prompt.keys:
            return
        found = self._trails.take(prompt.keys)
        if self._stock.account(prompt.maker.org).policy.tiers is not Tiers.TIER2:
            return
        leaf, raw_keys = prompt.keys[-1], b"".join(prompt.keys)
        if found and found.maker.tag == prompt.maker.tag:
            uses, kind = found.uses + 1, _kind(found.uses + 1, now - found.used_at)
            trail = Trail(prompt.maker, raw_keys, leaf, found.name, found.first_used_at, now, kind, uses)
        else:
            trail = Trail(prompt.maker, raw_keys, leaf, leaf, now, now, _kind(1, None))
        if self._returns.follows(trail.name):
            self._returns.used([trail.name], [trail.kind], now)
        self._trails.add(trail)

    def used(self, columns: Sequence[Column]) -> None:
        if self._waiting:
            found = self._waiting.intersection(columns)
            self._waiting -= found
            self.promoted.used += len(found)

    def removed(self, columns: Sequence[Column]) -> None:
        if self._waiting:
            found = self._waiting.intersection(columns)
            self._waiting -= found
            self.promoted.unused += len(found)

    # What to promote

    def next(self, now: float) -> PromptKeys | None:
        """The prompt to promote next, of which tier 2 is to be asked; None for now."""
        self.end(now)
        if not self.bytes_per_second or not self._stock.is_reachable or not self._budget.has_some(now):
            return None
        if not self._unchecked:
            self._unchecked = self._trails.all()
        self._returns.refresh(now)
        some = self._unchecked[-CHECKED_AT_ONCE:]
        del self._unchecked[-CHECKED_AT_ONCE:]
        expected = [(self._rate(trail, now), trail) for trail in some if self._may_promote(trail, now)]
        for rate, trail in sorted(expected, key=lambda one: -one[0]):
            if rate < RATE_MIN:
                return None
            if min(self._room(trail, now)) > 0:
                return PromptKeys(trail.maker, cut_keys(trail.raw_keys))
        return None

    def is_wanted(self, prompt: PromptKeys, now: float) -> bool:
        """Whether it has been neither requested nor purged since it came from `next`. To be asked before
        anything else is done with it: its org may have another secret by now."""
        trail = self._trails.find(prompt.keys[-1])
        return trail is not None and trail.maker is prompt.maker and self._may_promote(trail, now)

    def begin(self, prompt: PromptKeys, exists: Sequence[Collection[int]], now: float) -> list[Recall]:
        """Recalls of what exists of this prompt in tier 2, as far as there is room. `start_recall` and
        `finish_recall` have to follow for each, and then `hold`."""
        trail = self._trails.find(prompt.keys[-1])
        if trail is None or not self.is_wanted(prompt, now):
            return []
        some = self._as_much_as_fits(exists, self._room(trail, now))
        recalls = self._recalls.begin(prompt, some, now)
        taken = sum(len(recall.places) for recall in recalls)
        trail.is_tried = taken == 0 or some == [set(one) for one in exists]
        if not trail.is_tried:
            self._unchecked.append(trail)
        self._budget.left -= sum(place.column.bytes for one in recalls for place in one.places)
        return recalls

    def hold(self, recalls: Sequence[Recall], now: float) -> None:
        """The recalls have ended: columns that have arrived are not displaced for a while."""
        arrived = [
            column
            for recall in recalls
            for column, slot in recall.places
            if column.state is State.READY and column.slot == slot and not column.map.purged_by
        ]
        if not self.bytes_per_second or not arrived:
            return
        self.promoted.columns += len(arrived)
        self.promoted.bytes += sum(column.bytes for column in arrived)
        self._waiting.update(arrived)
        slots = [0] * len(self._held)
        for column in arrived:
            slots[column.group] += 1
        self._held = [one + more for one, more in zip(self._held, slots, strict=True)]
        self._stock.slots.pin(arrived)
        self._holds.append(Hold(now + HOLD_SECONDS, arrived, slots))

    def end(self, now: float) -> None:
        """Let columns go that were held for long enough."""
        while self._holds and self._holds[0].until <= now:
            hold = self._holds.popleft()
            self._stock.slots.unpin(hold.pinned)
            self._held = [one - less for one, less in zip(self._held, hold.slots, strict=True)]

    def _may_promote(self, trail: Trail, now: float) -> bool:
        """Whether the trail is current, and not in memory. The columns themselves are checked when they
        arrive."""
        account = self._stock.accounts.get(trail.maker.org)
        maker = account.makers.get(trail.maker.namespace) if account else None
        if account is None or maker is None or maker.tag != trail.maker.tag or trail.is_tried:
            return False
        if self._trails.find(trail.leaf) is not trail or not self._stock.may_use_tier2(account):
            return False
        if account.policy.expires_at(trail.first_used_at, trail.used_at, None) <= now:
            return False
        maps = account.maps.get(trail.maker.namespace)
        return not maps or not any(trail.leaf in one.columns for one in maps)

    def _rate(self, trail: Trail, now: float) -> float:
        return self._returns.rate[trail.kind][age_of(now - trail.used_at)]

    def _rate_of(self, column: Column, now: float) -> float:
        """What keeping a column in memory yields."""
        trail = self._trails.find(column.key)
        if trail:
            return self._rate(trail, now)
        return self._returns.rate[_kind(1 + column.uses, None)][age_of(now - column.used_at)]

    def _room(self, trail: Trail, now: float) -> list[int]:
        """How many slots of each group a trail may take, all of which are free. Without the reserve for
        stores, unless the column that makes up for it is worth much less."""
        account = self._stock.accounts[trail.maker.org]
        room = []
        for group, pool in enumerate(self._stock.slots.pools):
            most = pool.free - min(pool.limit // RESERVE_PART_MAX, RESERVE_MAX)
            if most <= 0 and self._is_worth_more(trail, account, group, now):
                most = pool.free // 2
            room.append(min(most, pool.limit // HELD_PART - self._held[group]))
        limit = account.policy.dram_bytes_max
        if limit is not None:
            columns = (limit - account.bytes) // sum(
                group.column_bytes for group in self._stock.layout.groups
            )
            room = [min(one, columns) for one in room]
        return room

    def _is_worth_more(self, trail: Trail, account: Account, group: int, now: float) -> bool:
        victim = self._stock.victims(group, account).next(now)
        return victim is not None and self._rate(trail, now) >= MARGIN * self._rate_of(victim, now)

    def _as_much_as_fits(self, exists: Sequence[Collection[int]], room: Sequence[int]) -> list[set[int]]:
        """What fits of these columns, by group and depth: a beginning of them in full groups; all or
        none if there are groups of another kind, which need the columns at the end."""
        groups = self._stock.layout.groups
        if all(group.linked for group in groups):
            most = min(*room, RECALL_AT_ONCE) if len(room) > 1 else min(room[0], RECALL_AT_ONCE)
            depths = sorted(set().union(*exists))[: max(0, most)]
            return [{depth for depth in one if depth in depths} for one in exists]
        fits = all(len(one) <= most for one, most in zip(exists, room, strict=True))
        return [set(one) if fits else set() for one in exists]


def _kind(uses: int, interval: float | None) -> int:
    """A class of trails: how often used, and the last interval between two uses."""
    step = 0 if interval is None else 1 + sum(interval > one for one in INTERVALS)
    return min(uses, USES_TOLD_APART) - 1 + USES_TOLD_APART * step
