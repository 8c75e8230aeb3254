"""Queries: series over time, by topic, name and labels, for pages, the API and alerts.

A question is answered from the coarsest roll-up that its steps can be made of, and from what has not
been rolled up yet, in one statement: each record is in the answer once, from when it was written.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Protocol

from django.db import connection

from telemetry.cells import NO_GAUGE, Cells, Gauge, add_gauges
from telemetry.histogram import BOUNDS, BUCKETS, Histogram
from telemetry.metrics import OTHER, Kind, Metric
from telemetry.records import EARLY_SECONDS_MAX
from telemetry.shapes import Shape
from telemetry.store import history
from telemetry.store.rollup import days_kept
from telemetry.store.storage import LEVELS, Shapes, cells_of, cells_of_kind, day_of

POINTS_WANTED: Final = 600  # at most, where the step is ours to choose
POINTS_MAX: Final = 10_000
GROUPS_MAX: Final = 200
TOPICS_MAX: Final = 5_000
ROWS_MAX: Final = 500_000
TOPIC: Final = "topic"  # by which series can be told apart as by a label
STEPS: Final = (
    *(10, 20, 30),
    *(60 * minutes for minutes in (1, 2, 3, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12, 24)),
)

Value = float | list[int] | None
_Asked = tuple[str, tuple[str, ...] | None, str, int, int]  # topic, which of them, level, start, end
_Row = tuple[str, Shape, int, bytes]  # topic, of what, from when on, and how much


class Fold(StrEnum):
    """What becomes of all numbers of a step."""

    RATE = "rate"  # a second
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    TOTAL = "total"  # of all places together, on average over the time
    P50 = "p50"
    P90 = "p90"
    P99 = "p99"
    P999 = "p999"
    HEATMAP = "heatmap"  # how many in each bucket of the histogram
    RATIO = "ratio"  # of one counter to another; None where that has not moved


FOLDS: Final[Mapping[Kind, tuple[Fold, ...]]] = {
    Kind.COUNTER: (Fold.RATE, Fold.SUM, Fold.RATIO),
    Kind.GAUGE: (Fold.MEAN, Fold.MAX, Fold.TOTAL),
    Kind.HISTOGRAM: (
        Fold.P50,
        Fold.P90,
        Fold.P99,
        Fold.P999,
        Fold.RATE,
        Fold.SUM,
        Fold.MEAN,
        Fold.HEATMAP,
    ),
}
_FRACTIONS: Final = {Fold.P50: 0.5, Fold.P90: 0.9, Fold.P99: 0.99, Fold.P999: 0.999}


class Unanswerable(Exception):
    """Why not, and what to ask instead: a sentence. `about` is the part of the question it is for."""

    def __init__(self, about: str, sentence: str) -> None:
        super().__init__(sentence)
        self.about = about


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    topic: str  # or the beginning of several, and a star: node:*
    topics: tuple[str, ...] | None = None  # of those that begin so, only these
    metric: Metric
    fold: Fold
    start: float  # seconds since 1970
    end: float
    step: int | None = None  # seconds; None: as many points as a chart can show
    where: Mapping[str, str] = field(default_factory=dict)  # labels that have to have these values
    by: tuple[str, ...] = ()  # labels whose values are told apart; all others are summed up
    over: Metric | None = None  # of a ratio
    level: str | None = None  # to be read, rather than the coarsest that fits


@dataclass(frozen=True, slots=True)
class ResultSeries:
    """One series of an answer: a value, or None for nothing, for each step."""

    labels: Mapping[str, str]
    values: list[Value]

    @property
    def numbers(self) -> list[float]:
        """The values that are known; none of a heat map."""
        known = (float(value) for value in self.values if isinstance(value, int | float))
        return [value for value in known if math.isfinite(value)]


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    start: int
    step: int
    level: str
    lines: list[ResultSeries]

    @property
    def times(self) -> range:
        """The beginning of each step."""
        count = math.ceil((self.question.end - self.start) / self.step)
        return range(self.start, self.start + count * self.step, self.step)


def ask(
    question: Question,
    now: float,
    groups_max: int = GROUPS_MAX,
    groups_of_topic_max: int | None = None,
) -> Answer:
    """Raises Unanswerable. More series than a chart can show are for who looks at each of them.

    `groups_of_topic_max`: what a topic has more of is added up as `other`, so that it costs no other
    topic the answer.
    """
    [answer] = ask_each([question], now, groups_max, groups_of_topic_max)
    return answer


def ask_each(
    questions: Sequence[Question],
    now: float,
    groups_max: int = GROUPS_MAX,
    groups_of_topic_max: int | None = None,
    cache: RowCache | None = None,
) -> list[Answer]:
    """Answer questions about one topic and time, of the same step. Rows are read once for all, and
    with a cache once for all questions that share it."""
    for question in questions:
        _check(question)
    first = questions[0]
    level, step = _resolution(first, now)
    start = int(first.start) // step * step
    points = math.ceil((first.end - start) / step)
    if points > POINTS_MAX:
        raise Unanswerable("step", f"That is {points} points; at most {POINTS_MAX} are given.")
    most = (groups_max, groups_of_topic_max or math.inf)
    grids = [_Grid(question, start, step, points, *most) for question in questions]
    rows = (cache or RowCache()).rows(first.topic, first.topics, level, start, start + points * step)
    for topic, shape, bucket, encoded in rows:
        for grid in grids:
            grid.add(topic, shape, bucket, encoded)
    return [
        Answer(question, start, step, level, grid.lines(now))
        for question, grid in zip(questions, grids, strict=True)
    ]


def hit_rate(question: Question, requested: Metric) -> Question:
    """A question about hit tokens in place of this one's metric, as the part of those that were asked
    for; None without traffic."""
    return replace(question, fold=Fold.RATIO, where={}, over=requested, level=None)


# What is asked


def _check(question: Question) -> None:
    metric = question.metric
    if question.fold not in FOLDS[metric.kind]:
        possible = ", ".join(FOLDS[metric.kind])
        kind = metric.kind.name.lower()
        raise Unanswerable("fold", f"{metric.name} is a {kind}: it has {possible}, not {question.fold}.")
    if (question.fold is Fold.RATIO) != (question.over is not None):
        raise Unanswerable("over", "A ratio, and only a ratio, is over another metric.")
    if question.over and question.over.kind is not Kind.COUNTER:
        raise Unanswerable("over", f"{question.over.name} is not a counter.")
    for name in (*question.by, *question.where):
        if name not in (*metric.labels, TOPIC):
            labels = ", ".join(metric.labels) or "no labels"
            raise Unanswerable("by", f"{metric.name} has {labels}, not {name}.")
    if not question.start < question.end:
        raise Unanswerable("end", "The end has to come after the start.")
    if question.step is not None and (question.step < 10 or question.step % 10):
        raise Unanswerable("step", "The step has to be a multiple of 10 seconds.")


def _resolution(question: Question, now: float) -> tuple[str, int]:
    """The level to read, and the step: as asked for, or coarser where only that is kept so long."""
    if question.level:
        width = LEVELS[question.level]
        return question.level, math.ceil((question.step or width) / width) * width
    span = question.end - question.start
    step = question.step or next((one for one in STEPS if span / one <= POINTS_WANTED), STEPS[-1])
    kept = days_kept()
    fitting = [level for level, width in LEVELS.items() if step % width == 0]
    for level in [*reversed(fitting), *[one for one in LEVELS if one not in fitting]]:
        if question.start >= now - kept[level] * 86_400 or level == "1h":
            width = LEVELS[level]
            return level, math.ceil(step / width) * width
    raise Unanswerable("start", "Numbers this old are not stored any more.")


# What is read


class RowCache:
    """Rows that were read, for who asks several things of one topic and time: charts of a page.
    `is_history`: they may be read from a standby."""

    def __init__(self, *, is_history: bool = False) -> None:
        self._rows: dict[_Asked, list[_Row]] = {}
        self._is_history = is_history

    def rows(self, *key: *_Asked) -> list[_Row]:
        if key not in self._rows:
            self._rows[key] = list(_encoded(*key, is_history=self._is_history))
        return self._rows[key]


def rows_of(pattern: str, level: str, start: int, end: int) -> Iterator[tuple[str, Shape, int, Cells]]:
    """What is stored of these topics between two moments, in buckets of a level; of what is newer, in
    finer ones. Raises Unanswerable for more than can be added up."""
    for topic, shape, bucket, encoded in _encoded(pattern, None, level, start, end):
        yield topic, shape, bucket, cells_of(encoded)


def _encoded(
    pattern: str,
    among: tuple[str, ...] | None,
    level: str,
    start: int,
    end: int,
    *,
    is_history: bool = False,
) -> Iterator[_Row]:
    topics = _topics(pattern, among, start)
    if not topics:
        return
    asked: dict[str, Any] = {"topics": list(topics), "start": start, "end": end, "most": ROWS_MAX + 1}
    if is_history:
        rows = history.OF_THIS_PROCESS.rows(_SELECTS[level], asked)
    else:
        with connection.cursor() as cursor:
            cursor.execute(_SELECTS[level], asked)
            rows = cursor.fetchall()
    if len(rows) > ROWS_MAX:
        raise Unanswerable("step", "Too many rows. Ask for less time, or a longer step.")
    shapes = _SHAPES.of({row[1] for row in rows})
    for topic, number, bucket, encoded in rows:
        if shape := shapes.get(number):  # one that can't be read is left out
            yield topics[topic], shape, bucket, encoded


def _topics(pattern: str, among: tuple[str, ...] | None, start: int) -> dict[int, str]:
    """Those of which something may be stored since: topics stay for as long as any of their rows."""
    with connection.cursor() as cursor:
        if pattern.endswith("*"):
            since = day_of(start - EARLY_SECONDS_MAX)  # when what is ahead of its time came in
            cursor.execute(
                "SELECT id, name FROM telemetry_topic WHERE starts_with(name, %s) AND seen_on >= %s "
                "AND (%s::text[] IS NULL OR name = ANY(%s)) LIMIT %s",
                [pattern[:-1], since, *[None if among is None else list(among)] * 2, TOPICS_MAX + 1],
            )
        else:
            cursor.execute("SELECT id, name FROM telemetry_topic WHERE name = %s", [pattern])
        found = dict(cursor.fetchall())
    if len(found) > TOPICS_MAX:
        raise Unanswerable(TOPIC, f"These are more than {TOPICS_MAX} topics. Ask for fewer.")
    return found


def _select(level: str) -> str:
    """Rows of this level, and of finer ones what is not in it yet: what is after its watermark."""
    parts, above = [], ""
    for finer, width in reversed(list(LEVELS.items())):
        if width > LEVELS[level]:
            continue
        since = _SINCE_WATERMARK.format(level=above) if above else "%(start)s"
        parts.append(_PART.format(table=finer, since=since))
        above = finer
    return " UNION ALL ".join([*parts, _PART.format(table="fresh", since="%(start)s")]) + _MOST


_PART: Final = (
    "SELECT topic, shape, bucket, cells FROM telemetry_{table} "
    "WHERE topic = ANY(%(topics)s) AND bucket >= {since} AND bucket < %(end)s"
)
_SINCE_WATERMARK: Final = (
    "greatest(%(start)s, (SELECT at FROM telemetry_watermark WHERE level = '{level}'))"
)
_MOST: Final = " LIMIT %(most)s"
_SELECTS: Final = {level: _select(level) for level in LEVELS}
_SHAPES: Final = Shapes()


# What is made of it


class _Grid:
    """Sums for each series of the answer and each step."""

    def __init__(
        self,
        question: Question,
        start: int,
        step: int,
        points: int,
        groups_max: int,
        groups_of_topic_max: float,
    ) -> None:
        self._question = question
        self._groups_max, self._groups_of_topic_max = groups_max, groups_of_topic_max
        self._of_topic: Counter[str] = Counter()  # groups
        self._start, self._step, self._points = start, step, points
        self._groups: dict[tuple[str, ...], _Sums] = {}
        self._over: dict[tuple[str, ...], _Sums] = {}
        self._plans: dict[tuple[str, bytes], list[tuple[int, _Sums]]] = {}
        # What the other metric of a ratio has no labels for is compared with the sum of all of it.
        of_both = (*question.over.labels, TOPIC) if question.over else ()
        self._over_by = tuple(name for name in question.by if name in of_both)

    def add(self, topic: str, shape: Shape, bucket: int, encoded: bytes) -> None:
        plan = self._plans.get((topic, shape.digest))
        if plan is None:
            plan = self._plans[topic, shape.digest] = self._plan(topic, shape)
        if plan:
            point = (bucket - self._start) // self._step
            its = cells_of_kind(encoded, self._question.metric.kind)
            for place, sums in plan:
                sums.add(point, its[place])

    def _plan(self, topic: str, shape: Shape) -> list[tuple[int, _Sums]]:
        """Where the cells that matter are, and what they are added to."""
        question, found = self._question, list[tuple[int, _Sums]]()
        kind = question.metric.kind
        for place, one in enumerate(series for series in shape.series if series.kind is kind):
            labels = {**dict(one.labels), TOPIC: topic}
            if one.name == question.metric.name and _matches(labels, question.where):
                found.append((place, self._group(self._groups, labels, question.by)))
            if question.over and one.name == question.over.name:
                found.append((place, self._group(self._over, labels, self._over_by)))
        return found

    def _group(
        self, groups: dict[tuple[str, ...], _Sums], labels: Mapping[str, str], by: Sequence[str]
    ) -> _Sums:
        key, topic = tuple(labels.get(name, "") for name in by), labels[TOPIC]
        if key not in groups and TOPIC in by and self._of_topic[topic] >= self._groups_of_topic_max:
            key = tuple(topic if name == TOPIC else OTHER for name in by)
        if key not in groups:
            if len(groups) >= self._groups_max:
                raise Unanswerable(
                    "by", f"These are more than {self._groups_max} series. Ask for fewer."
                )
            groups[key] = _KINDS[self._question.metric.kind](self._points)
            self._of_topic[topic] += 1
        return groups[key]

    def lines(self, now: float) -> list[ResultSeries]:
        question = self._question
        seconds = [
            max(1.0, min(self._step, now - self._start - point * self._step))
            for point in range(self._points)
        ]
        made = []
        for key, sums in sorted(self._groups.items()):
            labels = dict(zip(question.by, key, strict=True))
            if question.over:
                whole = self._over.get(tuple(labels[name] for name in self._over_by))
                made.append(ResultSeries(labels, _ratios(sums, whole or _Counters(self._points))))
            else:
                made.append(ResultSeries(labels, sums.values(question.fold, seconds)))
        return made


class _Sums(Protocol):
    """Of one series of the answer, for each step."""

    def __init__(self, points: int) -> None: ...
    def add(self, point: int, cell: Any) -> None: ...
    def values(self, fold: Fold, seconds: Sequence[float]) -> list[Value]:
        """`seconds` of each step that are over."""


class _Counters:
    def __init__(self, points: int) -> None:
        self.sums: list[float | None] = [None] * points

    def add(self, point: int, cell: float) -> None:
        self.sums[point] = (self.sums[point] or 0) + cell

    def values(self, fold: Fold, seconds: Sequence[float]) -> list[Value]:
        if fold is Fold.SUM:
            return list(self.sums)
        return [
            None if one is None else one / covered
            for one, covered in zip(self.sums, seconds, strict=True)
        ]


def _ratios(part: _Sums, whole: _Sums) -> list[Value]:
    mine, its = ([_number(one) for one in sums.values(Fold.SUM, ())] for sums in (part, whole))
    return [share / of if of else None for share, of in zip(mine, its, strict=True)]


def _number(value: Value) -> float:
    return value if isinstance(value, int | float) else 0.0


class _Gauges:
    def __init__(self, points: int) -> None:
        self._sums: list[Gauge] = [NO_GAUGE] * points

    def add(self, point: int, cell: Gauge) -> None:
        self._sums[point] = add_gauges((self._sums[point], cell))

    def values(self, fold: Fold, seconds: Sequence[float]) -> list[Value]:
        return [
            _of_gauge(fold, one, covered) if one[1] else None
            for one, covered in zip(self._sums, seconds, strict=True)
        ]


def _of_gauge(fold: Fold, gauge: Gauge, covered: float) -> float:
    integral, known, most = gauge
    if fold is Fold.MAX:
        return most
    return integral / (known if fold is Fold.MEAN else covered)


class _Histograms:
    def __init__(self, points: int) -> None:
        self._counts: list[list[int] | None] = [None] * points
        self._seconds = [0.0] * points

    def add(self, point: int, cell: list[Any]) -> None:
        counts = self._counts[point]
        if counts is None:
            counts = self._counts[point] = [0] * BUCKETS
        if cell:
            self._seconds[point] += cell[0]
            index = cell[1]
            for count in cell[2:]:
                counts[index] += count
                index += 1

    def values(self, fold: Fold, seconds: Sequence[float]) -> list[Value]:
        return [
            None if counts is None else _of_histogram(fold, counts, total, covered)
            for counts, total, covered in zip(self._counts, self._seconds, seconds, strict=True)
        ]


def _of_histogram(fold: Fold, counts: list[int], total: float, covered: float) -> Value:
    if fold is Fold.HEATMAP:
        return counts
    if fold in _FRACTIONS:
        return Histogram(counts).quantile(_FRACTIONS[fold])
    times = sum(counts)
    if fold is Fold.MEAN:
        return total / times if times else None
    return times / covered if fold is Fold.RATE else times


_KINDS: Final[Mapping[Kind, Callable[[int], _Sums]]] = {
    Kind.COUNTER: _Counters,
    Kind.GAUGE: _Gauges,
    Kind.HISTOGRAM: _Histograms,
}


def _matches(labels: Mapping[str, str], where: Mapping[str, str]) -> bool:
    return all(labels.get(name, "") == value for name, value in where.items())


# As a table


def as_csv(answer: Answer) -> str:
    """A row for each step and series; for a heat map for each bucket that is not empty."""
    question, text = answer.question, io.StringIO()
    write = csv.writer(text).writerow
    is_map = question.fold is Fold.HEATMAP
    write(["time", *question.by, *(["seconds_up_to", "count"] if is_map else [question.fold])])
    for line in answer.lines:
        labels = [harmless(line.labels[name]) for name in question.by]
        for time, value in zip(answer.times, line.values, strict=True):
            moment = datetime.fromtimestamp(time, UTC).isoformat()
            if isinstance(value, list):
                for bound, count in zip([*BOUNDS, math.inf], value, strict=True):
                    if count:
                        write([moment, *labels, f"{bound:.6g}", count])
            elif not is_map:
                write([moment, *labels, "" if value is None else value])
    return text.getvalue()


def harmless(text: str) -> str:
    """For a cell of a CSV: what a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
