"""For replicas without a driver: what was sent to them, which they may have cached."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import Final

from inference_brain.maps.hits import NOTHING, Hit
from swdriver_shim.cache_map.codec import CHUNK
from swdriver_shim.keys import COLUMN_TOKENS, Prompt

COLUMNS_MAX: Final = 1 << 17  # 8 million tokens of one replica


class GuessedMap:
    """The prompts that were sent to one replica, the least recently sent forgotten first. It remembers
    every eighth column and the last one of each prompt: a guess is good for no more."""

    def __init__(self, columns_max: int = COLUMNS_MAX) -> None:
        """`columns_max`: about what the replica's cache has room for, as far as anybody knows."""
        # By key: how many columns each stands for, and their isolation tag.
        self._ends: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._columns = 0
        self._columns_max = columns_max

    def __len__(self) -> int:
        return len(self._ends)

    def sent(self, prompt: Prompt) -> None:
        """The replica computes this prompt, and may keep it."""
        count = len(prompt.keys)
        ends = [*range(CHUNK - 1, count, CHUNK), *([count - 1] if count % CHUNK else [])]
        tag, keys, there = prompt.maker.tag, prompt.keys, self._ends
        for end in reversed(ends):  # the first ones are forgotten last
            key = keys[end]
            if key in there:
                there.move_to_end(key)
            else:
                there[key] = end % CHUNK + 1, tag
                self._columns += end % CHUNK + 1
        while self._columns > self._columns_max:
            self._columns -= there.popitem(last=False)[1][0]

    def hit(self, prompt: Prompt) -> Hit:
        """How much of this prompt the replica may have."""
        keys, there = prompt.keys, self._ends
        # Whoever has one column has those before it, since they are forgotten last.
        chunks = range(CHUNK - 1, len(keys), CHUNK)
        whole = CHUNK * bisect_left(chunks, True, key=lambda end: keys[end] not in there)
        for end in range(min(len(keys), whole + CHUNK) - 1, whole - 1, -1):
            if keys[end] in there:
                whole = end + 1
                break
        return Hit(whole * COLUMN_TOKENS) if whole else NOTHING

    def forget(self, tag: bytes) -> None:
        """Of an org whose prompts were purged."""
        for key in [key for key, (_, its) in self._ends.items() if its == tag]:
            self._columns -= self._ends.pop(key)[0]
