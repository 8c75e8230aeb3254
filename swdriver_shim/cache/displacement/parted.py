"""A set of columns that never takes long to grow, however many there are.

A set is copied as a whole each time that it has grown by some factor: of a million columns that takes
tens of milliseconds, in which a driver does nothing else. Keys are hashes, so parts by one byte of them
grow alike, each in a step of its own. What has the parts frees them one by one, for the same reason.
Few columns are in one part: there may be a set for each of thousands of orgs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, Generic

from swdriver_shim.cache.displacement.base import C

PARTS: Final = 256
WHOLE_MAX: Final = 1024  # columns in one part; with more it is divided, in less than a millisecond
_BYTE: Final = 2  # of the key: samples of columns are taken by those before it


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
        return self.parts[column.key[_BYTE] % len(self.parts)]
