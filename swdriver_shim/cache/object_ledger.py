"""Lookups of columns that stand alone: each is served or missed by itself, whatever is before it.

Everything else about them is the same as for the columns of prefixes, and is done by the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swdriver_shim.cache.lookup import Lookup
from swdriver_shim.cache.misses import reason
from swdriver_shim.cache.prefix_map import NO_SLOT, Column, State
from swdriver_shim.cache.reasons import DRAM, TIER2, Reason
from swdriver_shim.cache.slots import Use
from swdriver_shim.cache.spills import SpillPlanner
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS, Named


@dataclass(slots=True, eq=False)
class Found(Use):
    """The columns that can be refilled, by their index in `asked`. `slots` keep their bytes until
    `finish`, even if the columns are removed meanwhile."""

    asked: Named
    columns: dict[int, Column] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    at_first: Collection[int] = ()  # indexes of those that were in memory at first

    @property
    def pinned(self) -> Sequence[Column]:
        return list(reversed(self.columns.values()))  # the first one is displaced last


class ObjectLedger:
    def __init__(self, stock: Stock, spills: SpillPlanner) -> None:
        """Raises ValueError for a layout of prefixes."""
        if not stock.layout.groups[0].alone:
            raise ValueError("this layout keeps prefixes: one for objects has a group that is `alone`")
        self._stock = stock
        self._spills = spills

    def query(self, asked: Named, now: float) -> list[bool]:
        """Which columns can be refilled. Changes nothing, and counts nothing."""
        [path] = Lookup(self._stock, asked, now).paths
        return [reach > 0 for reach in path.reach]

    def is_pending(self, asked: Named) -> bool:
        """Whether any column is being recalled from tier 2."""
        [prefix_map] = self._stock.maps_of(asked.maker)
        return any(
            column is not None and column.state is State.RECALLING
            for column in prefix_map.find(asked.keys)[0]
        )

    def find(self, asked: Named, now: float) -> Found:
        """The columns that can be refilled. They are pinned until `finish`, which has to follow."""
        found = Found(asked)
        self._look(found, now)
        found.at_first = frozenset(found.columns)
        return found

    def refresh(self, found: Found, now: float) -> None:
        """Look again: columns may have been recalled or removed since."""
        self._stock.slots.end(found)
        self._look(found, now)

    def _look(self, found: Found, now: float) -> None:
        account = self._stock.account(found.asked.org)
        [path] = Lookup(self._stock, found.asked, now).paths
        before = found.columns
        found.columns = {
            place: column
            for place, (column, reach) in enumerate(zip(path.found, path.reach, strict=True))
            if column is not None and reach > 0
        }
        found.slots = {place: column.slot for place, column in found.columns.items()}
        # The last ones first, so that policies that go by order displace them first.
        if new := [column for place, column in found.columns.items() if before.get(place) is not column]:
            unique = list(dict.fromkeys(reversed(new)))
            account.stamp(unique, now)
            self._spills.used(account, unique)
        self._stock.slots.begin(found, now)

    def finish(self, found: Found, refused: Mapping[int, Reason], now: float) -> None:
        """The slots are read. Count each column as hit, or as missed with its reason. `refused`: why
        columns could not be refilled, by index."""
        account, stock = self._stock.account(found.asked.org), self._stock
        [prefix_map] = stock.maps_of(found.asked.maker)
        missed: Counter[Reason] = Counter()
        hits: Counter[str] = Counter()
        for place, key in enumerate(found.asked.keys):
            if place in refused:
                missed[refused[place]] += COLUMN_TOKENS
            elif place in found.columns:
                hits[DRAM if place in found.at_first else TIER2] += COLUMN_TOKENS
            else:
                why = reason(stock, prefix_map.columns.get(key), key, now) or Reason.TIER2_LATE
                missed[why] += COLUMN_TOKENS
        account.tally.requests += 1
        account.tally.requested += found.asked.tokens
        account.tally.hits.update(hits)
        account.tally.missed.update(missed)
        stock.slots.end(found)

    def stored(self, asked: Named) -> list[bool]:
        """Which columns have a slot. Their bytes may still be on their way there."""
        [prefix_map] = self._stock.maps_of(asked.maker)
        is_reachable = self._stock.is_reachable
        return [
            is_reachable and one is not None and one.slot != NO_SLOT
            for one in prefix_map.find(asked.keys)[0]
        ]
