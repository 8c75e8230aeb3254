"""Segmented LRU: columns that were hit are protected, up to a share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from swdriver_shim.cache.displacement.base import C, Displaceable, DisplacementPolicy
from swdriver_shim.cache.displacement.leaves import Leaves

PROTECTED_SHARE: Final = 0.8


class Slru(DisplacementPolicy[C]):
    """Displaces the least recently used on probation: columns that were never hit, or not for long.

    Beyond their share the least recently used of the protected go back, with their ancestors as far as
    these were last used with them, and queue as if used at that moment. `mark` is when a column came
    back to probation; None if it has always been there, this queue while it is protected. (Ancestors may
    wait in another one.)
    """

    name = "slru"
    __slots__ = ("_probation", "_protected", "_protected_count")

    def __init__(self) -> None:
        super().__init__()
        self._probation = Leaves[C](_on_probation_since)
        self._protected = Leaves[C](lambda column: column.used_at if column.mark is self else None)
        self._protected_count = 0

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        if column.uses:
            self._protect(column)
        if not column.ref_count:
            self.leaf(column)

    def used(self, path: Sequence[C], now: float) -> None:
        for column in path:
            if column.mark is not self:
                self._protect(column)

    def leaf(self, column: C) -> None:
        (self._protected if column.mark is self else self._probation).put(column)

    def victim(self, now: float) -> C | None:
        while self._protected_count > PROTECTED_SHARE * self._count:
            oldest = self._protected.first()
            if oldest is None:
                break
            self._demote(oldest, now)
            self._probation.put(oldest)
        column = self._probation.first()
        return self._protected.first() if column is None else column

    def victims(self, now: float, most: int) -> list[C]:
        column = self.victim(now)
        if column is None or column.mark is self:
            return [] if column is None else [column]
        run, count = [column], self._count - 1
        for before in self._probation.run(most)[1:]:
            if self._protected_count > PROTECTED_SHARE * count:
                break  # another is let go of first
            run.append(before)
            count -= 1
        return run

    def removed(self, column: C) -> None:
        self._count -= 1
        self._protected_count -= column.mark is self
        self._probation.drop(column)
        self._protected.drop(column)

    def _protect(self, column: C) -> None:
        column.mark = self
        self._protected_count += 1

    def _demote(self, leaf: C, now: float) -> None:
        column: Displaceable | None = leaf
        while column is not None and column.mark is self and column.used_at == leaf.used_at:
            column.mark = now
            self._protected_count -= 1
            column = column.parent


def _on_probation_since(column: Displaceable) -> float | None:
    """None for a column of another priority's queue, of which that is not known here."""
    mark = column.mark
    if mark is None:
        return column.used_at
    return mark if isinstance(mark, (int, float)) else None
