"""When the sweeper checks which column: in the second in which it may have expired, or earlier."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from swdriver_shim import loops
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.policy import NEVER

LOOK_AHEAD_SECONDS: Final = 3600  # columns that expire later are checked earlier: it bounds the seconds
PART_MAX: Final = 1 << 14  # columns of a second that are in one part, and those of one store more


class ExpirySchedule:
    def __init__(self) -> None:
        # By second, in parts, the newest last: a dict that grows is copied.
        self._due: dict[int, list[dict[Column, None]]] = {}
        self._seconds: list[int] = []  # a heap of those
        self._swept_at = 0.0
        self._to_reschedule: deque[Iterator[list[Column]]] = deque()
        self._piece: list[Column] = []  # of the first of these

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
            self._remove([column], column.due)
        column.due = second
        if second:
            self._newest(second)[column] = None

    def put_all(self, columns: list[Column], second: int) -> None:
        """Schedule these columns for this second, behind the others of it; 0 for never."""
        before = loops.current.runs_of(columns, "due")
        if len(before) == 1 and before[0]:
            self._remove(columns, before[0])
        elif any(before):
            for column in columns:
                if column.due:
                    self._remove([column], column.due)
        loops.current.put(columns, "due", second)
        if second:
            loops.current.put_new(self._newest(second), columns, None)

    def _remove(self, columns: list[Column], second: int) -> None:
        """These are all scheduled for this second."""
        for part in self._due[second]:
            loops.current.drop_known(part, columns)

    def _newest(self, second: int) -> dict[Column, None]:
        """Where the next columns of this second belong."""
        parts = self._due.get(second)
        if parts is None:
            parts = self._due[second] = []
            heapq.heappush(self._seconds, second)
        if not parts or len(parts[-1]) >= PART_MAX:
            parts.append({})
        return parts[-1]

    def reschedule(self, pieces: Iterator[list[Column]]) -> None:
        """The policy of these columns has changed. `catch_up` reschedules them, and makes each of the
        lists when those before it are done."""
        self._to_reschedule.append(pieces)

    @property
    def is_behind(self) -> bool:
        return bool(self._to_reschedule)

    def catch_up(self, most: int) -> int:
        """Reschedule up to so many columns; returns how many. To make a list counts as one."""
        left = most
        while self._to_reschedule and left > 0:
            some = self._piece[-left:]
            del self._piece[len(self._piece) - len(some) :]
            for column in some:
                if column.state is State.READY:
                    self.schedule(column)
            left -= len(some)
            if not self._piece and left > 0:
                left -= 1
                piece = next(self._to_reschedule[0], None)
                if piece is None:
                    self._to_reschedule.popleft()
                else:
                    self._piece = piece
        return most - left

    def take(self, now: float, most: int) -> list[Column]:
        """Columns that are due."""
        self._swept_at = now
        taken: list[Column] = []
        while self._seconds and self._seconds[0] <= now and len(taken) < most:
            parts = self._due[self._seconds[0]]
            while parts and len(taken) < most:
                if not parts[-1]:
                    parts.pop()
                    continue
                column, _ = parts[-1].popitem()
                column.due = 0
                taken.append(column)
            if not parts:
                del self._due[heapq.heappop(self._seconds)]
        return taken
