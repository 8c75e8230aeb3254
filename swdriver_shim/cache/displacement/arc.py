"""Adaptive replacement (Megiddo and Modha, 2003), leaf-first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import ceil

from swdriver_shim.cache.displacement.base import C, DisplacementPolicy
from swdriver_shim.cache.displacement.leaves import Leaves


class Arc(DisplacementPolicy[C]):
    """Displaces the least recently used of those used once, or of those used more often.

    How many of the first are kept follows from which of the displaced come back: their keys are
    remembered. `mark` is this queue for columns that were used more than once.
    """

    name = "arc"
    __slots__ = ("_often", "_often_count", "_often_gone", "_once", "_once_gone", "_wanted")

    def __init__(self) -> None:
        super().__init__()
        self._once = Leaves[C](lambda column: None if column.mark is self else column.used_at)
        self._often = Leaves[C](lambda column: column.used_at if column.mark is self else None)
        self._often_count = 0
        self._wanted = 0.0  # how many of those used once there should be
        self._once_gone: OrderedDict[bytes, None] = OrderedDict()  # longest ago first
        self._often_gone: OrderedDict[bytes, None] = OrderedDict()

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        once, often = self._once_gone, self._often_gone
        if column.key in once:
            self._wanted = min(self._count, self._wanted + max(1.0, len(often) / len(once)))
            del once[column.key]
            self._promote(column)
        elif column.key in often:
            self._wanted = max(0.0, self._wanted - max(1.0, len(once) / len(often)))
            del often[column.key]
            self._promote(column)
        elif column.uses:  # it comes from another policy
            self._promote(column)
        if not column.ref_count:
            self.leaf(column)

    def used(self, path: Sequence[C], now: float) -> None:
        for column in path:
            if column.mark is not self:
                self._promote(column)

    def leaf(self, column: C) -> None:
        (self._often if column.mark is self else self._once).put(column)

    def victim(self, now: float) -> C | None:
        column = None
        if self._count - self._often_count > self._wanted:
            column = self._once.first()
        return column or self._often.first() or self._once.first()

    def victims(self, now: float, most: int) -> list[C]:
        beyond = ceil(self._count - self._often_count - self._wanted)  # of those used once
        run = self._once.run(min(most, beyond)) if beyond > 0 else []
        return run or self._often.run(most) or self._once.run(1)

    def displaced(self, run: Sequence[C], now: float) -> None:
        for column in run:
            gone = self._often_gone if column.mark is self else self._once_gone
            gone[column.key] = None
            self.removed(column)

    def removed(self, column: C) -> None:
        self._count -= 1
        self._often_count -= column.mark is self
        self._once.drop(column)
        self._often.drop(column)
        self._forget()

    def _forget(self) -> None:
        """As many are remembered as are here; of those used once, as many as were used more often."""
        once, often = self._once_gone, self._often_gone
        while len(once) > self._often_count + 1:
            once.popitem(last=False)
        while len(once) + len(often) > self._count + 1:
            (often or once).popitem(last=False)

    def _promote(self, column: C) -> None:
        column.mark = self
        self._often_count += 1
