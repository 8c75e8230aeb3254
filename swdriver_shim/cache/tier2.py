"""The ledger's side of tier 2: which columns to copy there, to recall, and to remove there.

The caller moves the bytes. As for the ledger, it holds the lock and passes the time in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.recalls import Recall, Recalled, RecallPlanner, RestorePlanner, Search
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.cache.spills import Dates, Spill, Spilled, SpillPlanner
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.tier2_deletes import TierDelete, TierPurge


class Tier2:
    def __init__(
        self, stock: Stock, spills: SpillPlanner, recalls: RecallPlanner, restores: RestorePlanner
    ) -> None:
        self._stock = stock
        self._spills = spills
        self._recalls = recalls
        self._restores = restores

    # Copying there

    def begin_spill(
        self, now: float, most: int, orgs_that_recompute: Collection[str] = ()
    ) -> Spill | None:
        """About so many columns to copy; None if there are none. `finish_spill` has to follow. Columns
        of `orgs_that_recompute` are not copied, since computing them is faster than recalling."""
        self._spills.orgs_that_recompute = orgs_that_recompute
        return self._spills.begin(now, most)

    def seconds_left(self, spill: Spill, now: float) -> float:
        """Until the spill is aborted; 0 if it has been."""
        return self._stock.slots.seconds_left(spill, now)

    def finish_spill(self, spill: Spill, copied: Sequence[bool]) -> None:
        """`copied`: which of its copies exist in tier 2 now; none beyond its length."""
        self._spills.finish(spill, copied)

    # Recalling columns

    def search(self, prompt: HasKeys, start: int, now: float) -> Search | None:
        """Find the columns from depth `start` on that exist in tier 2. None if there is nothing to ask.

        The generator yields questions and is sent the answers. Its result is for `begin_recalls`.
        """
        return self._recalls.search(prompt, start, now)

    def gain(self, prompt: HasKeys, exists: Sequence[Collection[int]], now: float) -> tuple[int, int]:
        """How many tokens more could be served after recalling what exists, and how many bytes that
        takes."""
        return self._recalls.gain(prompt, exists, now)

    def begin_recalls(
        self, prompt: HasKeys, exists: Sequence[Collection[int]], now: float
    ) -> list[Recall]:
        """Recalls of columns that exist in tier 2, in the prompt's order, as far as there is room.
        `start_recall` and `finish_recall` have to follow for each; or only the latter, to give it up."""
        return self._recalls.begin(prompt, exists, now)

    def skip_recalls(self, prompt: HasKeys, exists: Sequence[Collection[int]]) -> None:
        """It is faster to compute these columns."""
        self._recalls.skip(prompt, exists)

    def begin_restore(self, most: int) -> Recall | None:
        """A recall of parts that agents have lost."""
        return self._restores.begin(most)

    def start_recall(self, recall: Recall, now: float) -> bool:
        """Begin to carry the recall out. Whether any of its columns is still wanted."""
        return self._recalls.start(recall, now)

    def finish_recall(self, recall: Recall, now: float, found: Mapping[Column, Dates | Reason]) -> None:
        """Columns with dates in `found` are in their slots; the others did not arrive."""
        self._recalls.finish(recall, now, found)

    # Removing there

    def take_deletes(self, most: int) -> list[TierDelete]:
        """Columns of one group to delete, from each org in turn. `finish_deletes` has to follow."""
        return self._stock.deletes.take(most)

    def finish_deletes(self, deletes: Sequence[TierDelete], *, is_done: bool) -> None:
        """The columns are deleted; or, if not `is_done`, have to be tried again."""
        self._stock.deletes.finish(deletes, is_done=is_done)

    def take_purge(self) -> TierPurge | None:
        """Tags to purge. `finish_purge` has to follow."""
        return self._stock.deletes.take_purge()

    def finish_purge(self, purge: TierPurge, *, is_done: bool) -> None:
        """All columns of the tags are removed; or, if not `is_done`, it has to be tried again."""
        self._stock.deletes.finish_purge(purge, is_done=is_done)

    def repeat_deletes(self) -> None:
        """Delete and purge again whatever was since the start: a shard's new home may have files from an
        earlier stay."""
        self._stock.repeat_tier2_deletes()

    # Statistics

    @property
    def spilled(self) -> Spilled:
        return self._spills.spilled

    @property
    def recalled(self) -> Recalled:
        return self._recalls.recalled
