"""Records into rows, by topic and ten seconds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from telemetry import topics
from telemetry.cells import ADD, Cell, Cells, add_cells
from telemetry.ingest.quotas import Quotas
from telemetry.metrics import Kind
from telemetry.records import Record
from telemetry.shapes import SERIES_MAX, Series, Shape
from telemetry.store.merge import other_of

BUCKET_SECONDS: Final = 10
PLANS_MAX: Final = 8192  # shapes that are remembered, with where their series go, or of rows;
SERIES_KEPT: Final = 2_000_000  # and how many series their targets, or those of rows, may have together

Key = tuple[str, int]  # topic and bucket


class Row(NamedTuple):
    """What a topic was in some seconds from `bucket` on, or a part of it: rows of the same are added."""

    topic: str
    bucket: int  # seconds since 1970
    shape: Shape
    cells: Cells


_Each = tuple[list[int], list[int], list[int]]  # by kind


class _Target(NamedTuple):
    """A topic that some series of a shape are summed up in: which places of its cells, by kind, and the
    number of the series that each is added to. Shapes of nodes that are alike have the same."""

    topic: str
    places: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[int, ...], ...]


class Folder:
    """Remembers plans of shapes, and what sources have used of their quotas."""

    def __init__(self, quotas: Quotas | None = None) -> None:
        self.over_quota: Counter[tuple[str, str]] = Counter()  # by what was too much, and by source
        self._quotas = quotas or Quotas()
        self._hour = -1
        self._forget()

    def _forget(self) -> None:
        """Forget all that can be computed again. Quotas can't."""
        # Where numbers of a source and shape go, as its quotas allow. None: nowhere.
        self._allowed: dict[tuple[str, bytes], list[int] | None] = {}
        self._plans: dict[bytes, list[int]] = {}
        self._targets: dict[_Target, int] = {}  # a number is found faster than what it stands for
        self._target: list[_Target] = []
        self._targeted = 0  # series of those: each hour's quotas may make new ones of the same plans
        self._numbers: dict[Series, int] = {}
        self._series: list[Series] = []
        self._hashes: list[int] = []  # of those: what quotas know them by
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._shapes: dict[frozenset[int], Shape] = {}  # of rows
        self._shaped = 0  # series of those

    def fold(
        self,
        records: Iterable[tuple[Record, Shape]],
        now: float,
        former: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Row]:
        """Add up records by topic and bucket. What is beyond the quota of a source is counted in
        `over_quota`: each record of a shape, and topics and series once for each shape. `former`: until
        when topics were somebody else's, for whom nothing is added up any more."""
        if len(self._plans) > PLANS_MAX or self._targeted > SERIES_KEPT:
            self._forget()
        if len(self._shapes) > PLANS_MAX or self._shaped > SERIES_KEPT:
            self._forget_rows()
        self._quotas.begin(now)
        if self._quotas.hour != self._hour:
            self._hour = self._quotas.hour
            self._allowed.clear()
        own: dict[tuple[str, int, bytes], tuple[Shape, list[Cells]]] = {}
        alike: dict[tuple[int, int], list[Cells]] = {}
        allowed = self._allowed
        for record, shape in records:
            bucket = bucket_of(record.at)
            topic = topics.of_source(record.kind, record.name)
            key = (topic, shape.digest)
            targets = allowed[key] if key in allowed else self._allow(topic, shape)
            if targets is None:
                self.over_quota["shapes", topic] += 1
                continue
            own.setdefault((topic, bucket, shape.digest), (shape, []))[1].append(record.cells)
            for number in targets:
                if former and record.at < former.get(self._target[number].topic, 0.0):
                    continue
                alike.setdefault((number, bucket), []).append(record.cells)
        wide: dict[Key, dict[int, list[Cell]]] = {}
        for (number, bucket), each in alike.items():
            target = self._target[number]
            _widen(wide.setdefault((target.topic, bucket), {}), target, each)
        rows = [
            Row(topic, bucket, shape, add_cells(each))
            for (topic, bucket, _), (shape, each) in own.items()
        ]
        return rows + [row for key, values in wide.items() for row in self._rows(key, values)]

    def _allow(self, source: str, shape: Shape) -> list[int] | None:
        """The further targets of this source's numbers that its quotas allow; None: not even its own."""
        targets = self._allowed[source, shape.digest] = self._within_quotas(source, shape)
        return targets

    def _within_quotas(self, source: str, shape: Shape) -> list[int] | None:
        if not self._quotas.admits_shape(source, shape.digest, len(shape.series)):
            return None
        allowed = []
        for number in self._plan(shape):
            target = self._target[number]
            if not self._quotas.admits_topic(source, target.topic):
                self.over_quota["topics", source] += 1
                continue
            series = {self._hashes[one]: one for numbers in target.numbers for one in numbers}
            if refused := self._quotas.refused(source, target.topic, series.keys()):
                self.over_quota["series", source] += len(refused)
                without = self._without(target, {series[one] for one in refused})
                number = self._number_of(without)
            allowed.append(number)
        return allowed

    def _without(self, target: _Target, refused: set[int]) -> _Target:
        """This target with the refused series summed up under `other`."""
        return target._replace(
            numbers=tuple(
                tuple(
                    self._number(other_of(self._series[one])) if one in refused else one
                    for one in numbers
                )
                for numbers in target.numbers
            )
        )

    def _plan(self, shape: Shape) -> list[int]:
        plan = self._plans.get(shape.digest)
        if plan is None:
            found: dict[str, tuple[_Each, _Each]] = {}
            places = dict.fromkeys(Kind, 0)
            for one in shape.series:
                place, places[one.kind] = places[one.kind], places[one.kind] + 1
                for topic, series in topics.wider(one):
                    if topic not in found:
                        found[topic] = ([], [], []), ([], [], [])
                    its, numbers = found[topic]
                    its[one.kind].append(place)
                    numbers[one.kind].append(self._number(series))
            plan = self._plans[shape.digest] = [
                self._number_of(_Target(topic, tuple(map(tuple, its)), tuple(map(tuple, numbers))))
                for topic, (its, numbers) in found.items()
            ]
        return plan

    def _number_of(self, target: _Target) -> int:
        number = self._targets.setdefault(target, len(self._target))
        if number == len(self._target):
            self._target.append(target)
            self._targeted += sum(map(len, target.numbers))
        return number

    def _number(self, series: Series) -> int:
        number = self._numbers.setdefault(series, len(self._series))
        if number == len(self._series):
            self._series.append(series)
            self._hashes.append(hash(series))
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
            self._shaped += len(numbers)
        return shape


def _widen(found: dict[int, list[Cell]], target: _Target, each: Sequence[Cells]) -> None:
    """Add up what is alike, column by column, and put it to what else is of the same series."""
    for kind, places, numbers in zip(Kind, target.places, target.numbers, strict=True):
        cells, add = [one.of(kind) for one in each], ADD[kind]
        for place, number in zip(places, numbers, strict=True):
            found.setdefault(number, []).append(add([its[place] for its in cells]))


def bucket_of(at: float, seconds: int = BUCKET_SECONDS) -> int:
    return int(at) // seconds * seconds
