"""A file in memory: its bytes in several parts, and the note that its fragments have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64

# Of a note, for the bytes of the file; the rest says which fragments belong together.
_BYTES_BITS: Final = 32


def note_of(parts: Sequence[memoryview], size: int) -> int:
    """Of a file's fragments: its length, and a checksum, so that those of two files don't match."""
    sum_, left = xxh3_64(), size
    for part in parts:
        sum_.update(part[:left])
        left -= min(left, len(part))
    return sum_.intdigest() >> _BYTES_BITS << _BYTES_BITS | size


def noted_bytes(note: int) -> int:
    """The length of the file, as the note says."""
    return note & ((1 << _BYTES_BITS) - 1)


def window(parts: Sequence[memoryview], start: int, end: int) -> memoryview | None:
    """These bytes of the parts, if they lie in one of them."""
    for part in parts:
        if start >= 0 and end <= len(part):
            return part[start:end]
        start, end = start - len(part), end - len(part)
    return None


def cut(parts: Sequence[memoryview], start: int, end: int) -> memoryview:
    """These bytes of the parts: as they are, if they lie in one that can be written to."""
    whole = window(parts, start, end)
    if whole is not None and not whole.readonly:
        return whole
    found, filled = memoryview(bytearray(end - start)), 0
    for part in parts:
        piece = part[max(0, start) : max(0, end)]
        found[filled : filled + len(piece)] = piece
        filled += len(piece)
        start, end = start - len(part), end - len(part)
    return found


def fill(parts: Sequence[memoryview], start: int, content: memoryview) -> None:
    """Copy the content to this place of the parts, as far as they go."""
    at = 0
    for part in parts:
        first = max(0, start - at)
        offset = max(0, at - start)
        count = min(len(part) - first, len(content) - offset)
        if count > 0:
            part[first : first + count] = content[offset : offset + count]
        at += len(part)
