"""Whose column is displaced when a group has no free slot.

The org that is furthest above its share gives up the column that its displacement policy chooses.
Columns in use and columns with others behind them are never displaced.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

from swdriver_shim.cache.prefix_map import Account, Column

_SLACK: Final = 64


class Ranked(NamedTuple):
    rank: float  # the excess below zero: the lowest is displaced first
    number: int  # of equal ranks the org that came first
    account: Account


class Ranking:
    """The orgs with columns in a group, in the order in which they give up columns.

    Kept from one store to the next, since there may be thousands of orgs. An org that has less by now,
    or a larger share, is put right when it comes to the front. One that has more was noted, and is
    ranked again before the front is looked at. So it costs what has changed, whatever the number of
    orgs.
    """

    __slots__ = ("_accounts", "_group", "_heap", "_noted", "_ranks")

    def __init__(self, group: int) -> None:
        self._group = group
        self._heap: list[tuple[float, int]] = []  # ranks and numbers; those of other ranks are stale
        self._ranks: dict[int, float] = {}  # by number
        self._accounts: dict[int, Account] = {}  # those that have a rank, by number
        self._noted: dict[int, Account] = {}  # by number

    def note(self, account: Account) -> None:
        """The org may have a lower rank than before, or none yet."""
        self._noted[account.number] = account

    def drop(self, account: Account) -> None:
        """The org has nothing, and is not going to."""
        for table in (self._noted, self._accounts, self._ranks):
            table.pop(account.number, None)

    def rank_noted(self) -> None:
        if not self._noted:
            return
        ranks = self._ranks
        for number, account in self._noted.items():
            rank = self._rank(account)
            if rank < ranks.get(number, 0.0):
                ranks[number] = rank
                self._accounts[number] = account
                heappush(self._heap, (rank, number))
        self._noted.clear()
        if len(self._heap) > 2 * len(ranks) + _SLACK:
            self._heap = [(rank, number) for number, rank in ranks.items()]
            heapify(self._heap)

    def first(self, storing: Account | None) -> Ranked | None:
        """The first of the others than the storing org; None if nobody else has columns."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, number = heap[0]
            if ranks.get(number) != rank:
                heappop(heap)
                continue
            account = self._accounts[number]
            now = self._rank(account)
            if account is storing:
                self.set_aside(number)
            elif now == rank:
                return Ranked(rank, number, account)
            elif now:
                ranks[number] = now
                heapreplace(heap, (now, number))
            else:
                heappop(heap)
                del ranks[number], self._accounts[number]
        return None

    def set_aside(self, number: int) -> None:
        """Take the first out, for as long as somebody stores."""
        heappop(self._heap)
        del self._ranks[number]
        self._noted[number] = self._accounts.pop(number)

    def put_back(self, one: Ranked) -> None:
        """One that was set aside."""
        del self._noted[one.number]
        self._ranks[one.number] = one.rank
        self._accounts[one.number] = one.account
        heappush(self._heap, (one.rank, one.number))

    def _rank(self, account: Account) -> float:
        return -account.group_bytes[self._group] / account.policy.share


class Victims:
    """Columns to displace, one after the other, while an org stores.

    Only the storing org grows meanwhile. An org that has nothing to give up is not asked again.
    """

    __slots__ = ("_first", "_group", "_has_begun", "_more", "_ranking", "_storing", "_turn")

    def __init__(
        self, ranking: Ranking, group: int, storing: Account | None = None, more: int = 0
    ) -> None:
        """`ranking`: of this group. `more`: how many bytes the storing org is about to have in
        addition."""
        self._ranking = ranking
        self._group = group
        self._storing = self._turn = storing
        self._more = more
        self._has_begun = False
        self._first: Account | None = None  # of the others; set aside

    def next(self, now: float) -> Column | None:
        """The column to displace next; None if there is none."""
        run = self.run(now, 1)
        return run[0] if run else None

    def run(self, now: float, most: int) -> list[Column]:
        """The columns to displace next, each the parent of the one before it: at most so many, and
        perhaps fewer. Empty if there is none.

        The storing org gets a column for each that is displaced, before this is called again.
        """
        if not self._has_begun:
            self._has_begun = True
            self._ranking.rank_noted()
        while True:
            following = self._choose_first()
            first, turn = self._first, self._turn
            if turn and (first is None or self._excess(turn) >= self._excess(first)):
                if run := turn.victims(self._group, now, most):
                    return run
                self._turn = None
            elif first is None:
                return []
            elif run := first.victims(self._group, now, self._in_a_row(first, following, most)):
                return run
            else:
                self._first = None

    def _choose_first(self) -> Ranked | None:
        """Whose turn it is of the others. Returns the one that follows."""
        ranking, storing = self._ranking, self._storing
        following = ranking.first(storing)
        if (first := self._first) is not None:
            rank = -self._excess(first)
            if following is None or (rank, first.number) < following[:2]:
                return following
        if following is None:
            return None
        self._first = following.account
        ranking.set_aside(following.number)
        if first is not None:
            ranking.put_back(Ranked(rank, first.number, first))
        return ranking.first(storing)

    def _in_a_row(self, first: Account, following: Ranked | None, most: int) -> int:
        """How many columns the first of the others gives up, up to so many, until it is another's
        turn."""
        size = self._more
        for given in range(1, most):
            rank = -self._excess(first, -given * size)
            if self._turn and -self._excess(self._turn, given * size) <= rank:
                return given
            if following and following[:2] < (rank, first.number):
                return given
        return most

    def _excess(self, account: Account, more: int = 0) -> float:
        """`more`: bytes that it has beside what it has now."""
        if account is self._storing:
            more += self._more
        return (account.group_bytes[self._group] + more) / account.policy.share
