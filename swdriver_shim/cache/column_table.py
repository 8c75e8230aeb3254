"""The columns of a map by their keys, in parts that grow one at a time.

A dict is copied as a whole each time that it has grown by some factor: of a million columns that takes
tens of milliseconds, in which a driver does nothing else. And to list it takes as long. Keys are hashes,
so parts by one byte of them grow alike, each in a step of its own. Few columns are in one part: there
may be a table for each of thousands of orgs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

from swdriver_shim import loops

C = TypeVar("C")
PARTS: Final = 64  # with more of them, those of a prompt are in more lines of the processor's cache
WHOLE_MAX: Final = 1024  # columns in one part; with more it is divided, in less than a millisecond
PIECE: Final = 512  # columns of a list that is given: who gets it looks at each


class ColumnTable(Generic[C]):
    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[bytes, C]] = [{}]  # or as many as `PARTS`: see `loops.part_of`

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bool__(self) -> bool:
        return any(self.parts)

    def __contains__(self, key: bytes) -> bool:
        return key in loops.part_of(self.parts, key)

    def __getitem__(self, key: bytes) -> C:
        found: C = loops.part_of(self.parts, key)[key]
        return found

    def __setitem__(self, key: bytes, column: C) -> None:
        if len(self.parts) == 1 and len(self.parts[0]) >= WHOLE_MAX:
            self._divide()
        loops.part_of(self.parts, key)[key] = column

    def __delitem__(self, key: bytes) -> None:
        del loops.part_of(self.parts, key)[key]

    def get(self, key: bytes) -> C | None:
        return loops.part_of(self.parts, key).get(key)

    def put(self, keys: list[bytes], columns: list[C]) -> None:
        """Each key has the column in the same place, of as many, from now on."""
        if len(self.parts) == 1 and len(self.parts[0]) + len(keys) > WHOLE_MAX:
            self._divide()
        loops.current.put_by_key(self.parts, keys, columns)

    def _divide(self) -> None:
        [whole] = self.parts
        parts: list[dict[bytes, C]] = [{} for _ in range(PARTS)]
        loops.current.put_by_key(parts, [*whole], [*whole.values()])
        self.parts = parts  # filled: cache maps look for keys without the lock

    def drop(self, keys: list[bytes]) -> None:
        """Remove the columns of these keys, which are there."""
        loops.current.drop_by_key(self.parts, keys)

    def take(self, most: int) -> list[C]:
        """Remove up to so many columns, in any order, and return them."""
        taken: list[C] = []
        for part in filter(None, self.parts):
            taken += [part.popitem()[1] for _ in range(min(len(part), most - len(taken)))]
            if len(taken) == most:
                break
        return taken

    def values(self) -> Iterator[C]:
        return chain.from_iterable(part.values() for part in self.parts)

    def pieces(self) -> Iterator[list[C]]:
        """All columns, in lists that are made a part at a time, so that none takes long. Others may come
        and go meanwhile. Those that were here when the first list was made, and stay, are each in one;
        some that have left may be."""
        left: list[C] = []
        for part in self.parts:
            left += part.values()
            whole = len(left) // PIECE * PIECE
            for at in range(0, whole, PIECE):
                yield left[at : at + PIECE]
            left = left[whole:]
        if left:
            yield left
