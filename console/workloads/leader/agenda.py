"""Which workloads are to be looked at, and when."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

ALL: Final = ""  # in the queue of news: every workload


class News:
    """What has to be looked at, from any thread, in the order in which it came."""

    def __init__(self) -> None:
        self._names: deque[str] = deque()
        self._lock = threading.Lock()
        self._there = threading.Event()

    def add(self, name: str | None) -> None:
        with self._lock:
            if (name or ALL) not in self._names:
                self._names.append(name or ALL)
        self._there.set()

    def take(self, seconds: float) -> list[str]:
        """Wait so long for some."""
        self._there.wait(seconds)
        with self._lock:
            found = list(self._names)
            self._names.clear()
            self._there.clear()
        return found


class Agenda:
    """When each workload is to be looked at. Used by one thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}

    def add(self, names: Iterable[str], at: float = 0.0) -> None:
        """Look at these then, or earlier if that is planned."""
        for one in names:
            if at < self._due_at.get(one, float("inf")):
                self._due_at[one] = at
                heapq.heappush(self._due, (at, one))

    def take(self, now: float) -> list[str]:
        """Those that are due."""
        found = []
        while self._due and self._due[0][0] <= now:
            at, name = heapq.heappop(self._due)
            if self._due_at.get(name) == at:
                del self._due_at[name]
                found.append(name)
        return found

    def seconds_left(self, now: float, most: float) -> float:
        """Until the next one is due."""
        return max(0.0, min(self._due[0][0] - now, most)) if self._due else most

    def forget(self, name: str) -> None:
        self._due_at.pop(name, None)

    def clear(self) -> None:
        self._due.clear()
        self._due_at.clear()
