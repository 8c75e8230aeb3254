"""Records become rows by topic: whatever their shapes, sums are those of one number after the other."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import topics
from telemetry.cells import ADD, Cell, Cells
from telemetry.ingest import quotas
from telemetry.ingest.folder import Folder, bucket_of
from telemetry.metrics import Kind
from telemetry.records import FIELD, Record, decode
from telemetry.shapes import Series, Shape

LABELS: list[tuple[tuple[str, str], ...]] = [
    (),
    (("org", "acme"), ("tier", "dram")),
    (("org", "globex"), ("tier", "dram")),
    (("org", "other"),),
    (("shard", "a"),),
    (("shard", "b"),),
    (("stream", "full.0"), ("session", "chat"), ("node", "ax1"), ("tier", "spine")),
    (("stream", "full.1"), ("session", "chat"), ("node", "ax2"), ("tier", "spine")),
]
NUMBERS = st.integers(0, 1000)
CELLS: dict[Kind, st.SearchStrategy[Cell]] = {
    Kind.COUNTER: NUMBERS,
    Kind.GAUGE: st.tuples(NUMBERS, st.integers(0, 60), NUMBERS).map(
        lambda gauge: gauge if gauge[1] else (0, 0, 0)
    ),
    # The first and the last bucket of what is told are not empty.
    Kind.HISTOGRAM: st.just([])
    | st.tuples(NUMBERS, st.integers(0, 100), st.lists(st.integers(1, 9), min_size=1, max_size=5)).map(
        lambda cell: [cell[0], cell[1], *cell[2]]
    ),
}
SERIES = st.builds(Series, st.sampled_from(list(Kind)), st.just("x"), st.sampled_from(LABELS))
SHAPES = st.lists(SERIES, unique=True, min_size=1, max_size=12).map(Shape)


@st.composite
def records(draw: st.DrawFn) -> list[tuple[Record, Shape]]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    made = []
    for sequence in range(1, draw(st.integers(1, 8)) + 1):
        shape = draw(st.sampled_from(shapes))
        cells = shape.cells({one: draw(CELLS[one.kind]) for one in shape.series})
        name, at = draw(st.sampled_from(["ax1", "ax2"])), draw(st.sampled_from([1000.0, 1005.0, 1010.0]))
        told = Record(name, sequence, "agent", name, "1", "host", 1, 1.0, at, shape.digest, cells)
        made.append((decode({FIELD: told.encode()}), shape))
    return made


def one_by_one(told: list[tuple[Record, Shape]]) -> dict[tuple[str, int, Series], Cell]:
    found: dict[tuple[str, int, Series], list[Cell]] = defaultdict(list)
    for record, shape in told:
        bucket = bucket_of(record.at)
        for one, cell in shape.pairs(record.cells):
            found[f"node:{record.name}", bucket, one].append(cell)
            for topic, series in topics.wider(one):
                found[topic, bucket, series].append(cell)
    return {key: ADD[key[2].kind](each) for key, each in found.items()}


def as_told(rows: list[Any]) -> dict[tuple[str, int, Series], Cell]:
    found: dict[tuple[str, int, Series], list[Cell]] = defaultdict(list)
    for row in rows:
        for one, cell in row.shape.pairs(row.cells):
            found[row.topic, row.bucket, one].append(cell)
    return {key: ADD[key[2].kind](each) for key, each in found.items()}


@pytest.mark.slow
@given(st.lists(records(), min_size=1, max_size=3))
def test_folded_is_added_one_by_one(batches: list[list[tuple[Record, Shape]]]) -> None:
    folder = Folder()  # which goes on with what it knows of shapes
    for told in batches:
        assert as_told(folder.fold(told, 0.0)) == one_by_one(told)


def told_by(source: str, shape: Shape, at: float) -> tuple[Record, Shape]:
    cells = Cells([1] * len(shape.series), [], [])
    return Record(source, 1, "driver", source, "1", "host", 1, 1.0, at, shape.digest, cells), shape


def fleet_of(folder: Folder, *told: tuple[Record, Shape], now: float = 0.0) -> set[Series]:
    return {one for row in folder.fold(told, now) if row.topic == "fleet" for one in row.shape.series}


def test_a_source_gets_no_new_quota_by_telling_many_combinations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each combination of series in ten seconds is a row of another shape, which a folder remembers:
    of few shapes a source can make so many of those that some have to be forgotten."""
    monkeypatch.setattr("telemetry.ingest.folder.PLANS_MAX", 60)
    monkeypatch.setattr(quotas, "SHAPES_MAX", 40)
    folder, found = Folder(), set[Series]()
    shapes = [Shape([Series(Kind.COUNTER, f"test_{number}_total")]) for number in range(50)]
    for shape in shapes:
        found |= fleet_of(folder, told_by("evil", shape, 1000.0))
        found |= fleet_of(folder, *(told_by("evil", one, 1000.0) for one in (shapes[0], shape)))
    assert found == {one for shape in shapes[:40] for one in shape.series}
    assert folder.over_quota["shapes", "driver:evil"] == 20
    assert fleet_of(folder, told_by("good", shapes[49], 1000.0)) == set(shapes[49].series)
    assert fleet_of(folder, told_by("evil", shapes[48], 1000.0), now=3600.0) == set(shapes[48].series)


def test_what_is_forgotten_of_shapes_is_worked_out_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.ingest.folder.SERIES_KEPT", 10)
    monkeypatch.setattr(quotas, "SHARE_OF_TOPIC_MAX", 3)
    folder, other = Folder(), Series(Kind.COUNTER, "test_total", (("tier", "other"),))
    shapes = [
        Shape([Series(Kind.COUNTER, "test_total", (("tier", f"{number}-{one}"),)) for one in range(2)])
        for number in range(12)
    ]
    for _ in range(3):
        told = [fleet_of(folder, told_by("one", shape, 1000.0)) for shape in shapes]
        assert told[0] == set(shapes[0].series)
        assert told[1] == {shapes[1].series[0], other}
        assert told[2:] == [{other}] * 10


def test_nothing_is_folded_to_nothing() -> None:
    shape = Shape(())
    told = Record("a", 1, "agent", "ax1", "1", "host", 1, 1.0, 1000.0, shape.digest, Cells([], [], []))
    [row] = Folder().fold([(told, shape)], 0.0)
    assert (row.topic, row.cells) == ("node:ax1", Cells([], [], []))


def test_targets_of_earlier_hours_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of its series a source may add depends on what it told first in that hour."""
    monkeypatch.setattr("telemetry.ingest.folder.SERIES_KEPT", 60)
    monkeypatch.setattr(quotas, "SHARE_OF_TOPIC_MAX", 5)
    series = [Series(Kind.COUNTER, "test_total", (("tier", f"{number}"),)) for number in range(10)]
    whole, pairs = Shape(series), [Shape(pair) for pair in combinations(series, 2)]
    folder, sizes = Folder(), list[int]()
    for hour, pair in enumerate(pairs):
        at = hour * 3600.0
        for shape in (pair, whole):
            folder.fold([told_by("one", shape, at)], at)
        sizes.append(sum(len(numbers) for target in folder._targets for numbers in target.numbers))
    assert max(sizes) <= 60 + 20 + 4
