"""Moving bytes and checking them on the way: the inner loop of the store.

One pass would be best, and only compiled code has it (`kvss_agent.native`). In Python, copying and
hashing in pieces that stay in the cache comes close: the second pass finds the piece still there. On
the way in it is hashed first, so that what was just written does not crowd it out.
"""

from __future__ import annotations

from typing import Final, Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

PIECE_BYTES: Final = 256 * 1024
_PIECE_IN_BYTES: Final = 512 * 1024
Bytes = bytes | bytearray | memoryview
_ZEROS: Final = memoryview(bytes(PIECE_BYTES))


class Mover(Protocol):
    """What moves payloads. All of them give the same checksums: XXH3-64, seed 0.

    `into` and `source` are as long as each other. The way in is checked at its source and the way out
    where it arrives, so that whatever moves while it is being copied is found out by the reader.
    """

    name: str

    def copy_in(self, into: memoryview, source: memoryview) -> int:
        """Copy a payload into its slot; the checksum of the payload."""

    def copy_out(self, into: memoryview, source: memoryview) -> int:
        """Copy a payload out of its slot; the checksum of what has arrived."""

    def checksum(self, source: memoryview) -> int:
        """The checksum of these bytes."""


class PythonMover:
    """Nothing but memoryview slices and xxhash. The interpreter is held for one piece at a time."""

    name = "python"

    def copy_in(self, into: memoryview, source: memoryview) -> int:
        if len(source) > PIECE_BYTES:
            _must_fit(into, source)
            state = xxh3_64()
            for start in range(0, len(source), _PIECE_IN_BYTES):
                end = start + _PIECE_IN_BYTES
                piece = source[start:end]
                state.update(piece)
                into[start:end] = piece
            return state.intdigest()
        into[:] = source
        return xxh3_64_intdigest(source)

    def copy_out(self, into: memoryview, source: memoryview) -> int:
        if len(source) > PIECE_BYTES:
            _must_fit(into, source)
            state = xxh3_64()
            for start in range(0, len(source), PIECE_BYTES):
                end = start + PIECE_BYTES
                into[start:end] = source[start:end]
                state.update(into[start:end])
            return state.intdigest()
        into[:] = source
        return xxh3_64_intdigest(into)

    def checksum(self, source: memoryview) -> int:
        return xxh3_64_intdigest(source)


def _must_fit(into: memoryview, source: memoryview) -> None:
    if len(into) != len(source):
        raise ValueError(f"into has {len(into)} bytes and source {len(source)}")


def zero(into: memoryview) -> None:
    """Overwrite with zeros."""
    for start in range(0, len(into), PIECE_BYTES):
        end = min(start + PIECE_BYTES, len(into))
        into[start:end] = _ZEROS[: end - start]


PYTHON: Final = PythonMover()
