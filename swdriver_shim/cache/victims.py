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
