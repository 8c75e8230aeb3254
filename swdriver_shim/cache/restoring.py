"""What was lost with an agent: its parts of columns are brought back from tier 2 where that has them.

The other columns are given up.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.recalling import Recall, is_coming
from swdriver_shim.cache.slots import Place
from swdriver_shim.cache.stock import Stock

RESTORES_MAX: Final = 256  # columns that are kept for it: nobody can use them, or their room;
RESTORES_PART: Final = 4  # at most this part of the slots


class Restoring:
    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._lost: deque[tuple[deque[Column], frozenset[int]]] = deque()
        self._losing: dict[int, frozenset[int]] = {}  # by group: the shards of those
        self._restores: deque[tuple[Place, frozenset[int]]] = deque()

    def lose(self, group: int, shards: frozenset[int]) -> None:
        """What these shards have of a group is gone. `go_on` goes through it. Refills that come first
        are refused."""
        self._losing[group] = self._losing.get(group, frozenset()) | shards
        for account in self._stock.accounts.values():
            self._lost.append((deque(account.columns(group)), shards))

    def refuse(self, column: Column, reason: Reason) -> None:
        """What lay in its slot was not it, or can't be had: it is not served again, unless it was lost
        with an agent and comes back from tier 2."""
        lost = self._losing.get(column.home.group)
        if column.state is State.READY and not (lost and self._restore(column, lost)):
            self._stock.remove(column, reason)

    def go_on(self, most: int) -> bool:
        """Look at about so many columns; whether there is more to do now."""
        while self._lost and most > 0 and self._may_restore_more:
            left, shards = self._lost[0]
            while left and most > 0 and self._may_restore_more:
                most -= 1
                column = left.popleft()
                if column.state is State.READY and not self._restore(column, shards):
                    self._stock.remove(column, Reason.AGENT_LOST)
            if not left:
                self._lost.popleft()
        if not self._lost:
            self._losing.clear()
        return bool(self._lost) and self._may_restore_more

    def begin(self, most: int) -> Recall | None:
        """Some of it, for the lost shards only. `Recalling` carries it out, as any recall."""
        recall: Recall | None = None
        kind = None
        while self._restores and (recall is None or len(recall.places) < most):
            place, shards = self._restores[0]
            home = place.column.home
            if recall and kind != (home, shards):
                break
            self._restores.popleft()
            if is_coming(place) and not home.purged_by:
                tag = home.account.makers[home.namespace].tag
                recall = recall or Recall(tag, home.account.encrypted_for, [], shards)
                recall.places.append(place)
                kind = home, shards
        return recall

    @property
    def _may_restore_more(self) -> bool:
        least = min(pool.line for pool in self._stock.slots.pools)
        return len(self._restores) < min(RESTORES_MAX, max(1, least // RESTORES_PART))

    def _restore(self, column: Column, shards: frozenset[int]) -> bool:
        """Whether tier 2 may have the part that these have lost."""
        is_kept = column.state is State.READY and column.kept_at is not None
        if not is_kept or not self._stock.may_use_tier2(column.home.account):
            return False
        self._stock.withdraw(column)
        column.state = State.COMING
        self._restores.append((Place(column, column.slot), shards))
        return True
