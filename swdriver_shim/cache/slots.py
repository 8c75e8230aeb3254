"""Slots: which are free, which are in use, and what has to happen before one is used again.

A displaced column is a leaf that nobody is using: its slot is free at once. The slot of a column that is
removed for another reason may be in use. It waits until every use that was under way has ended, and then
until all agents have emptied it, if none of its bytes may stay.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from swdriver_shim import loops
from swdriver_shim.cache.fair_queue import FairQueue
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.reasons import Removal

USE_SECONDS_MAX: Final = 300.0  # a use that takes longer is taken for dead


class Place(NamedTuple):
    """A column and the slot that its bytes go to."""

    column: Column
    slot: int


@dataclass(slots=True, eq=False)
class Use:
    """Something that reads or writes slots, from `Slots.begin` to `Slots.end`."""

    number: int = field(default=0, init=False)

    @property
    def pinned(self) -> Sequence[Column]:
        """Columns that must not be displaced until the use ends. Those before them stay as well."""
        return ()


class Freed(NamedTuple):
    """A slot whose column was removed. `clear`: agents have to empty it."""

    map: PrefixMap
    slot: int
    removal: Removal | None
    clear: bool


class Clear(NamedTuple):
    """Empty this slot on all agents, with zeros if `scrub`."""

    group: int
    slot: int
    scrub: bool
    removal: Removal | None
    owner: PrefixMap  # of the removed column


class Pool:
    """The slot numbers of a group. Those above the slot limit wait until it is raised again."""

    def __init__(self) -> None:
        self.limit = 0
        self.used = 0
        self.ever_used = 0  # no slot from here on was ever used
        self._free: list[int] = []
        self._above: list[int] = []
        # Whose bytes may still be in a slot that is free, or in one that is about to be overwritten.
        self._leftovers: dict[int, tuple[PrefixMap, ...]] = {}

    @property
    def free(self) -> int:
        return len(self._free) + max(0, self.limit - self.ever_used)

    def take(self) -> int | None:
        """A slot below the limit, or None if none is free."""
        if self._free:
            self.used += 1
            return self._free.pop()
        if self.ever_used < self.limit:
            self.ever_used += 1
            self.used += 1
            return self.ever_used - 1
        return None

    def take_some(self, most: int) -> list[int]:
        """Up to so many slots, in the order in which `take` returns them."""
        taken = self._free[: -most - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        unused = range(self.ever_used, max(self.ever_used, self.limit))[: most - len(taken)]
        self.ever_used += len(unused)
        taken += unused
        self.used += len(taken)
        return taken

    def put_back(self, slot: int, leftover: PrefixMap | None = None) -> None:
        """Nobody uses the slot any more. `leftover`: whose bytes are in it until it is overwritten."""
        self.used -= 1
        (self._free if slot < self.limit else self._above).append(slot)
        if leftover is not None:
            self.leave([slot], leftover)

    def leave(self, slots: list[int], leftover: PrefixMap) -> None:
        """Nobody needs the bytes of this map in these slots any more. They are there until they are
        overwritten."""
        leftovers = self._leftovers
        for slot in loops.current.put_new(leftovers, slots, (leftover,)):
            if leftover not in (before := leftovers[slot]):
                leftovers[slot] = (*before, leftover)

    def overwritten(self, slots: list[int]) -> None:
        """No agent has bytes of earlier columns in these slots any more."""
        loops.current.drop_known(self._leftovers, slots)

    def leftovers(self, belongs: Callable[[PrefixMap], bool]) -> dict[int, PrefixMap]:
        """The slots, free or not, that may have bytes of columns of such a map."""
        found = {slot: list(filter(belongs, maps)) for slot, maps in self._leftovers.items()}
        return {slot: maps[0] for slot, maps in found.items() if maps}

    def take_free(self, slots: Collection[int]) -> list[int]:
        """Take those of these slots that are free."""
        taken = [slot for slot in (*self._free, *self._above) if slot in slots]
        self._free = [slot for slot in self._free if slot not in slots]
        self._above = [slot for slot in self._above if slot not in slots]
        self.used += len(taken)
        return taken

    def adopt(self, taken: Collection[int], ever_used: int) -> None:
        """Take over the slots of an earlier driver: these are in use, of so many. Call it once,
        first."""
        self.limit = self.ever_used = ever_used
        self.used = len(taken)
        self._free = [slot for slot in range(ever_used) if slot not in taken]

    def set_limit(self, slots: int) -> None:
        self.limit = slots
        unused = [*self._free, *self._above]
        self._free = [slot for slot in unused if slot < slots]
        self._above = [slot for slot in unused if slot >= slots]


class Slots:
    """The pools of all groups, the uses under way, and the slots that agents have to empty."""

    def __init__(self, groups: int) -> None:
        self.pools = [Pool() for _ in range(groups)]
        self.freeing = [0] * groups  # slots that become free without anything more to decide
        self._uses: dict[int, tuple[float, Use]] = {}  # by number, the oldest first
        self._last_number = 0
        self._freed: deque[tuple[int, Freed]] = deque()  # each until the use of this number has ended
        self._clears: FairQueue[Clear] = FairQueue()
        self._taken: dict[tuple[int, int], Clear] = {}  # by group and slot; those being carried out
        self._removals: dict[Removal, None] = {}  # that wait for slots freed before them
        self._pinned: Counter[Column] = Counter()  # apart from uses

    # Uses

    def begin(self, use: Use, now: float) -> None:
        """The use is under way, and pins its columns."""
        self._last_number += 1
        use.number = self._last_number
        self._uses[use.number] = (now, use)
        for column in use.pinned:
            column.ref_count += 1

    def end(self, use: Use) -> bool:
        """Unpin the columns and release the slots that waited for this use only. Whether it was under
        way."""
        if self._uses.pop(use.number, None) is None:
            return False
        oldest = next(iter(self._uses), self._last_number + 1)
        while self._freed and self._freed[0][0] < oldest:
            freed = self._freed.popleft()[1]
            self.freeing[freed.map.group] -= 1
            self._release(freed)
        for column in use.pinned:
            column.ref_count -= 1
            prune(column)
        return True

    def seconds_left(self, use: Use, now: float) -> float:
        """Until the use is aborted; 0 if it is not under way any more."""
        began, _ = self._uses.get(use.number, (now - USE_SECONDS_MAX, use))
        return began + USE_SECONDS_MAX - now

    @property
    def last_use(self) -> int:
        """The number of the last use, for `have_ended`."""
        return self._last_number

    def have_ended(self, number: int) -> bool:
        """Whether all uses up to this number have ended."""
        return next(iter(self._uses), self._last_number + 1) > number

    def overdue(self, now: float) -> Iterator[Use]:
        """Uses that have taken too long. The caller has to end each before it asks for the next."""
        while self._uses and (oldest := next(iter(self._uses.values())))[0] + USE_SECONDS_MAX <= now:
            yield oldest[1]

    def pin(self, columns: Sequence[Column]) -> None:
        """Do not displace these, until `unpin`. If they are removed, their slots are free as always."""
        for column in columns:
            column.ref_count += 1
        self._pinned.update(columns)

    def unpin(self, columns: Sequence[Column]) -> None:
        self._pinned.subtract(columns)
        for column in columns:
            column.ref_count -= 1
            if not self._pinned[column]:
                del self._pinned[column]
            prune(column)

    def pins(self) -> Iterator[Column]:
        """The pinned columns, each as often as it is pinned. There may be many."""
        yield from self._pinned.elements()
        for _, use in self._uses.values():
            yield from use.pinned

    def pins_of(self, columns: Collection[Column]) -> Counter[Column]:
        """How often each of these columns is pinned."""
        found = Counter({column: self._pinned[column] for column in columns})
        for _, use in self._uses.values():
            found.update(column for column in use.pinned if column in found)
        return found

    # Slots

    def free(self, freed: Freed, *, idle: bool = False) -> None:
        """Free the slot of a removed column once no use is left. `idle`: nobody is using the slot."""
        if self._uses and not idle:
            self._freed.append((self._last_number, freed))
            self.freeing[freed.map.group] += 1
        else:
            self._release(freed)

    def is_free_at_once(self, column: Column) -> bool:
        """Whether the slot of the column can be used as soon as the column is displaced, and does not
        have to be emptied."""
        owner = column.map
        return not (owner.purged_by or owner.deletes or owner.account.policy.scrub or self._removals)

    def hand_over(self, owner: PrefixMap, slots: list[int]) -> None:
        """Displaced columns of this map were in these slots, which others have now."""
        self.pools[owner.group].leave(slots, owner)

    def _release(self, freed: Freed) -> None:
        """No use is left: the slot is free, or has to be emptied first."""
        owner, slot, removal, clear = freed
        group = owner.group
        if (
            clear
            or owner.purged_by
            or owner.account.policy.scrub
            or any((group, slot) in one.slots for one in self._removals)
        ):
            self._clear(owner, slot, removal)
        else:
            self.pools[group].put_back(slot, owner)

    def _clear(self, owner: PrefixMap, slot: int, removal: Removal | None) -> None:
        group, account = owner.group, owner.account
        self.freeing[group] += 1
        scrub = account.policy.scrub
        self._clears.put(account.org, Clear(group, slot, scrub, removal, owner), (group, scrub))

    def clear_leftovers(self, removal: Removal, belongs: Callable[[PrefixMap], bool]) -> None:
        """Have the removal include the bytes of such maps in slots that were freed before."""
        slots = [(freed.map, freed.slot) for _, freed in self._freed]
        slots += [(clear.owner, clear.slot) for clear in self.clears()]
        removal.slots = {(owner.group, slot) for owner, slot in slots if belongs(owner)}
        for group, pool in enumerate(self.pools):
            leftovers = pool.leftovers(belongs)
            free = pool.take_free(leftovers)
            for slot in free:
                removal.pending += 1
                self._clear(leftovers[slot], slot, removal)
            removal.slots |= {(group, slot) for slot in leftovers.keys() - free}  # until overwritten
        if removal.slots:
            self._removals[removal] = None

    def include(self, removal: Removal, slot: tuple[int, int]) -> None:
        """The removal is done once this slot is empty as well, which is about to be freed."""
        removal.slots.add(slot)
        self._removals[removal] = None

    def overwritten(self, group: int, slots: list[int]) -> None:
        """All agents have new bytes in these slots."""
        self.pools[group].overwritten(slots)
        if self._removals:
            for slot in slots:
                self._note_empty((group, slot))

    def take_clears(self, most: int) -> list[Clear]:
        """Slots to empty, of one group and either all scrubbed or none, from each org in turn.
        `cleared` or `retry_clears` has to follow."""
        taken = self._clears.take(most)
        self._taken.update(((clear.group, clear.slot), clear) for clear in taken)
        return taken

    def clears(self) -> Iterator[Clear]:
        """All slots to empty, those that are taken included."""
        return chain(self._clears, self._taken.values())

    def cleared(self, clears: Iterable[Clear]) -> None:
        """All agents have emptied these slots."""
        for clear in clears:
            slot = (clear.group, clear.slot)
            del self._taken[slot]
            self.freeing[clear.group] -= 1
            self.pools[clear.group].overwritten([clear.slot])
            self.pools[clear.group].put_back(clear.slot)
            if clear.removal:
                clear.removal.pending -= 1
            self._note_empty(slot)

    def retry_clears(self, clears: Sequence[Clear]) -> None:
        """These slots could not be emptied."""
        for clear in reversed(clears):
            del self._taken[clear.group, clear.slot]
            self._clears.put_back(clear.owner.account.org, clear, (clear.group, clear.scrub))

    def _note_empty(self, slot: tuple[int, int]) -> None:
        for removal in tuple(self._removals):
            removal.slots.discard(slot)
            if not removal.slots:
                del self._removals[removal]


def prune(column: Column) -> None:
    """Remove the column from its map if it is empty and unreferenced. Call it after `ref_count` has
    fallen: a column that has become a leaf is a candidate for displacement from here on."""
    leaf = column.map.prune(column)
    if leaf and leaf.state is State.READY:
        leaf.map.account.queue(leaf).leaf(leaf)
