"""Prefixes that were sent to replicas: what they will have by the time the next request gets there.

Cache maps are a second behind, and a request that is still computed is in none. So until its first token
is expected, and as long as maps take, what was sent counts as stored. Where a replica has no map, its
cache is guessed at in this way, for longer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from swdriver_shim.keys import COLUMN_TOKENS

STEP: Final = 8  # columns: only the last key of so many is kept
KEYS_MAX: Final = 1 << 17


class SentPrefixes:
    """Bounded: the keys that were sent longest ago are forgotten.

    A replica that was sent a prefix was sent all shorter ones, and those count for at least as long. So
    how deep a replica goes is found by halves, whatever the prompt's length.
    """

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
        for key in reversed(keys[STEP - 1 :: STEP]):  # the shortest prefix is forgotten last
            there = sent.setdefault(key, {})
            there[replica] = max(until, there.get(replica, until))
            sent.move_to_end(key)
        while len(sent) > self._keys_max:
            sent.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as after a purge."""
        self._sent.clear()

    def hits(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """How many tokens of a prompt with these columns each replica was sent; without those that were
        sent nothing of it. Forgets what of it does not count any more."""
        chain: list[tuple[bytes, dict[str, float]]] = []  # replicas, by prefix
        for key in keys[STEP - 1 :: STEP]:
            there = self._sent.get(key)
            if there is None:
                break
            chain.append((key, there))
        found: dict[str, int] = {}
        for replica in [*chain[0][1]] if chain else ():
            depth = _depth(chain, replica, now)
            if depth:
                found[replica] = depth * STEP * COLUMN_TOKENS
            for _, there in chain[depth:]:
                if there.pop(replica, None) is None:
                    break
        for key, there in chain:
            if not there:
                del self._sent[key]
        return found


def _depth(chain: Sequence[tuple[bytes, dict[str, float]]], replica: str, now: float) -> int:
    """How many of these prefixes count at a replica."""
    least, most = 0, len(chain)
    at = most - 1  # mostly all of them
    while least < most:
        if chain[at][1].get(replica, -math.inf) >= now:
            least = at + 1
        else:
            most = at
        at = (least + most) // 2
    return least
