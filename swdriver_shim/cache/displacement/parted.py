"""A set of columns that never takes long to grow, however many there are.

A set is copied as a whole each time that it has grown by some factor: of a million columns that takes
tens of milliseconds, in which a driver does nothing else. Keys are hashes, so parts by one byte of them
grow alike, each in a step of its own. What has the parts frees them one by one, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, Generic

from swdriver_shim.cache.displacement.base import C

PARTS: Final = 256
_BYTE: Final = 2  # of the key: samples of columns are taken by those before it


class Parted(Generic[C]):
    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[set[C]] = []  # none before the first column: most have none ever

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[C]:
        return chain.from_iterable(self.parts)

    def __contains__(self, column: C) -> bool:
        return bool(self.parts) and column in self.parts[column.key[_BYTE]]

    def add(self, column: C) -> None:
        if not self.parts:
            self.parts = [set() for _ in range(PARTS)]
        self.parts[column.key[_BYTE]].add(column)

    def update(self, columns: Iterable[C]) -> None:
        for column in columns:
            self.add(column)

    def discard(self, column: C) -> None:
        if self.parts:
            self.parts[column.key[_BYTE]].discard(column)
