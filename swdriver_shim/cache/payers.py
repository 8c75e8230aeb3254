"""Who gives some of its memory up, when a group has no free slot.

The org that is furthest above its share gives up the column that its own displacement policy would miss
least. Columns that are in use, or have others behind them, are never taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace

from swdriver_shim.cache.prefix_map import Account, Column


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
