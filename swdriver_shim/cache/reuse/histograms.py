"""How an org comes back, in two short rows of numbers that may be added up: over drivers, and over time.

*Gaps* lie between two uses of a column: with a time to live from the last use, it is hit if the gap is
shorter. *Distances* are how many columns were used since, its own prompt's up to it included: with so
much room or more, displacing the least recently used leaf, it is hit. For other policies there are
previews.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log2
from typing import Final

from msgspec import Struct

from swdriver_shim.cache.reuse.sample import Event, Kind, Sample
from swdriver_shim.keys import COLUMN_TOKENS

STEPS: Final = 4  # an octave
BUCKETS: Final = 32 * STEPS  # from 1 second or column to 136 years or four billion


class Histograms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In columns. What is in no bucket was asked for the first time, as far as anybody remembers."""

    requested: int = 0  # tokens
    columns: int = 0
    gaps: tuple[float, ...] = (0.0,) * BUCKETS
    distances: tuple[float, ...] = (0.0,) * BUCKETS

    def __add__(self, other: Histograms) -> Histograms:
        """Of two drivers, or of two spans of time."""
        return Histograms(
            requested=self.requested + other.requested,
            columns=self.columns + other.columns,
            gaps=_sums(self.gaps, other.gaps),
            distances=_sums(self.distances, other.distances),
        )

    def hit_rate_of_ttl(self, seconds: float) -> float | None:
        """From the last use, with room for all; None without traffic."""
        return self._rate(self.gaps, seconds)

    def hit_rate_of_room(self, columns: float) -> float | None:
        """Without a time to live, displacing the least recently used; None without traffic."""
        return self._rate(self.distances, columns)

    def _rate(self, row: Sequence[float], limit: float) -> float | None:
        if not self.requested:
            return None
        known = sum(row)
        beyond = known - sum(row[: _bucket(limit) + 1]) if limit > 0 else known
        missed = self.columns - known + beyond
        return max(0.0, COLUMN_TOKENS * (self.columns - missed) / self.requested)


def histograms(sample: Sample) -> Histograms:
    """Of all that a sample knows. Whoever is in everybody's prompt may be in it or not: what the sample
    has too much or too little of is taken for uses that came back at once."""
    gaps, distances = [0.0] * BUCKETS, [0.0] * BUCKETS
    share, cold, asked = sample.share.of_all, 0, 0
    for gap, distance in reuses(sample.events()):
        asked += 1
        if gap is None or distance is None:
            cold += 1
        else:
            gaps[_bucket(gap)] += 1 / share
            distances[_bucket(distance / share)] += 1 / share
    more = sample.columns - asked / share
    gaps[0] += more
    distances[0] += more
    return Histograms(
        requested=sample.requested, columns=sample.columns, gaps=tuple(gaps), distances=tuple(distances)
    )


def reuses(events: Iterable[Event]) -> list[tuple[float | None, int | None]]:
    """For each column of the sample that was asked for: how long ago its last use was, and how many
    columns of the sample have been used since, itself included; None for its first."""
    found: list[tuple[float | None, int | None]] = []
    last: dict[bytes, float] = {}
    stack = _Stack()
    matched: Sequence[bytes] = ()
    for event in events:
        path = [reference.key for reference in event.path]
        if event.kind is Kind.MATCH:
            matched = path
            for key in path:
                then = last.get(key)
                found.append((None, None) if then is None else (event.at - then, stack.depth(key)))
            known = [key for key in path if key in last]
        else:
            path = known = [*matched, *path] if event.kind is Kind.MORE else path
        for key in reversed(known):  # the first of a prompt goes last
            stack.touch(key)
        for key in known:
            last[key] = event.at
    return found


class _Stack:
    """Keys by their last use: a sum over places in order, of which each key has one (Fenwick's tree)."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._next = 1
        self._sums: list[int] = [0]

    def depth(self, key: bytes) -> int:
        """1 for the one that was touched last."""
        return len(self._places) - self._before(self._places[key]) + 1

    def touch(self, key: bytes) -> None:
        if (place := self._places.get(key)) is not None:
            self._add(place, -1)
        place = self._places[key] = self._next
        self._next += 1
        low = place & -place
        self._sums.append(1 + self._before(place - 1) - self._before(place - low))

    def _before(self, place: int) -> int:
        """How many places up to this one are taken."""
        count = 0
        while place:
            count += self._sums[place]
            place &= place - 1
        return count

    def _add(self, place: int, by: int) -> None:
        while place < len(self._sums):
            self._sums[place] += by
            place += place & -place


def _bucket(value: float) -> int:
    """Of values up to 2^(bucket / 4)."""
    return min(BUCKETS - 1, max(0, ceil(STEPS * log2(value)))) if value > 1 else 0


def _sums(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
