"""A set of columns that never takes long to grow, however many there are.

It has parts as a `ColumnTable` has, for the same reasons. What has the parts frees them one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, Generic

from swdriver_shim.cache.column_table import WHOLE_MAX
from swdriver_shim.cache.displacement.base import C
from swdriver_shim.loops import PART_BYTE

PARTS: Final = 256


class Parted(Generic[C]):
    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[set[C]] = [set()]  # or as many as `PARTS`

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[C]:
        return chain.from_iterable(self.parts)

    def __contains__(self, column: C) -> bool:
        return column in self._part_of(column)

    def add(self, column: C) -> None:
        if len(self.parts) == 1 and len(self.parts[0]) >= WHOLE_MAX:
            [whole] = self.parts
            self.parts = [set() for _ in range(PARTS)]
            self.update(whole)
        self._part_of(column).add(column)

    def update(self, columns: Iterable[C]) -> None:
        for column in columns:
            self.add(column)

    def discard(self, column: C) -> None:
        self._part_of(column).discard(column)

    def _part_of(self, column: C) -> set[C]:
        return self.parts[column.key[PART_BYTE] % len(self.parts)]
