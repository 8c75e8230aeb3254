"""Between the calendar, by which files of tier 2 are dated, and the driver's own clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

SECONDS_MAX: Final = 256  # different ones that are remembered


class Offsets(NamedTuple):
    """Seconds that the calendar is ahead of our clock."""

    least: float
    most: float


class Calendar:
    """The calendar may be put right. What is noted with the least offset of late, and read with the
    most, is never younger than it is.

    An offset is forgotten once nothing lives any more that was noted with it: a calendar that was wrong
    for a moment would else make all that is recalled look too old for good.
    """

    def __init__(self, wall_clock: Callable[[], float], clock: Callable[[], float]) -> None:
        self._wall_clock, self._clock = wall_clock, clock
        self._seen: dict[int, tuple[Offsets, float]] = {}  # by whole seconds: and when last

    def offsets(self, ttl_seconds: float) -> Offsets:
        """Of the time in which what was noted may live. `ttl_seconds`: the longest TTL in force."""
        now = self._clock()
        offset = self._wall_clock() - now
        second = math.floor(offset)
        seen, _ = self._seen.pop(second, (Offsets(offset, offset), now))
        self._seen[second] = Offsets(min(seen.least, offset), max(seen.most, offset)), now
        spread = self._spread()
        if len(self._seen) > 1:
            kept_since = now - ttl_seconds - (spread.most - spread.least)
            self._seen = {at: one for at, one in self._seen.items() if one[1] >= kept_since}
            if len(self._seen) > SECONDS_MAX:
                del self._seen[next(iter(self._seen))]  # the one that was seen the longest ago
        return self._spread()

    def _spread(self) -> Offsets:
        seen = [offsets for offsets, _ in self._seen.values()]
        return Offsets(min(one.least for one in seen), max(one.most for one in seen))
