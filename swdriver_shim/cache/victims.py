"""Whose column is displaced when a group has no free slot.

The org that is furthest above its share gives up the column that its displacement policy chooses.
Columns in use and columns with others behind them are never displaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace

from swdriver_shim.cache.prefix_map import Account, Column


class Victims:
    """Columns to displace, one after the other, while an org stores.

    Only the storing org grows meanwhile. So the others are put in order once, when the first column is
    asked for, and checked again as they come to the front.
    """

    __slots__ = ("_accounts", "_group", "_more", "_others", "_storing", "_turn")

    def __init__(
        self,
        accounts: Mapping[str, Account],
        group: int,
        storing: Account | None = None,
        more: int = 0,
    ) -> None:
        """`more`: how many bytes the storing org is about to have in addition."""
        self._accounts = accounts
        self._group = group
        self._storing = self._turn = storing
        self._more = more
        self._others: list[tuple[float, int, Account]] | None = None

    def next(self, now: float) -> Column | None:
        """The column to displace next; None if there is none."""
        run = self.run(now, 1)
        return run[0] if run else None

    def run(self, now: float, most: int) -> list[Column]:
        """The columns to displace next, each the parent of the one before it: at most so many, and
        perhaps fewer. Empty if there is none.

        The storing org gets a column for each that is displaced, before this is called again.
        """
        if self._others is None:
            self._others = self._in_order()
        others = self._others
        while others or self._turn:
            if self._turn and (not others or -self._excess(self._turn) <= others[0][0]):
                if run := self._turn.victims(self._group, now, most):
                    return run
                self._turn = None
                continue
            rank, number, account = others[0]
            if rank != -self._excess(account):
                heapreplace(others, (-self._excess(account), number, account))
            elif run := account.victims(self._group, now, self._in_a_row(others, most)):
                return run
            else:
                heappop(others)
        return []

    def _in_a_row(self, others: list[tuple[float, int, Account]], most: int) -> int:
        """How many columns the first of the others gives up, up to so many, until it is another's
        turn."""
        _, number, account = others[0]
        following, size = min(others[1:3], default=None), self._more
        for given in range(1, most):
            rank = -self._excess(account, -given * size)
            if self._turn and -self._excess(self._turn, given * size) <= rank:
                return given
            if following and following[:2] < (rank, number):
                return given
        return most

    def _in_order(self) -> list[tuple[float, int, Account]]:
        others = [
            (-self._excess(account), number, account)
            for number, account in enumerate(self._accounts.values())
            if account is not self._storing and account.group_bytes[self._group]
        ]
        heapify(others)
        return others

    def _excess(self, account: Account, more: int = 0) -> float:
        """`more`: bytes that it has beside what it has now."""
        if account is self._storing:
            more += self._more
        return (account.group_bytes[self._group] + more) / account.policy.share
