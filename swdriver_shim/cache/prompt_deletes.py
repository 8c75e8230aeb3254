"""Deletes of prompts, in pieces: a prompt may have 65,536 columns, and requests come in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from swdriver_shim.cache.fair_queue import FairQueue
from swdriver_shim.cache.lookup import columns_of
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import Prompt

SLICE: Final = 128  # columns in one go: a millisecond or two
PIECE: Final = 32  # columns of one group


class PromptDeletes:
    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._begun: FairQueue[tuple[str, Iterator[int]]] = FairQueue()  # by org

    def begin(self, prompt: Prompt, *, shared: bool) -> Removal:
        """Delete a prompt's columns from its end on, up to the first that other prompts continue; with
        `shared` all of them. Most prompts are deleted at once; `remove_some` does the rest."""
        removal = Removal(Reason.DELETED, pending=1)
        self._remove_some(prompt.org, self._pieces(prompt, removal, shared=shared))
        return removal

    def remove_some(self) -> bool:
        """Delete some columns of one prompt, of each org in turn. Whether there is more to do."""
        for org, pieces in self._begun.take(1):
            self._remove_some(org, pieces)
        return bool(self._begun)

    def _remove_some(self, org: str, pieces: Iterator[int]) -> None:
        left = SLICE
        for columns in pieces:
            left -= columns
            if left <= 0:
                self._begun.put(org, (org, pieces))
                return

    def _pieces(self, prompt: Prompt, removal: Removal, *, shared: bool) -> Iterator[int]:
        """Each yields how many columns of the prompt it was about."""
        maps = self._stock.maps_of(prompt.maker)
        keys = frozenset(prompt.keys)
        for one in maps:
            one.deletes[removal] = keys
        kept = 0  # so many of its first columns others continue
        # Linked ones first, where it is seen: nothing refers to a column of a window, or to a state.
        for begun in sorted(maps, key=lambda one: not one.linked):
            stayed: list[Column] = []
            for first in reversed(range(0, len(prompt.keys) + 1, PIECE)):
                if begun.purged_by:
                    removal.wait_for([begun.purged_by])
                    break
                depths = range(max(first, kept), first + PIECE)
                if not depths:
                    break
                prefix_map = self._stock.maps_of(prompt.maker)[begun.group]  # another if it was empty
                start = self._remove(prefix_map, prompt, depths, removal, stayed, shared=shared)
                yield PIECE
                if start > depths.start:
                    kept = start
                    break
        for one in maps:
            del one.deletes[removal]
        removal.pending -= 1

    def _remove(
        self,
        prefix_map: PrefixMap,
        prompt: Prompt,
        depths: range,
        removal: Removal,
        stayed: list[Column],
        *,
        shared: bool,
    ) -> int:
        """Remove the columns at these depths, from the last one on. Returns from which depth on they are
        removed: other prompts continue the column before. `stayed`: columns behind them that were
        removed, and stay empty for somebody is using them. Those of this piece take their places."""
        stock, columns = self._stock, columns_of(prefix_map, prompt, depths)
        pins = stock.slots.pins_of(columns)
        prefix_map.account.removals += 1
        start = depths.start
        for column in reversed(columns):
            own = sum(one.parent is column and one.state is State.EMPTY for one in stayed)
            others = not shared and column.ref_count - pins[column] > own
            if others and column.ref_count - pins[column] > self._abandoned(column):
                start = column.depth + 1
                break
            if column.state is not State.EMPTY:
                stock.remove(column, Reason.DELETED, removal)
            if not column.tail:
                stayed.clear()
            stayed.append(column)
        stock.deletes.delete(prefix_map, prompt.keys[start : depths.stop], removal)
        return start

    def _abandoned(self, column: Column) -> int:
        """How many columns right behind this one have no bytes, nor has any behind them: they are only
        there until their uses have ended."""
        known: Counter[Column] = Counter()  # by column: the uses of it, and what is abandoned behind it
        for pinned in self._stock.slots.pins():
            if pinned.state is State.EMPTY and pinned.map is column.map and pinned is not column:
                known[pinned] += 1
        for last in tuple(known):
            one: Column | None = last
            while one and one is not column and one.state is State.EMPTY and known[one] == one.ref_count:
                del known[one]  # it is not counted again
                if one := one.parent:
                    known[one] += 1
        return known[column]
