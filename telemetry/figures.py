"""The few numbers that everybody looks at, as they are now: how fast evicts and refills are, how much is
hit, how many bytes go. Of many topics at once, for live viewers.

They come from the same rows as answers to questions do, so a figure is what a chart shows at its end.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from django.db import connection

from telemetry.cells import Cell, Sparse, add_gauges, histogram_of
from telemetry.ingest.folder import BUCKET_SECONDS, bucket_of
from telemetry.metrics import Kind
from telemetry.queries import rows_of
from telemetry.shapes import Series, Shape
from telemetry.store.merge import Part, merge
from telemetry.store.storage import Shapes, cells_of
from telemetry.topics import NODE, SESSION, kind_of

log = logging.getLogger(__name__)

LAG_SECONDS: Final = 0.5  # what has not been told yet, on average, less what was told of before
MINUTE_SECONDS: Final = 60
STEP_SECONDS_MIN: Final = 5.0  # of a step that is under way, before its rates mean something
_SHAPES: Final = Shapes()
_UNSOUND: Final = (ArithmeticError, LookupError, TypeError, ValueError)  # of cells that nobody checked
_ROWS: Final = (
    "SELECT t.name, r.bucket, r.shape, r.cells FROM telemetry_{table} AS r "
    "JOIN telemetry_topic AS t ON t.id = r.topic "
    "WHERE t.name = ANY(%(topics)s) AND r.bucket >= %(start)s AND r.bucket < %(end)s"
)
_SELECT: Final = " UNION ALL ".join(_ROWS.format(table=table) for table in ("fresh", "10s"))

Figures = Mapping[str, float]


class Names(NamedTuple):
    """Which metrics the figures of a topic are made of. Where one serves evicts and refills, its label
    `direction` tells them apart."""

    evict: str
    refill: str
    bytes: str
    hit: str = ""
    requested: str = ""
    paths: str = ""
    memory: str = ""

    @property
    def latencies(self) -> Iterator[tuple[str, str, Mapping[str, str]]]:
        """A figure, its metric, and which labels its series have."""
        for figure, name, direction in (("evict", self.evict, "out"), ("refill", self.refill, "in")):
            yield figure, name, {"direction": direction} if self.evict == self.refill else {}


OF_DRIVERS: Final = Names(
    "swdriver_evict_seconds",
    "swdriver_refill_seconds",
    "swdriver_bytes_total",
    "swdriver_hit_tokens_total",
    "swdriver_requested_tokens_total",
    "tidegate_driver_path_bytes_total",
    "swdriver_org_bytes",
)
# What drivers measure of each stream, whatever it goes over: shared memory passes agents by.
_SECONDS, _BYTES = "tidegate_driver_path_seconds", "tidegate_driver_path_bytes_total"
OF_STREAMS: Final = Names(_SECONDS, _SECONDS, _BYTES, paths=_BYTES)
HISTOGRAM_FIGURES: Final = ("rate", "p50", "p99")


def names_of(topic: str) -> Names:
    """Of nodes and sessions, what their streams move; of orgs, drivers and the fleet, what prompts were
    given."""
    return OF_STREAMS if kind_of(topic) in (NODE, SESSION) else OF_DRIVERS


def figure_of(
    topic: str, metric: str, fold: str, labels: Mapping[str, str], where: Mapping[str, str] | None = None
) -> str:
    """The figure that tells the newest value of a series, of those that are chosen by `where`; empty
    where none does."""
    names = names_of(topic)
    if fold in HISTOGRAM_FIGURES and not labels:
        for figure, name, its in names.latencies:
            if (metric, where or {}) == (name, its):
                return f"{figure}.{fold}"
    if where:
        return ""
    if metric == names.bytes and fold == "rate" and labels.keys() == {"direction"}:
        return f"bytes.{labels['direction']}"
    if metric == names.hit and fold == "ratio" and labels.keys() <= {"tier"}:
        return f"hit.{labels.get('tier', 'rate')}"
    return ""


@dataclass(frozen=True, slots=True)
class CurrentFigures:
    """Figures over the last seconds; and for charts, of each step in them."""

    seconds: float
    figures: Figures
    points: Mapping[int, Figures]  # by the beginning of the step


def figures_now(topics: Collection[str], now: float) -> dict[str, CurrentFigures]:
    """Of the step that is under way and the one before it. Topics that told nothing are left out, and
    those whose rows make no sense. What is ahead of its time, by the clock of who told it, waits."""
    start, end = bucket_of(now) - BUCKET_SECONDS, bucket_of(now) + BUCKET_SECONDS
    with connection.cursor() as cursor:
        cursor.execute(_SELECT, {"topics": list(topics), "start": start, "end": end})
        rows = sorted(cursor.fetchall(), key=itemgetter(0, 1))
    shapes = _SHAPES.of({shape for _, _, shape, _ in rows})
    found: dict[str, CurrentFigures] = {}
    for topic, its in groupby(rows, key=itemgetter(0)):
        try:
            found[topic] = _current(topic, its, shapes, start, now - LAG_SECONDS)
        except _UNSOUND:
            log.exception("figures of %s can't be computed", topic)
    return found


def _current(
    topic: str, rows: Iterable[tuple[Any, ...]], shapes: Mapping[int, Shape], start: int, over: float
) -> CurrentFigures:
    """Of one topic, up to a moment."""
    steps = {
        bucket: merge(
            [
                (shapes[shape], cells_of(cells))
                for _, _, shape, cells in pieces
                if shape in shapes  # one that can't be read is left out, and not the topic
            ]
        )
        for bucket, pieces in groupby(rows, key=itemgetter(1))
    }
    names = names_of(topic)
    whole = merge([part for step in steps.values() for part in step.parts])
    return CurrentFigures(
        over - start,
        _figures(whole.pairs(), names, over - start),
        {
            bucket: _figures(step.pairs(), names, min(BUCKET_SECONDS, over - bucket))
            for bucket, step in steps.items()
            if over - bucket >= STEP_SECONDS_MIN
        },
    )


def figures_past(topic: str, start: int, step: int, count: int) -> list[Figures]:
    """Of each of `count` steps from `start` on, all multiples of a minute: the same figures, and
    `memory`, the bytes held on average. A step of which nothing is stored has none."""
    steps: list[dict[int, list[Part]]] = [defaultdict(list) for _ in range(count)]
    for _, shape, bucket, cells in rows_of(topic, "1m", start, start + count * step):
        steps[(bucket - start) // step][bucket // MINUTE_SECONDS].append((shape, cells))
    names, found = names_of(topic), list[Figures]()
    for minutes in steps:
        if not minutes:
            found.append({})
            continue
        pairs = list(merge([piece for pieces in minutes.values() for piece in pieces]).pairs())
        held = dict(_memory(pairs, names, len(minutes) * MINUTE_SECONDS))
        found.append({**_figures(pairs, names, step), **held})
    return found


def _figures(pairs: Iterable[tuple[Series, Cell]], names: Names, seconds: float) -> dict[str, float]:
    """What had no traffic is left out: it is not 0."""
    seconds = max(1.0, seconds)
    wanted = set(names)
    listed = [(one, cell) for one, cell in pairs if one.name in wanted]
    made = dict(_bytes(listed, names, seconds)) | dict(_hits(listed, names))
    made.update(_paths(listed, names))
    for figure, name, its in names.latencies:
        cells = [
            cell
            for one, cell in _of_kind(listed, name, Kind.HISTOGRAM)
            if its.items() <= set(one.labels)
        ]
        made.update(_latencies(figure, cells, seconds))
    return made


def _latencies(figure: str, cells: list[Sparse], seconds: float) -> Iterator[tuple[str, float]]:
    histogram = histogram_of(cells)
    yield f"{figure}.rate", histogram.count / seconds
    for name, fraction in (("p50", 0.5), ("p99", 0.99)):
        value = histogram.quantile(fraction)
        if value is not None:
            yield f"{figure}.{name}", value


def _bytes(
    listed: list[tuple[Series, Cell]], names: Names, seconds: float
) -> Iterator[tuple[str, float]]:
    for direction, count in _by_label(listed, names.bytes, "direction").items():
        yield f"bytes.{direction}", count / seconds


def _hits(listed: list[tuple[Series, Cell]], names: Names) -> Iterator[tuple[str, float]]:
    requested = sum(_by_label(listed, names.requested, "").values())
    if requested:
        hits = _by_label(listed, names.hit, "tier")
        yield "hit.rate", sum(hits.values()) / requested
        for tier, count in hits.items():
            yield f"hit.{tier}", count / requested


def _paths(listed: list[tuple[Series, Cell]], names: Names) -> Iterator[tuple[str, float]]:
    """How much of what was moved crossed the spine."""
    tiers = _by_label(listed, names.paths, "tier")
    if moved := sum(tiers.values()):
        yield "spine.share", tiers.get("spine", 0.0) / moved


def _memory(
    listed: list[tuple[Series, Cell]], names: Names, seconds: float
) -> Iterator[tuple[str, float]]:
    """Of all places together, on average of the minutes of which something is known. Over seconds that
    are not over yet it would waver: it is not told live."""
    held = add_gauges([cell for _, cell in _of_kind(listed, names.memory, Kind.GAUGE)])
    if held[1]:
        yield "memory", held[0] / seconds


def _by_label(listed: list[tuple[Series, Cell]], name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one, cell in _of_kind(listed, name, Kind.COUNTER):
        value = dict(one.labels).get(label, "")
        sums[value] = sums.get(value, 0.0) + cell
    return sums


def _of_kind(
    listed: Iterable[tuple[Series, Cell]], name: str, kind: Kind
) -> Iterator[tuple[Series, Cell]]:
    """The series of a metric. A process may tell one of its name that is of another kind."""
    return ((one, cell) for one, cell in listed if one.name == name and one.kind is kind)
