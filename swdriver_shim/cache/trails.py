"""The last prompts of conversations, as keys, and how they came back: what promotion predicts from.

No tokens, no clock and no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swdriver_shim.keys import Keys

TRAILS_MAX: Final = 4096
KEYS_MAX: Final = 1 << 19  # of all trails together: eight megabytes


@dataclass(slots=True, eq=False)
class Trail:
    """The last prompt of a conversation, or one that is repeated."""

    maker: Keys
    raw_keys: bytes
    leaf: bytes  # its last key
    name: bytes  # the first leaf; the same for all prompts of the conversation
    first_used_at: float
    used_at: float
    kind: int
    uses: int = 1
    is_tried: bool = False  # all that could be was promoted since the last use

    @property
    def columns(self) -> int:
        return len(self.raw_keys) // len(self.leaf)


class Trails:
    """Bounded: those that were used longest ago are dropped."""

    def __init__(self, trails_max: int = TRAILS_MAX, keys_max: int = KEYS_MAX) -> None:
        self._trails_max = trails_max
        self._keys_max = keys_max
        self._trails: OrderedDict[bytes, Trail] = OrderedDict()  # by leaf, the oldest first
        self._keys = 0

    def __len__(self) -> int:
        return len(self._trails)

    def all(self) -> list[Trail]:
        """The oldest first."""
        return list(self._trails.values())

    def find(self, leaf: bytes) -> Trail | None:
        return self._trails.get(leaf)

    def take(self, keys: Sequence[bytes]) -> Trail | None:
        """Remove and return the trail that a prompt with these keys continues, or repeats."""
        found = next(filter(None, map(self._trails.get, reversed(keys))), None)
        if found:
            self._drop(found)
        return found

    def add(self, trail: Trail) -> None:
        """In place of one with the same leaf."""
        if before := self._trails.get(trail.leaf):
            self._drop(before)
        self._trails[trail.leaf] = trail
        self._keys += trail.columns
        while len(self._trails) > self._trails_max or self._keys > self._keys_max:
            self._drop(next(iter(self._trails.values())))

    def forget(self, org: str) -> None:
        """The org was purged, or its policy allows less."""
        for trail in [trail for trail in self._trails.values() if trail.maker.org == org]:
            self._drop(trail)

    def clear(self) -> None:
        self._trails.clear()
        self._keys = 0

    def _drop(self, trail: Trail) -> None:
        del self._trails[trail.leaf]
        self._keys -= trail.columns
