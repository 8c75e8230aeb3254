"""S3-FIFO: a small queue that newcomers have to survive, a main one with second chances, and ghosts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from swdriver_shim.cache.displacement.base import C, DisplacementPolicy
from swdriver_shim.cache.displacement.leaves import Leaves

SMALL_SHARE: Final = 0.1
USES_TO_STAY: Final = 2
USES_MAX: Final = 3
GHOST_SHARE: Final = 0.9


class S3Fifo(DisplacementPolicy[C]):
    """First in, first out; columns that were used meanwhile get another round.

    Newcomers are in the small queue, which gives a victim whenever it has more than its share. Leaves
    that were used go over to the main one; those that were not are remembered by their key, and go into
    the main queue at once when they are stored again. `mark` is None in the small queue; in the main one
    its place in the queue, and how many of its uses have been spent on getting it.
    """

    name = "s3fifo"
    __slots__ = ("_ghosts", "_main", "_main_count", "_places", "_small")

    def __init__(self) -> None:
        super().__init__()
        self._small = Leaves[C](lambda column: column.stored_at if column.mark is None else None)
        self._main = Leaves[C](lambda column: column.mark and column.mark[0])
        self._main_count = 0
        self._places = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        if column.key in self._ghosts:
            del self._ghosts[column.key]
            self._to_main(column)
        if not column.ref_count:
            self.leaf(column)

    def used(self, path: Sequence[C], now: float) -> None:
        """`uses` is all that is needed."""

    def leaf(self, column: C) -> None:
        (self._small if column.mark is None else self._main).put(column)

    def victim(self, now: float) -> C | None:
        column = None
        if self._count - self._main_count > SMALL_SHARE * self._count:
            column = self._from_small()
        if column is None:
            column = self._from_main() or self._from_small()
        return column

    def victims(self, now: float, most: int) -> list[C]:
        column = self.victim(now)
        if column is None or column.mark is not None:
            return [] if column is None else [column]
        run, count = [column], self._count - 1
        for before in self._small.run(most)[1:]:
            if before.uses >= USES_TO_STAY or count - self._main_count <= SMALL_SHARE * count:
                break
            run.append(before)
            count -= 1
        return run

    def displaced(self, run: Sequence[C], now: float) -> None:
        for column in run:
            if column.mark is None:
                self._ghosts[column.key] = None
            self.removed(column)

    def removed(self, column: C) -> None:
        self._count -= 1
        self._small.drop(column)
        self._main.drop(column)
        self._main_count -= column.mark is not None
        while len(self._ghosts) > GHOST_SHARE * self._count:
            self._ghosts.popitem(last=False)

    def _from_small(self) -> C | None:
        while (column := self._small.first()) is not None and column.uses >= USES_TO_STAY:
            self._to_main(column)
            self._main.put(column)
        return column

    def _from_main(self) -> C | None:
        while (column := self._main.first()) is not None:
            _, spent = column.mark
            chances = min(column.uses - spent, USES_MAX)
            if chances <= 0:
                break
            column.mark = (self._place(), column.uses - chances + 1)
        return column

    def _to_main(self, column: C) -> None:
        column.mark = (self._place(), column.uses)
        self._main_count += 1

    def _place(self) -> int:
        self._places += 1
        return self._places
