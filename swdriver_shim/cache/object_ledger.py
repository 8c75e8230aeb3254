"""Columns that stand alone, in the ledger: each is there or missed by itself, whatever is before it.

What stores, expires, is displaced, spilled, recalled and purged is the ledger's, as for any column. Only
to look them up is different: there is no prefix to agree on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.matching import Look
from swdriver_shim.cache.missing import reason
from swdriver_shim.cache.prefix_map import NO_SLOT, Column, State
from swdriver_shim.cache.reasons import DRAM, TIER2, Reason
from swdriver_shim.cache.slots import Use
from swdriver_shim.keys import COLUMN_TOKENS, Named


@dataclass(slots=True, eq=False)
class Found(Use):
    """Those of the columns asked for that can be refilled, by their place. `slots` are theirs until
    `finish`, though they be removed meanwhile."""

    asked: Named
    columns: dict[int, Column] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    at_first: Collection[int] = ()  # these were in memory when they were asked for

    @property
    def held(self) -> Sequence[Column]:
        return list(reversed(self.columns.values()))  # the first is the last to be a candidate again


class ObjectLedger:
    def __init__(self, ledger: Ledger) -> None:
        """Raises ValueError for a layout of prefixes."""
        if not ledger.stock.layout.groups[0].alone:
            raise ValueError("this layout keeps prefixes: one for objects has a group that is `alone`")
        self._stock = ledger.stock
        self._spilling = ledger.spilling

    def here(self, asked: Named, now: float) -> list[bool]:
        """Which of them can be refilled. Changes nothing, and counts nothing."""
        [path] = Look(self._stock, asked, now).paths
        return [reach > 0 for reach in path.reach]

    def is_coming(self, asked: Named) -> bool:
        """Whether some are on their way from tier 2."""
        [home] = self._stock.maps_of(asked.maker)
        return any(
            column is not None and column.state is State.COMING for column in home.find(asked.keys)
        )

    def find(self, asked: Named, now: float) -> Found:
        """Those that are there; they stay as they are. `finish` has to follow."""
        found = Found(asked)
        self._look(found, now)
        found.at_first = frozenset(found.columns)
        return found

    def again(self, found: Found, now: float) -> None:
        """The same by now: tier 2 may have brought more, a purge may have taken some."""
        self._stock.slots.end(found)
        self._look(found, now)

    def _look(self, found: Found, now: float) -> None:
        account = self._stock.account(found.asked.org)
        [path] = Look(self._stock, found.asked, now).paths
        before = found.columns
        found.columns = {
            place: column
            for place, (column, reach) in enumerate(zip(path.found, path.reach, strict=True))
            if column is not None and reach > 0
        }
        found.slots = {place: column.slot for place, column in found.columns.items()}
        # The last first: policies that go by order give them up first.
        if new := [column for place, column in found.columns.items() if before.get(place) is not column]:
            unique = list(dict.fromkeys(reversed(new)))
            account.stamp(unique, now)
            self._spilling.used(account, unique)
        self._stock.slots.begin(found, now)

    def finish(self, found: Found, refused: Collection[int], now: float) -> None:
        """Nobody reads those slots any more. Each is counted: as a hit of a whole column, or as missed,
        with its reason. `refused`: what lay there was not it."""
        account, stock = self._stock.account(found.asked.org), self._stock
        [home] = stock.maps_of(found.asked.maker)
        missed: Counter[Reason] = Counter()
        hits: Counter[str] = Counter()
        for place, key in enumerate(found.asked.keys):
            if place in refused:
                missed[Reason.SEAL_REFUSED if stock.reachable else Reason.AGENT_LOST] += COLUMN_TOKENS
            elif place in found.columns:
                hits[DRAM if place in found.at_first else TIER2] += COLUMN_TOKENS
            else:
                why = reason(stock, home.columns.get(key), key, now) or Reason.TIER2_LATE
                missed[why] += COLUMN_TOKENS
        account.tally.requests += 1
        account.tally.requested += found.asked.tokens
        account.tally.hits.update(hits)
        account.tally.missed.update(missed)
        stock.slots.end(found)

    def stored(self, asked: Named) -> list[bool]:
        """Which of them have a slot, be it that bytes are still on their way there."""
        [home] = self._stock.maps_of(asked.maker)
        is_there = self._stock.reachable
        return [is_there and one is not None and one.slot != NO_SLOT for one in home.find(asked.keys)]
