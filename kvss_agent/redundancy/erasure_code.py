"""Reed-Solomon by ISA-L, on buffers as they are: any `data` of the fragments make all others.

One row of coefficients makes one fragment of the `data` ones. With one fragment of parity the row is all
ones, which is XOR. With one fragment of data all fragments are copies of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

TABLE_BYTES: Final = 32  # of one coefficient
CACHED: Final = 256  # sets of fragments that were missing together
IN_WHEEL: Final = "libisal*.so*"


class NoLibrary(Exception):
    """ISA-L is not installed; a sentence says how to get it."""


class ErasureCode:
    """`data` fragments, and `parity` more that are computed. All have one size, but the last one with
    data may be shorter: it counts as if zeros followed."""

    def __init__(self, data: int, parity: int) -> None:
        """Raises NoLibrary."""
        if data < 1 or parity < 1:
            raise ValueError("a code has at least one fragment with data, and one more")
        self.data, self.parity = data, parity
        self._isal = library()
        self._matrix = self._coefficients()
        self._inverse = lru_cache(CACHED)(self._inverted)
        self._tables = lru_cache(CACHED)(self._made_tables)

    @property
    def fragments(self) -> int:
        return self.data + self.parity

    def encode(self, fragments: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        """Fill the fragments of parity. `fragments`: those with data, which are read, but are in memory
        that can be written to."""
        self._combine(self._matrix[self.data * self.data :], _as_long(fragments), into)

    def rebuild(self, there: Mapping[int, memoryview], missing: Mapping[int, memoryview]) -> None:
        """Fill the missing fragments from `data` others. Both by place; all have one size but the last
        one with data."""
        places = sorted(there)[: self.data]
        if len(places) < self.data:
            raise ValueError(f"{len(there)} fragments can't make a column of {self.data}")
        inverse = self._inverse(tuple(places))
        size = max(map(len, [*there.values(), *missing.values()]))
        sources = _as_long([there[place] for place in places], size)
        for place, into in missing.items():
            row = self._row_of(place, inverse)
            self._combine(row, [source[: len(into)] for source in sources], [into])

    # Inside

    def _coefficients(self) -> bytes:
        k, n = self.data, self.data + self.parity
        if k == 1:
            return b"\1" * n
        if self.parity == 1:
            ones = bytearray(b"\1" * (k * n))
            for row in range(k):
                ones[row * k : (row + 1) * k] = bytes(place == row for place in range(k))
            return bytes(ones)
        matrix = (ctypes.c_ubyte * (k * n))()
        self._isal.gf_gen_cauchy1_matrix(matrix, n, k)
        return bytes(matrix)

    def _inverted(self, places: tuple[int, ...]) -> bytes:
        """Of these rows: what makes the data of the fragments at these places."""
        k = self.data
        rows = b"".join(self._matrix[place * k : (place + 1) * k] for place in places)
        found = (ctypes.c_ubyte * (k * k))()
        if self._isal.gf_invert_matrix((ctypes.c_ubyte * (k * k))(*rows), found, k):
            raise ArithmeticError(f"fragments {places} do not make a column")  # impossible for Cauchy
        return bytes(found)

    def _row_of(self, place: int, inverse: bytes) -> bytes:
        """What makes the fragment at this place of those that are there."""
        k = self.data
        if place < k:
            return inverse[place * k : (place + 1) * k]
        row = self._matrix[place * k : (place + 1) * k]
        multiply = self._isal.gf_mul
        found = bytearray(k)
        for column in range(k):
            for inner in range(k):
                found[column] ^= multiply(row[inner], inverse[inner * k + column])
        return bytes(found)

    def _combine(self, rows: bytes, sources: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        k = self.data
        tables = self._tables(rows)
        self._isal.ec_encode_data(
            len(into[0]), k, len(into), tables, _addresses(sources), _addresses(into)
        )

    def _made_tables(self, rows: bytes) -> ctypes.Array[ctypes.c_ubyte]:
        count = len(rows) // self.data
        tables = (ctypes.c_ubyte * (TABLE_BYTES * len(rows)))()
        self._isal.ec_init_tables(self.data, count, (ctypes.c_ubyte * len(rows))(*rows), tables)
        return tables


@lru_cache(maxsize=1)
def library() -> Any:
    """ISA-L: of the wheel `pyeclib`, or else of the system. Raises NoLibrary."""
    spec = find_spec("pyeclib")
    folder = Path(spec.origin).parent.parent / "pyeclib.libs" if spec and spec.origin else None
    paths = [str(path) for path in folder.glob(IN_WHEEL)] if folder else []
    path = paths[0] if paths else find_library("isal")
    if path is None:
        raise NoLibrary('redundant columns need ISA-L: pip install "tidegate[redundancy]"')
    isal = ctypes.CDLL(path)
    isal.gf_mul.argtypes, isal.gf_mul.restype = [ctypes.c_ubyte, ctypes.c_ubyte], ctypes.c_ubyte
    return isal


def _addresses(memories: Sequence[memoryview]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(memories))(
        *(ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories)
    )


def _as_long(fragments: Sequence[memoryview], size: int = 0) -> list[memoryview]:
    """All of one size, zeros behind what is shorter."""
    size = size or len(fragments[0])
    return [one if len(one) == size else _extended(one, size) for one in fragments]


def _extended(fragment: memoryview, size: int) -> memoryview:
    found = memoryview(bytearray(size))
    found[: len(fragment)] = fragment
    return found
