"""Displacement policies of the literature, leaf-first, to compare with. The product has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from swdriver_shim.cache.displacement.base import C, DisplacementPolicy
from swdriver_shim.cache.displacement.leaves import Leaves


class Sieve(DisplacementPolicy[C]):
    """First in, first out; columns that were used meanwhile are passed by, once (Zhang and others 2024).

    `mark`: the lap of the hand that it waits for, its place in the queue, and its uses at that time.
    """

    name = "sieve"
    __slots__ = ("_lap", "_leaves", "_places")

    def __init__(self) -> None:
        super().__init__()
        self._leaves = Leaves[C](lambda column: column.mark[:2])
        self._lap = 0
        self._places = 0

    def stored(self, column: C, now: float) -> None:  # noqa: ARG002
        self._count += 1
        self._places += 1
        column.mark = (self._lap, self._places, column.uses)
        if not column.ref_count:
            self._leaves.put(column)

    def used(self, path: Sequence[C], now: float) -> None:
        """`uses` is all that is needed."""

    def leaf(self, column: C) -> None:
        self._leaves.put(column)

    def victim(self, now: float) -> C | None:  # noqa: ARG002
        while (column := self._leaves.first()) is not None and column.uses > column.mark[2]:
            self._lap = max(self._lap, column.mark[0])
            column.mark = (self._lap + 1, column.mark[1], column.uses)
        if column is not None:
            self._lap = max(self._lap, column.mark[0])
        return column

    def removed(self, column: C) -> None:
        self._count -= 1
        self._leaves.drop(column)


_AGES: Final = 64
_CLASSES: Final = 8
_SAMPLED: Final = 8
_FADES: Final = 0.9


class Lhd(DisplacementPolicy[C]):
    """Least hit density (Beckmann, Chen, Cidon 2018), as far as leaf-first goes: the lowest of a few
    leaves drawn by chance. Age is counted in columns stored, in steps of a share of their number;
    classes are the age at the last use. `mark`: when it was used last, and its class."""

    name = "lhd"
    __slots__ = ("_clock", "_density", "_dice", "_events", "_gone", "_hits", "_leaves", "_places")

    def __init__(self) -> None:
        super().__init__()
        self._dice = Random(1)
        self._clock = 0
        self._events = 0
        self._leaves: list[C] = []
        self._places: dict[C, int] = {}
        self._hits = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._gone = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._density = [
            [(1 + _CLASSES - each) / (1 + age) for age in range(_AGES)] for each in range(_CLASSES)
        ]

    def stored(self, column: C, now: float) -> None:  # noqa: ARG002
        self._count += 1
        self._clock += 1
        column.mark = (self._clock, _CLASSES - 1)
        self._event()
        if not column.ref_count:
            self.leaf(column)

    def used(self, path: Sequence[C], now: float) -> None:  # noqa: ARG002
        for column in path:
            at, was = column.mark
            age = self._age(at)
            self._hits[was][age] += 1
            column.mark = (self._clock, min(_CLASSES - 2, age.bit_length()))

    def leaf(self, column: C) -> None:
        if column not in self._places:
            self._places[column] = len(self._leaves)
            self._leaves.append(column)

    def victim(self, now: float) -> C | None:  # noqa: ARG002
        least: tuple[float, int] | None = None
        found: C | None = None
        tries = 0
        while self._leaves and tries < _SAMPLED:
            column = self._leaves[self._dice.randrange(len(self._leaves))]
            if column.ref_count:
                self._drop(column)
                continue
            tries += 1
            at, each = column.mark
            rank = (self._density[each][self._age(at)], -column.needs)
            if least is None or rank < least:
                least, found = rank, column
        if found is not None:  # it stays the victim until it is removed
            last = self._places[found]
            self._leaves[last], self._leaves[-1] = self._leaves[-1], found
            self._places[self._leaves[last]] = last
            self._places[found] = len(self._leaves) - 1
        return found

    def removed(self, column: C) -> None:
        self._count -= 1
        at, each = column.mark
        self._gone[each][self._age(at)] += 1
        self._drop(column)

    def _age(self, at: int) -> int:
        return min(_AGES - 1, 16 * (self._clock - at) // (self._count + 1))

    def _drop(self, column: C) -> None:
        place = self._places.pop(column, None)
        if place is None:
            return
        last = self._leaves.pop()
        if last is not column:
            self._leaves[place] = last
            self._places[last] = place

    def _event(self) -> None:
        self._events += 1
        if self._events < max(256, self._count):
            return
        self._events = 0
        for each in range(_CLASSES):
            hits = lives = events = 0.0
            for age in range(_AGES - 1, -1, -1):
                hits += self._hits[each][age]
                events += self._hits[each][age] + self._gone[each][age]
                lives += events
                if lives:
                    self._density[each][age] = hits / lives
                self._hits[each][age] *= _FADES
                self._gone[each][age] *= _FADES


CANDIDATES: Final = {one.name: one for one in (Sieve, Lhd)}
