"""What keeps slots safe: none is given to somebody else while it is read, written or not yet emptied.

A column that is displaced is a leaf that nobody is using: its slot is free at once. One that goes
for another reason may be in use. Its slot waits until every use that was under way has ended, and then,
if nothing of it may stay, until all agents have emptied it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from swdriver_shim.cache.pool import Pool
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.removal import Removal
from swdriver_shim.cache.rounds import Rounds

USE_SECONDS_MAX: Final = 300.0  # who takes longer is taken for dead


class Place(NamedTuple):
    """This column belongs into this slot."""

    column: Column
    slot: int


@dataclass(slots=True, eq=False)
class Use:
    """Something that reads or writes slots, from `begin` to `end`."""

    number: int = field(default=0, init=False)

    @property
    def held(self) -> Sequence[Column]:
        """Columns that stay as long as it is under way, and with them all before them."""
        return ()


class Freed(NamedTuple):
    """A slot whose column has gone, and what has to happen to it."""

    home: PrefixMap
    slot: int
    removal: Removal | None
    clear: bool


class Clear(NamedTuple):
    """Empty this slot on all agents, with zeros if `scrub`."""

    group: int
    slot: int
    scrub: bool
    removal: Removal | None


class Slots:
    """The pools of all groups, who uses slots, and what has to happen before they are used again."""

    def __init__(self, groups: int) -> None:
        self.pools = [Pool() for _ in range(groups)]
        self._uses: dict[int, tuple[float, Use]] = {}  # what is under way, oldest first
        self._numbers = 0
        self._limbo: deque[tuple[int, Freed]] = deque()  # until this use has ended
        self._clears: Rounds[Clear] = Rounds()
        self._clearing: dict[tuple[int, int], PrefixMap] = {}
        self._removals: list[Removal] = []  # those that wait for what others had removed before
        self.coming_free = [0] * groups  # slots that will be, without anybody doing more about it

    # Uses

    def begin(self, use: Use, now: float) -> None:
        """It is under way, and holds its columns."""
        self._numbers += 1
        use.number = self._numbers
        self._uses[use.number] = (now, use)
        for column in use.held:
            column.holds += 1

    def end(self, use: Use) -> bool:
        """Whether it was under way. Slots that waited for it, and for none before it, are free."""
        if self._uses.pop(use.number, None) is None:
            return False
        oldest = next(iter(self._uses), self._numbers + 1)
        while self._limbo and self._limbo[0][0] < oldest:
            freed = self._limbo.popleft()[1]
            self.coming_free[freed.home.group] -= 1
            self._let_go(freed)
        for column in use.held:
            column.holds -= 1
            prune(column)
        return True

    def seconds_left(self, use: Use, now: float) -> float:
        """Until it is given up; 0 if it is not under way any more."""
        began, _ = self._uses.get(use.number, (now - USE_SECONDS_MAX, use))
        return began + USE_SECONDS_MAX - now

    @property
    def moment(self) -> int:
        """What is under way now will have ended when `is_over` says so of this."""
        return self._numbers

    def is_over(self, moment: int) -> bool:
        return next(iter(self._uses), self._numbers + 1) > moment

    def overdue(self, now: float) -> Iterator[Use]:
        """Those that have to be ended, since nobody else is going to."""
        while self._uses and (oldest := next(iter(self._uses.values())))[0] + USE_SECONDS_MAX <= now:
            yield oldest[1]

    def pins(self) -> Iterator[Column]:
        """The columns that uses hold, each as often as it is held."""
        for _, use in self._uses.values():
            yield from use.held

    # Slots

    def free(self, freed: Freed, *, idle: bool = False) -> None:
        """Its column has gone. `idle`: nobody is using the slot."""
        if self._uses and not idle:
            self._limbo.append((self._numbers, freed))
            self.coming_free[freed.home.group] += 1
        else:
            self._let_go(freed)

    def _let_go(self, freed: Freed) -> None:
        """Nobody uses this slot any more. It is free, or once it has been emptied."""
        home, slot, removal, clear = freed
        if clear or home.purged_by or home.account.policy.scrub or self._is_awaited(home.group, slot):
            self._clear(home, slot, removal)
        else:
            self.pools[home.group].give_back(slot, home)

    def _is_awaited(self, group: int, slot: int) -> bool:
        return any((group, slot) in removal.earlier for removal in self._removals)

    def _clear(self, home: PrefixMap, slot: int, removal: Removal | None) -> None:
        group, account = home.group, home.account
        self._clearing[group, slot] = home
        self.coming_free[group] += 1
        scrub = account.policy.scrub
        self._clears.put(account.org, Clear(group, slot, scrub, removal), (group, scrub))

    def remove_rest(self, removal: Removal, is_meant: Callable[[PrefixMap], bool]) -> None:
        """The removal is also of what lies in slots that were given up before."""
        slots = [(freed.home, freed.slot) for _, freed in self._limbo]
        slots += [(home, slot) for (_, slot), home in self._clearing.items()]
        removal.earlier = {(home.group, slot) for home, slot in slots if is_meant(home)}
        for group, pool in enumerate(self.pools):
            left = pool.left_by(is_meant)
            free = pool.take_these(left)
            for slot in free:
                removal.waiting += 1
                self._clear(left[slot], slot, removal)
            removal.earlier |= {(group, slot) for slot in left.keys() - free}  # until it is written to
        if removal.earlier:
            self._removals.append(removal)

    def has_leftovers(self, group: int) -> bool:
        """Whether it matters that slots are overwritten."""
        return bool(self.pools[group].has_leftovers or self._removals)

    def overwritten(self, group: int, slot: int) -> None:
        """All agents have something new there."""
        self.pools[group].overwritten(slot)
        if self._removals:
            self._happened_to((group, slot))

    def take_clears(self, most: int) -> list[Clear]:
        """Slots to be emptied, those of one group and kind together, of each org in turn. `cleared` has
        to follow."""
        return self._clears.take(most)

    def cleared(self, clears: Iterable[Clear]) -> None:
        """Nothing is left in these slots, on any agent."""
        for clear in clears:
            slot = (clear.group, clear.slot)
            del self._clearing[slot]
            self.coming_free[clear.group] -= 1
            self.pools[clear.group].overwritten(clear.slot)
            self.pools[clear.group].give_back(clear.slot)
            if clear.removal:
                clear.removal.waiting -= 1
            self._happened_to(slot)

    def _happened_to(self, slot: tuple[int, int]) -> None:
        """Removals that waited for it do not any more."""
        for removal in self._removals:
            removal.earlier.discard(slot)
        self._removals = [removal for removal in self._removals if removal.earlier]

    def not_cleared(self, clears: Sequence[Clear]) -> None:
        """They could not be emptied; they are to be tried again."""
        for clear in reversed(clears):
            org = self._clearing[clear.group, clear.slot].account.org
            self._clears.put_back(org, clear, (clear.group, clear.scrub))

    def check_integrity(self, columns: Iterable[tuple[int, int]]) -> None:
        """Raise RuntimeError unless each slot is one of these columns', free, or waiting."""
        taken = [*columns, *self._clearing]
        taken += [(freed.home.group, freed.slot) for _, freed in self._limbo]
        for group, pool in enumerate(self.pools):
            pool.check_integrity(slot for which, slot in taken if which == group)
            waiting = [*self._clearing, *((freed.home.group, 0) for _, freed in self._limbo)]
            if self.coming_free[group] != sum(which == group for which, _ in waiting):
                raise RuntimeError("the slots that are coming free are counted")


def prune(column: Column) -> None:
    """Something that held it has gone: it may be a leaf now, or nothing at all."""
    leaf = column.home.prune(column)
    if leaf and leaf.state is State.READY:
        leaf.home.account.queue(leaf).leaf(leaf)
