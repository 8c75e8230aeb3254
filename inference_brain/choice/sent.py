"""Prefixes that were sent to replicas: what they will have by the time the next request gets there.

Cache maps are a second behind, and a request that is still computed is in none. So until its first token
is expected, and as long as maps take, what was sent counts as stored. Where a replica has no map, its
cache is guessed at in this way, for longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from swdriver_shim.keys import COLUMN_TOKENS

STEP: Final = 8  # columns: only the last key of so many is kept
KEYS_MAX: Final = 1 << 17


class SentPrefixes:
    """Bounded: the keys that were sent longest ago are forgotten."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        if keys_max < 1:
            raise ValueError("at least one key is kept")
        self._keys_max = keys_max
        self._sent: OrderedDict[bytes, dict[str, float]] = OrderedDict()  # until when, by replica

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, replica: str, keys: Sequence[bytes], until: float) -> None:
        """A prompt with these columns was sent to a replica. It counts as stored until then."""
        sent = self._sent
        for key in keys[STEP - 1 :: STEP]:
            there = sent.setdefault(key, {})
            there[replica] = max(until, there.get(replica, until))
            sent.move_to_end(key)
        while len(sent) > self._keys_max:
            sent.popitem(last=False)

    def drop(self, replica: str, keys: Sequence[bytes]) -> None:
        """It was not computed there after all, or is not there any more."""
        for key in keys[STEP - 1 :: STEP]:
            if there := self._sent.get(key):
                there.pop(replica, None)
                if not there:
                    del self._sent[key]

    def clear(self) -> None:
        """Forget everything, as after a purge."""
        self._sent.clear()

    def hits(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """How many tokens of a prompt with these columns each replica was sent; without those that were
        sent nothing of it."""
        found: dict[str, int] = {}
        for depth, key in enumerate(keys[STEP - 1 :: STEP]):
            there = self._sent.get(key)
            if not there:
                break
            goes_on = False
            for replica, until in there.items():
                if until >= now and found.get(replica, 0) == depth:
                    found[replica] = depth + 1
                    goes_on = True
            if not goes_on:
                break
        return {replica: depth * STEP * COLUMN_TOKENS for replica, depth in found.items()}
