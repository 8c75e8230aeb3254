"""Least recently used, and least frequently used with dynamic ageing (LFU-DA)."""

from __future__ import annotations

from collections.abc import Sequence

from swdriver_shim.cache.displacement.base import C, DisplacementPolicy
from swdriver_shim.cache.displacement.leaves import Leaves


class Lru(DisplacementPolicy[C]):
    """Displaces the leaf whose last use is longest ago; the deeper of two that were used together."""

    name = "lru"
    __slots__ = ("_leaves",)

    def __init__(self) -> None:
        super().__init__()
        self._leaves = Leaves[C](lambda column: column.used_at)

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        if not column.ref_count:
            self._leaves.put(column)

    def used(self, path: Sequence[C], now: float) -> None:
        """`used_at` is all that is needed."""

    def leaf(self, column: C) -> None:
        self._leaves.put(column)

    def victim(self, now: float) -> C | None:
        return self._leaves.first()

    def victims(self, now: float, most: int) -> list[C]:
        return self._leaves.run(most)

    def displaced(self, run: Sequence[C], now: float) -> None:
        self._count -= len(run)
        self._leaves.drop(run[0])  # the others are not queued

    def stored_all(self, columns: Sequence[C], now: float) -> None:
        self._count += len(columns)
        for column in columns:
            if not column.ref_count:
                self._leaves.put(column)

    def removed(self, column: C) -> None:
        self._count -= 1
        self._leaves.drop(column)


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
        self._leaves = Leaves[C](
            lambda column: (
                (column.uses + column.mark, column.used_at) if isinstance(column.mark, int) else None
            )
        )

    def stored(self, column: C, now: float) -> None:
        column.mark = self._age
        super().stored(column, now)

    def used(self, path: Sequence[C], now: float) -> None:
        age = self._age
        for column in path:
            column.mark = age

    def displaced(self, run: Sequence[C], now: float) -> None:
        super().displaced(run, now)
        self._age = max(self._age, *[column.uses + column.mark for column in run])

    def stored_all(self, columns: Sequence[C], now: float) -> None:
        for column in columns:
            column.mark = self._age
        super().stored_all(columns, now)
