"""Records into rows, by topic and ten seconds. Pure; what is read and written stands in `ingest`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from telemetry import topics
from telemetry.cells import ADD, Cell, Cells, add_cells
from telemetry.metrics import Kind
from telemetry.records import Record
from telemetry.shapes import SERIES_MAX, Series, Shape

BUCKET_SECONDS: Final = 10
PLANS_MAX: Final = 8192  # shapes that are remembered, with where their series go

Key = tuple[str, int]  # topic and bucket


class Row(NamedTuple):
    """What a topic was in some seconds from `bucket` on, or a part of it: rows of the same are added."""

    topic: str
    bucket: int  # seconds since 1970
    shape: Shape
    cells: Cells


Places = list[tuple[int, int]]  # the place of a cell, and the number of the series it is added to


@dataclass(slots=True)
class _Target:
    """A topic that some series of a shape are summed up in, by kind."""

    topic: str
    counters: Places
    gauges: Places
    histograms: Places


class Folder:
    """Keeps nothing but what it knows of shapes."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._plans: dict[bytes, list[_Target]] = {}
        self._shapes: dict[frozenset[int], Shape] = {}
        self._numbers: dict[Series, int] = {}  # a number is found faster than a series
        self._series: list[Series] = []

    def fold(self, records: Iterable[tuple[Record, Shape]]) -> list[Row]:
        if len(self._plans) > PLANS_MAX or len(self._shapes) > PLANS_MAX:
            self._forget()
        own: dict[tuple[str, int, bytes], tuple[Shape, list[Cells]]] = {}
        wide: dict[Key, dict[int, list[Cell]]] = {}
        for record, shape in records:
            bucket = bucket_of(record.at)
            key = (topics.of_source(record.kind, record.name), bucket, shape.digest)
            own.setdefault(key, (shape, []))[1].append(record.cells)
            for target in self._plan(shape):
                _widen(wide.setdefault((target.topic, bucket), {}), target, record.cells)
        rows = [
            Row(topic, bucket, shape, add_cells(each))
            for (topic, bucket, _), (shape, each) in own.items()
        ]
        return rows + [row for key, values in wide.items() for row in self._rows(key, values)]

    def _plan(self, shape: Shape) -> list[_Target]:
        plan = self._plans.get(shape.digest)
        if plan is None:
            found: dict[str, _Target] = {}
            places = dict.fromkeys(Kind, 0)
            for one in shape.series:
                place, places[one.kind] = places[one.kind], places[one.kind] + 1
                for topic, series in topics.wider(one):
                    target = found.setdefault(topic, _Target(topic, [], [], []))
                    kinds = (target.counters, target.gauges, target.histograms)
                    kinds[one.kind].append((place, self._number(series)))
            plan = self._plans[shape.digest] = list(found.values())
        return plan

    def _number(self, series: Series) -> int:
        number = self._numbers.setdefault(series, len(self._series))
        if number == len(self._series):
            self._series.append(series)
        return number

    def _rows(self, key: Key, found: Mapping[int, list[Cell]]) -> Iterator[Row]:
        """One as a rule; more where there are very many series."""
        numbers = sorted(found)
        for start in range(0, len(numbers), SERIES_MAX):
            some = numbers[start : start + SERIES_MAX]
            shape = self._shape(frozenset(some))
            each = [(self._series[one], found[one]) for one in some]
            yield Row(*key, shape, shape.cells({one: ADD[one.kind](its) for one, its in each}))

    def _shape(self, numbers: frozenset[int]) -> Shape:
        shape = self._shapes.get(numbers)
        if shape is None:
            shape = self._shapes[numbers] = Shape(self._series[one] for one in numbers)
        return shape


def _widen(found: dict[int, list[Cell]], target: _Target, cells: Cells) -> None:
    """Put each cell to those that it will be added to: at once, which is faster than one by one."""
    for places, its in (
        (target.counters, cells.counters),
        (target.gauges, cells.gauges),
        (target.histograms, cells.histograms),
    ):
        for place, number in places:
            if number in found:
                found[number].append(its[place])
            else:
                found[number] = [its[place]]


def bucket_of(at: float, seconds: int = BUCKET_SECONDS) -> int:
    return int(at) // seconds * seconds
