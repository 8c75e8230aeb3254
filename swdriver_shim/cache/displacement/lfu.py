"""Least frequently used, with dynamic ageing (LFU-DA)."""

from __future__ import annotations

from collections.abc import Sequence

from swdriver_shim.cache.displacement.base import C
from swdriver_shim.cache.displacement.leaves import Leaves
from swdriver_shim.cache.displacement.lru import Lru


class Lfu(Lru[C]):
    """Displaces the leaf with the fewest uses, counted from the rank that victims had when it was last
    used.

    So a column that was popular once has to be used again to stay before newcomers. `mark` is that rank.
    Among equals the least recently used.
    """

    name = "lfu"
    __slots__ = ("_age",)

    def __init__(self) -> None:
        super().__init__()
        self._age = 0
        self._leaves = Leaves[C](lambda column: (column.uses + column.mark, column.used_at))

    def stored(self, column: C, now: float) -> None:
        column.mark = self._age
        super().stored(column, now)

    def used(self, path: Sequence[C], now: float) -> None:
        age = self._age
        for column in path:
            column.mark = age

    def victim(self, now: float) -> C | None:
        column = self._leaves.first()
        if column is not None:
            self._age = max(self._age, column.uses + column.mark)
        return column
