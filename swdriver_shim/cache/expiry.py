"""When the sweeper checks which column: in the second in which it may have expired, or earlier."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from swdriver_shim import loops
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.policy import NEVER

LOOK_AHEAD_SECONDS: Final = 3600  # columns that expire later are checked earlier: it bounds the seconds


class ExpirySchedule:
    def __init__(self) -> None:
        self._due: dict[int, dict[Column, None]] = {}  # by second
        self._seconds: list[int] = []  # a heap of those
        self._swept_at = 0.0
        self._to_reschedule: deque[list[Column]] = deque()

    def second(self, column: Column) -> int:
        """The first second in which the column may have expired, or an earlier one; 0 for never."""
        expires_at = column.expires_at
        if expires_at == NEVER:
            return 0
        return max(1, math.ceil(min(expires_at, self._swept_at + LOOK_AHEAD_SECONDS)))

    def schedule(self, column: Column) -> None:
        self.put(column, self.second(column))

    def put(self, column: Column, second: int) -> None:
        """Schedule the column for this second; 0 for never."""
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

    def put_all(self, columns: list[Column], second: int) -> None:
        """Schedule these columns for this second, behind the others of it; 0 for never."""
        if any(loops.current.runs_of(columns, "due")):
            for column in columns:
                if column.due:
                    del self._due[column.due][column]
        loops.current.put(columns, "due", second)
        if second:
            due = self._due.get(second)
            if due is None:
                due = self._due[second] = {}
                heapq.heappush(self._seconds, second)
            due.update(dict.fromkeys(columns))

    def reschedule(self, columns: Iterable[Column]) -> None:
        """The policy of these columns has changed. `catch_up` reschedules them, in pieces."""
        if some := list(columns):
            self._to_reschedule.append(some)

    @property
    def is_behind(self) -> bool:
        return bool(self._to_reschedule)

    def catch_up(self, most: int) -> int:
        """Reschedule up to so many columns; returns how many."""
        left = most
        while self._to_reschedule and left > 0:
            piece = self._to_reschedule[0][-left:]
            for column in piece:
                if column.state is State.READY:
                    self.schedule(column)
            left -= len(piece)
            del self._to_reschedule[0][-len(piece) :]
            if not self._to_reschedule[0]:
                self._to_reschedule.popleft()
        return most - left

    def take(self, now: float, most: int) -> list[Column]:
        """Columns that are due."""
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
