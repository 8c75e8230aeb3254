"""Many rows of one topic as one sum, whatever series they have. Pure; it never fails for their number.

A topic keeps at most SERIES_OF_TOPIC_MAX series in a bucket. What is beyond is added to a series of the
same metric whose labels are all `other`, so sums over a metric stay right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from telemetry.cells import ADD, Cell, Cells, add_cells
from telemetry.metrics import OTHER
from telemetry.shapes import SERIES_MAX, Series, Shape

SERIES_OF_TOPIC_MAX: Final = 4 * SERIES_MAX  # of one bucket: that many rows at most
OTHERS_MAX: Final = 1024  # series whose labels are all `other`, among them

Part = tuple[Shape, Cells]


class Merged(NamedTuple):
    """A sum in parts of at most SERIES_MAX series each, and what did not fit."""

    parts: list[Part]
    folded: int = 0  # series that were added to one named `other`
    left_out: int = 0  # series for whose metric there was no room either

    def pairs(self) -> Iterator[tuple[Series, Cell]]:
        return chain.from_iterable(shape.pairs(cells) for shape, cells in self.parts)


def merge(rows: Iterable[Part]) -> Merged:
    """The sum of all of these. Fast where they have the same shape, as they mostly do."""
    by_shape: dict[bytes, tuple[Shape, list[Cells]]] = {}
    for shape, cells in rows:
        by_shape.setdefault(shape.digest, (shape, []))[1].append(cells)
    sums = [(shape, add_cells(each)) for shape, each in by_shape.values()]
    if len(sums) <= 1:
        return Merged(sums)
    found: dict[Series, list[Cell]] = {}
    for shape, cells in sums:
        for one, cell in shape.pairs(cells):
            found.setdefault(one, []).append(cell)
    folded = left_out = 0
    if len(found) > SERIES_OF_TOPIC_MAX:
        times: Counter[Series] = Counter()
        for shape, each in by_shape.values():
            times.update(dict.fromkeys(shape.series, len(each)))
        found, folded, left_out = _fold(found, times)
    return Merged(list(_parts(found)), folded, left_out)


def other_of(one: Series) -> Series:
    """What a series is added to where it has no room of its own."""
    return one._replace(labels=tuple((label, OTHER) for label, _ in one.labels))


def _fold(
    found: dict[Series, list[Cell]], times: Counter[Series]
) -> tuple[dict[Series, list[Cell]], int, int]:
    """Keep the series that were told most often: a flood of new names does not displace old ones."""
    ranked = sorted(found, key=lambda one: (-times[one], one))
    kept = {one: found[one] for one in ranked[: SERIES_OF_TOPIC_MAX - OTHERS_MAX]}
    others: set[Series] = set()
    folded = left_out = 0
    for one in ranked[SERIES_OF_TOPIC_MAX - OTHERS_MAX :]:
        other = other_of(one)
        if other not in kept:
            if len(others) >= OTHERS_MAX:
                left_out += 1
                continue
            others.add(other)
            kept[other] = []
        kept[other].extend(found[one])
        folded += 1
    return kept, folded, left_out


def _parts(found: dict[Series, list[Cell]]) -> Iterator[Part]:
    series = sorted(found)
    for start in range(0, len(series), SERIES_MAX):
        shape = Shape(series[start : start + SERIES_MAX])
        yield shape, shape.cells({one: ADD[one.kind](found[one]) for one in shape.series})
