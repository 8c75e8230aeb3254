"""Sizes of memory and disks, as people write them: `512G`."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {"T": 1 << 40, "G": 1 << 30, "M": 1 << 20, "K": 1 << 10}
_SIZE: Final = re.compile(r"(\d{1,19})([KMGT]?)(?:i?B)?")


def in_units(count: int) -> str:
    """`512G`: the largest unit that says it exactly. So it stands in what is read and compared."""
    for unit, size in UNITS.items():
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def in_bytes(text: str) -> int:
    """The other way round. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * UNITS.get(match[2], 1) if match else 0
    if not 0 < size <= 1 << 60:
        raise ValueError(f"{text[:80]!r} should be a number of bytes, such as 512G")
    return size
