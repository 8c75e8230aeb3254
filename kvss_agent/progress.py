"""Progress towards one part of the desired document."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """How far the memory of a shard is, or the index of a store of tier 2."""

    state: str = "waiting"  # "allocating", "ready", "refused"; of a store also "indexing" and "off"
    reason: str = ""
    done: int = 0
    total: int = 0

    def report(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total or 0
