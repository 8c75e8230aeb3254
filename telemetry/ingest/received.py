"""Which records of a source have arrived: ranges of sequences, as PostgreSQL writes them. Pure.

Records come in any order, since several members of the group read, and more than once. So the highest
sequence does not say which are new; ranges do. Without gaps that is one, however long a source lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

RANGES_MAX: Final = 256  # of a source; beyond it the oldest gaps are given up
_RANGE: Final = re.compile(r"\[(\d+),(\d+)\)")

Ranges = list[tuple[int, int]]  # from, and up to but not with


def parse(text: str) -> Ranges:
    return [(int(low), int(high)) for low, high in _RANGE.findall(text)]


def write(ranges: Ranges) -> str:
    return "{" + ",".join(f"[{low},{high})" for low, high in ranges) + "}"


def admit(ranges: Ranges, sequences: Iterable[int]) -> tuple[set[int], Ranges]:
    """Those of them that are new, and what has arrived then."""
    fresh = {one for one in set(sequences) if not any(low <= one < high for low, high in ranges)}
    joined: Ranges = []
    for low, high in sorted([*ranges, *((one, one + 1) for one in fresh)]):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    while len(joined) > RANGES_MAX:
        joined[:2] = [(joined[0][0], joined[1][1])]
    return fresh, joined


def missing(ranges: Ranges) -> int:
    """Sequences below the highest that have not arrived: on their way, or lost."""
    return ranges[-1][1] - 1 - sum(high - low for low, high in ranges) if ranges else 0
