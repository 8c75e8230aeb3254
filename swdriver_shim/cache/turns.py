"""Which prompt of its conversation a prompt is, told by where earlier prompts of its org ended.

A prompt that goes on behind the end of another is the turn after it. No session has to be named for
that, and it is known whether or not the columns of the turns before are still stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

ENDS_MAX: Final = 1 << 13  # of an org: so many conversations are told apart, 1.6 megabytes
TURN_MAX: Final = 100


class Turns:
    """Of one org. Ends of prompts are keys of their last whole columns. Bounded: those that were asked
    for longest ago are dropped."""

    __slots__ = ("_ends", "_ends_max")

    def __init__(self, ends_max: int = ENDS_MAX) -> None:
        self._ends_max = ends_max
        self._ends: OrderedDict[bytes, int] = OrderedDict()  # the turn of each, the oldest first

    def __len__(self) -> int:
        return len(self._ends)

    def asked(self, keys: Sequence[bytes]) -> int:
        """The turn of a prompt that is asked for now: 0 for the first of its conversation. It is the
        same for a prompt that is asked for again.

        What it goes on behind is no end any more. So a beginning that many conversations share, and that
        was once asked for alone, makes one of them a turn older and not all.
        """
        if not keys:
            return 0
        ends, last = self._ends, keys[-1]
        turn = ends.pop(last, None)
        if turn is None:
            before = self._end(keys)
            turn = 0 if before is None else min(ends.pop(before) + 1, TURN_MAX)
        ends[last] = turn
        if len(ends) > self._ends_max:
            ends.popitem(last=False)
        return turn

    def of(self, keys: Sequence[bytes]) -> int:
        """The turn of a prompt that was asked for before: it may have been answered since."""
        end = self._end(keys)
        return 0 if end is None else self._ends[end]

    def clear(self) -> None:
        """After a purge."""
        self._ends.clear()

    def _end(self, keys: Sequence[bytes]) -> bytes | None:
        """The last of these that a prompt ended with."""
        return next(filter(self._ends.__contains__, reversed(keys)), None)
