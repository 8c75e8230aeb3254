"""What waits to be sent to one viewer. Pure.

It never grows beyond a few frames of each topic, which all viewers share: who reads slowly misses some,
sees that by the sequence, and asks for a snapshot. So a stalled browser costs next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from console.live.messages import Frame

WAITING_MAX: Final = 8  # frames of a topic


class Outbox:
    def __init__(self) -> None:
        self.skipped = 0
        self._waiting: dict[str, deque[Frame]] = {}

    def put(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            waiting = self._waiting.setdefault(frame.topic, deque(maxlen=WAITING_MAX))
            self.skipped += len(waiting) == WAITING_MAX
            waiting.append(frame)

    def drop(self, topic: str) -> None:
        self._waiting.pop(topic, None)

    def take(self) -> list[Frame]:
        """All of it, each topic's in order."""
        taken = [frame for waiting in self._waiting.values() for frame in waiting]
        self._waiting.clear()
        return taken

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
