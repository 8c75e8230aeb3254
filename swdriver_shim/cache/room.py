"""Room: slots, who has how much of them, and who has to give some up.

Every group has a pool of slots. When it is empty, the org that is furthest above its share gives up the
column that its own eviction policy would miss least. An org that has reached its hard quota gives up its
own. Columns that are in use, or have others behind them, are never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Any

from swdriver_shim.cache.eviction import DEFAULT, POLICIES, Eviction, move
from swdriver_shim.cache.prefix_map import NO_SLOT, Column, PrefixMap, State
from swdriver_shim.cache.reasons import Tally
from swdriver_shim.cache.reuse.sample import Recorder
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.policy import Policy


def eviction(name: str) -> Callable[[], Eviction[Any]]:
    return POLICIES[DEFAULT if name == "default" else name]


class Pool:
    """The slot numbers of a group. Those above the line wait until it moves up again."""

    def __init__(self, slots: int = 0) -> None:
        self.line = slots
        self.used = 0
        self._untouched = 0  # from here on nobody has ever had one
        self._free: list[int] = []
        self._above: list[int] = []
        # Whose bytes may still lie in a slot that is free, or in one that is going to be written to.
        self._left_by: dict[int, tuple[PrefixMap, ...]] = {}

    @property
    def free(self) -> int:
        return len(self._free) + max(0, self.line - self._untouched)

    def take(self) -> int | None:
        """A slot below the line, or None if there is none."""
        if self._free:
            self.used += 1
            return self._free.pop()
        if self._untouched < self.line:
            self._untouched += 1
            self.used += 1
            return self._untouched - 1
        return None

    def give_back(self, slot: int, left_by: PrefixMap | None = None) -> None:
        """Nobody uses it any more. Somebody's bytes may lie in it until it is written to again."""
        self.used -= 1
        (self._free if slot < self.line else self._above).append(slot)
        if left_by is not None:
            before = self._left_by.get(slot, ())
            self._left_by[slot] = before if left_by in before else (*before, left_by)

    @property
    def has_leftovers(self) -> bool:
        return bool(self._left_by)

    def overwritten(self, slot: int) -> None:
        """Nothing is left in it of those who had it before, on any agent."""
        self._left_by.pop(slot, None)

    def left_by(self, is_meant: Callable[[PrefixMap], bool]) -> dict[int, PrefixMap]:
        """The slots in which such bytes may still lie, free or not."""
        found = {slot: list(filter(is_meant, homes)) for slot, homes in self._left_by.items()}
        return {slot: homes[0] for slot, homes in found.items() if homes}

    def take_these(self, slots: Collection[int]) -> list[int]:
        """Those of these slots that are free; they are in use again."""
        taken = [slot for slot in (*self._free, *self._above) if slot in slots]
        self._free = [slot for slot in self._free if slot not in slots]
        self._above = [slot for slot in self._above if slot not in slots]
        self.used += len(taken)
        return taken

    @property
    def had(self) -> int:
        """All slots that anybody has ever had are below this."""
        return self._untouched

    def adopt(self, taken: Collection[int], had: int) -> None:
        """A pool that nobody has used yet goes on from another's: these are in use, of so many."""
        self.line = self._untouched = had
        self.used = len(taken)
        self._free = [slot for slot in range(had) if slot not in taken]

    def set_line(self, slots: int) -> None:
        """From now on only slots below this line are given out."""
        self.line = slots
        here = [*self._free, *self._above]
        self._free = [slot for slot in here if slot < slots]
        self._above = [slot for slot in here if slot >= slots]

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Raise RuntimeError unless these are the slots that are in use."""
        slots = [*taken, *self._free, *self._above]
        if sorted(slots) != list(range(self._untouched)):
            raise RuntimeError("each slot is in use once, or free")
        if len(slots) - len(self._free) - len(self._above) != self.used:
            raise RuntimeError("the slots in use are counted")


@dataclass(slots=True)
class Expired:
    """What of an org was over, in columns by tier; and how long some lay in memory beyond that, never
    served."""

    dram: int = 0
    tier2: int = 0
    overstay_seconds_max: float = 0.0


class Account:
    """One org: its policy, its columns, what they take, what it asked for and got."""

    def __init__(self, org: str, groups: int) -> None:
        self.org = org
        self.policy = Policy()
        self.maps: dict[Namespace, list[PrefixMap]] = {}  # one for each group
        self.makers: dict[Namespace, Keys] = {}
        self.purged: list[PrefixMap] = []  # not found any more, and not yet taken apart
        self.bytes = 0
        self.group_bytes = [0] * groups
        self.tally = Tally()
        self.expired = Expired()
        self.recorder = Recorder()
        self._queues: list[dict[int, Eviction[Column]]] = [{} for _ in range(groups)]

    def set_policy(self, policy: Policy, now: float) -> None:
        """From now on, for what is stored already, too."""
        before, self.policy = self.policy, policy
        if self.policy.eviction == before.eviction:
            return
        for group, queues in enumerate(self._queues):
            for priority in queues:
                fresh = queues[priority] = eviction(self.policy.eviction)()
                move(self._queued(group, priority), fresh, now)

    def columns(self, group: int) -> Iterable[Column]:
        maps = [maps[group] for maps in self.maps.values()]
        maps += [one for one in self.purged if one.group == group]
        return chain.from_iterable(one.columns.values() for one in maps)

    def forget_empty_maps(self) -> None:
        for namespace in [one for one, maps in self.maps.items() if not any(map(len, maps))]:
            del self.maps[namespace], self.makers[namespace]

    def _queued(self, group: int, priority: int) -> list[Column]:
        ready = (one for one in self.columns(group) if one.state is State.READY)
        return [one for one in ready if one.priority == priority]

    def queue(self, column: Column) -> Eviction[Column]:
        """Where a column waits for its eviction."""
        queues = self._queues[column.home.group]
        found = queues.get(column.priority)
        if found is None:
            found = queues[column.priority] = eviction(self.policy.eviction)()
        return found

    def victim(self, group: int, now: float) -> Column | None:
        """What this org would miss least: of the lowest priority, by its eviction policy."""
        queues = self._queues[group]
        for priority in sorted(queues):
            if found := queues[priority].victim(now):
                return found
        return None

    def check_integrity(self) -> None:
        self.tally.check_integrity()
        for group, queues in enumerate(self._queues):
            for priority, queue in queues.items():
                queue.check_integrity(self._queued(group, priority))
            held = sum(one.bytes for one in self.columns(group) if one.slot != NO_SLOT)
            if held != self.group_bytes[group]:
                raise RuntimeError(f"{self.org} has {held} bytes, not {self.group_bytes[group]}")
        if sum(self.group_bytes) != self.bytes:
            raise RuntimeError("the bytes of the groups are those of the org")


class Payers:
    """Who gives room up while an org stores: whoever would be furthest above its share, then the next.

    Only what the storing org has grows meanwhile. So the others are put in order once, when room is
    needed, and looked at again as they come to the front.
    """

    __slots__ = ("_accounts", "_group", "_more", "_others", "_storing", "_turn")

    def __init__(
        self,
        accounts: Mapping[str, Account],
        group: int,
        storing: Account | None = None,
        more: int = 0,
    ) -> None:
        """`more`: what the storing org will have then, in bytes."""
        self._accounts = accounts
        self._group = group
        self._storing = self._turn = storing
        self._more = more
        self._others: list[tuple[float, int, Account]] | None = None

    def victim(self, now: float) -> Column | None:
        """What goes next; None if nobody has anything to give."""
        if self._others is None:
            self._others = self._in_order()
        others = self._others
        while others or self._turn:
            if self._turn and (not others or -self._excess(self._turn) <= others[0][0]):
                if victim := self._turn.victim(self._group, now):
                    return victim
                self._turn = None
                continue
            rank, number, account = others[0]
            if rank != -self._excess(account):
                heapreplace(others, (-self._excess(account), number, account))
            elif victim := account.victim(self._group, now):
                return victim
            else:
                heappop(others)
        return None

    def _in_order(self) -> list[tuple[float, int, Account]]:
        others = [
            (-self._excess(account), number, account)
            for number, account in enumerate(self._accounts.values())
            if account is not self._storing and account.group_bytes[self._group]
        ]
        heapify(others)
        return others

    def _excess(self, account: Account) -> float:
        more = self._more if account is self._storing else 0
        return (account.group_bytes[self._group] + more) / account.policy.share
