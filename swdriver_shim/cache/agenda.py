"""When the sweeper looks at which column: in the second in which it may have expired, or before that."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.policy import NEVER

LOOK_AHEAD_SECONDS: Final = 3600  # what expires later is looked at before: no longer a list of seconds


class Agenda:
    def __init__(self) -> None:
        self._due: dict[int, dict[Column, None]] = {}  # by the second
        self._seconds: list[int] = []  # a heap of those
        self._swept_at = 0.0
        self._anew: deque[list[Column]] = deque()

    def second(self, column: Column) -> int:
        """The first in which it may have expired, or one before that; 0 for never."""
        expires_at = column.expires_at
        if expires_at == NEVER:
            return 0
        return max(1, math.ceil(min(expires_at, self._swept_at + LOOK_AHEAD_SECONDS)))

    def schedule(self, column: Column) -> None:
        self.put(column, self.second(column))

    def put(self, column: Column, second: int) -> None:
        """Have it looked at in this second; 0 for never."""
        if column.due == second:
            return
        if column.due:
            del self._due[column.due][column]
        column.due = second
        if not second:
            return
        due = self._due.get(second)
        if due is None:
            due = self._due[second] = {}
            heapq.heappush(self._seconds, second)
        due[column] = None

    def schedule_anew(self, columns: Iterable[Column]) -> None:
        """Their policy is another one. `catch_up` goes through them."""
        if some := list(columns):
            self._anew.append(some)

    @property
    def is_behind(self) -> bool:
        return bool(self._anew)

    def catch_up(self, most: int) -> int:
        """How many columns were looked at."""
        left = most
        while self._anew and left > 0:
            piece = self._anew[0][-left:]
            for column in piece:
                if column.state is State.READY:
                    self.schedule(column)
            left -= len(piece)
            del self._anew[0][-len(piece) :]
            if not self._anew[0]:
                self._anew.popleft()
        return most - left

    def take(self, now: float, most: int) -> list[Column]:
        """Columns that are to be looked at now."""
        self._swept_at = now
        taken: list[Column] = []
        while self._seconds and self._seconds[0] <= now and len(taken) < most:
            due = self._due[self._seconds[0]]
            while due and len(taken) < most:
                column, _ = due.popitem()
                column.due = 0
                taken.append(column)
            if not due:
                del self._due[heapq.heappop(self._seconds)]
        return taken
