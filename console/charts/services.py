"""A chart: one metric of one topic over a time range, drawn by the browser, and as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from django.db.models import Q
from django.urls import reverse

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.charts.ranges import EARLIER, Range, written
from console.charts.slowest import DIRECTIONS
from console.metrics.catalog import METRICS
from console.metrics.services import check_topic
from console.orgs.services import get_org, visible_orgs
from console.sessions.driver_orgs import drivers_serving
from console.sessions.models import Job
from console.sessions.services import visible_sessions
from telemetry.emit.emitter import PERIOD_SECONDS
from telemetry.events import events_of
from telemetry.figures import STEP_SECONDS_MIN, figure_of
from telemetry.histogram import BOUNDS, Histogram
from telemetry.metrics import LABELS_OF_WORDS, Kind, Metric, words_of
from telemetry.models import Topic
from telemetry.queries import Answer, Fold, Question, RowCache, Unanswerable, Value, ask_each
from telemetry.topics import FLEET, ORG, kind_of, of_org, of_session

TOPICS_MAX: Final = 500  # of a picker
MARKERS_MAX: Final = 50
_CALLED: Final = {"nic_leaf": "leaf", "link": "spine link"}  # labels of paths; others as they are named
SESSIONS_MAX: Final = 20  # whose events are shown beside those of an org that they serve
AHEAD: Final = 0.25  # of a live range: how far the comparison extends into the future
ROWS_MAX: Final = 60  # of the table; the CSV has all
UNIT_OF_FOLD: Final = {Fold.RATE: "/s", Fold.RATIO: "share", Fold.SUM: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A chart in a page. Several folds are several lines; a heat map has no other fold."""

    topic: str
    title: str
    metric: Metric
    folds: tuple[Fold, ...]
    by: tuple[str, ...] = ()
    over: Metric | None = None
    where: Mapping[str, str]

    @property
    def is_heat_map(self) -> bool:
        return self.folds == (Fold.HEATMAP,)

    @property
    def unit(self) -> str:
        fold, name = self.folds[0], self.metric.name
        if fold is Fold.RATE and name.endswith("_bytes_total"):
            return "bytes/s"
        if self.metric.kind is Kind.HISTOGRAM and fold not in (Fold.RATE, Fold.SUM):
            return "seconds"
        if fold in UNIT_OF_FOLD:
            return UNIT_OF_FOLD[fold]
        return next((unit for unit in ("bytes", "seconds") if name.endswith(f"_{unit}")), "")


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    figure: str  # the live figure of its newest value
    values: Sequence[Value]


class Row(NamedTuple):
    """A row of the table: a step, and the value of each series."""

    step: Range
    values: list[Value]

    @property
    def behind(self) -> Range:
        """When the transfers that it counts may have ended."""
        return Range(self.step.start - PERIOD_SECONDS, self.step.end)


@dataclass(frozen=True, slots=True)
class Chart:
    plan: Plan
    reach: Range
    times: range
    series: Sequence[Series]
    markers: Sequence[Mapping[str, Any]]
    queries: Sequence[str]  # API requests, one for each fold
    problem: str = ""  # why it has no data
    more_topics: Sequence[str] = ()  # of events that are marked as well
    earlier: Sequence[Series] = ()  # the comparison
    earlier_queries: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not any(value is not None for one in self.series for value in one.values)

    @property
    def for_browser(self) -> dict[str, Any]:
        """The JSON for chart.js."""
        return {
            "topic": self.plan.topic,
            "moreTopics": list(self.more_topics),
            "unit": self.plan.unit,
            "isHeatMap": self.plan.is_heat_map,
            "bounds": list(BOUNDS) if self.plan.is_heat_map else None,
            "span": self.reach.end - self.reach.start if self.reach.is_live else None,
            "start": self.times.start,
            "end": self.times.stop,
            "step": self.times.step,
            "series": [
                {"name": one.name, "figure": one.figure, "values": one.values} for one in self.series
            ],
            "earlier": [{"name": one.name, "values": one.values} for one in self.earlier],
            "markers": list(self.markers),
            "queries": list(self.queries),
            "slowest": self.slowest,
            "late": PERIOD_SECONDS,  # a transfer may have ended this long before the step that counts it
        }

    @property
    def slowest(self) -> str:
        """The page of its slowest transfers, without a range; empty if none are stored."""
        direction = DIRECTIONS.get(self.plan.metric.name)
        if direction is None or not self.plan.is_heat_map:
            return ""
        asked = {"topic": self.plan.topic, "direction": self.plan.where.get("direction", direction)}
        return f"{reverse('latency-slowest')}?{urlencode(asked)}"

    @property
    def header(self) -> list[str]:
        return ["p50", "p99", "count"] if self.plan.is_heat_map else self._names

    @property
    def units(self) -> list[str]:
        """The units of the columns."""
        unit = self.plan.unit
        return [unit, unit, ""] if self.plan.is_heat_map else [unit] * len(self._names)

    @property
    def _names(self) -> list[str]:
        return [one.name for one in (*self.series, *self.earlier)]

    @property
    def rows(self) -> list[Row]:
        """The newest first."""
        newest = range(len(self.times) - 1, max(-1, len(self.times) - 1 - ROWS_MAX), -1)
        return [Row(self._step(place), self._row(place)) for place in newest]

    def _step(self, place: int) -> Range:
        return Range(self.times[place], self.times[place] + self.times.step)

    def _row(self, place: int) -> list[Value]:
        values = [one.values[place] for one in (*self.series, *self.earlier)]
        return _of_buckets(values[0] if values else None) if self.plan.is_heat_map else values

    @property
    def happened(self) -> list[tuple[datetime, str]]:
        """The events of the markers, the newest first."""
        return [
            (datetime.fromtimestamp(one["at"], UTC), one["sentence"]) for one in reversed(self.markers)
        ]

    @property
    def csv(self) -> list[tuple[str, str]]:
        """The name and URL of each CSV."""
        names = [*self.plan.folds, *(f"{fold} compared" for fold in self.plan.folds)]
        made = [
            query.replace("/metrics/query?", "/metrics/query.csv?")
            for query in (*self.queries, *self.earlier_queries)
        ]
        return list(zip(names, made, strict=False))


@dataclass(frozen=True, slots=True)
class Sheet:
    """What the charts of a page share: principal, time range and events."""

    principal: Principal
    over: Range
    problem: str = ""  # why it is not the requested range
    compare: str = ""  # one of EARLIER
    _happened: dict[str, tuple[list[str], list[dict[str, Any]]]] = field(default_factory=dict)
    _cache: RowCache = field(default_factory=partial(RowCache, is_history=True))

    def draw(self, plan: Plan) -> Chart:
        """Raises Http404 for a topic they may not see. A failed query becomes the chart's problem."""
        (topics, markers), over, compare = self._markers(plan.topic), self.over, self.compare
        queries = [_query(plan, fold, over) for fold in plan.folds]
        now = time.time()
        try:
            before = self._earlier(plan, now) if compare and not plan.is_heat_map else []
            step = before[0].step if before else None  # older data may have longer steps
            answers = self._ask([_question(plan, fold, over, step) for fold in plan.folds], now)
        except Unanswerable as error:
            return Chart(plan, over, range(0), (), (), queries, str(error))
        times = _meaningful(answers[0].times, now)
        series, more = _series(plan, answers, len(times)), topics[1:]
        chart = Chart(plan, over, times, series, markers, queries, more_topics=more)
        return _compared(chart, compare, before) if before else chart

    def _earlier(self, plan: Plan, now: float) -> list[Answer]:
        """The comparison; for a live range it extends into the future."""
        over, (by, _) = self.over, EARLIER[self.compare]
        ahead = (over.end - over.start) * AHEAD if over.is_live else 0
        before = Range(over.start - by, over.end - by + ahead)
        return self._ask([_question(plan, fold, before) for fold in plan.folds], now)

    def _ask(self, questions: Sequence[Question], now: float) -> list[Answer]:
        return ask_each(questions, now, cache=self._cache)

    def _markers(self, topic: str) -> tuple[list[str], list[dict[str, Any]]]:
        """Of which topics, and the events of these."""
        if topic not in self._happened:
            check_topic(self.principal, topic)
            topics = topics_of_events(self.principal, topic)
            self._happened[topic] = topics, _markers(topics, self.over)
        return self._happened[topic]


def _compared(chart: Chart, compare: str, before: Sequence[Answer]) -> Chart:
    plan, (by, label) = chart.plan, EARLIER[compare]
    series = [
        Series(f"{one.name}, {label}", "", one.values)
        for one in _series(plan, before, len(before[0].times))
    ]
    range_before = Range(chart.reach.start - by, chart.reach.end - by)
    queries = [_query(plan, fold, range_before) for fold in plan.folds]
    return replace(chart, earlier=series, earlier_queries=queries)


def _series(plan: Plan, answers: Sequence[Answer], count: int) -> list[Series]:
    """The series of the answers, with `count` steps."""
    return [
        Series(
            _name(plan, answer, line.labels),
            _figure(plan, answer, line.labels),
            line.values[:count],
        )
        for answer in answers
        for line in answer.lines
    ]


def _meaningful(times: range, now: float) -> range:
    """Without a step that has just begun, whose rates mean nothing yet."""
    return times[:-1] if times and now - times[-1] < STEP_SECONDS_MIN else times


def _question(plan: Plan, fold: Fold, over: Range, step: int | None = None) -> Question:
    return Question(
        topic=plan.topic,
        metric=plan.metric,
        fold=fold,
        start=over.start,
        end=over.end,
        step=step,
        where=plan.where,
        by=plan.by,
        over=plan.over,
    )


def _query(plan: Plan, fold: Fold, over: Range) -> str:
    """The API request for one fold."""
    asked: list[tuple[str, str]] = [("topic", plan.topic), ("name", plan.metric.name), ("fold", fold)]
    asked += [("by", label) for label in plan.by]
    asked += [("label", f"{name}:{value}") for name, value in plan.where.items()]
    if plan.over:
        asked.append(("over", plan.over.name))
    asked += [("start", written(over.start)), ("end", written(over.end))]
    return f"/api/v1/metrics/query?{urlencode(asked)}"


def _name(plan: Plan, answer: Answer, labels: Mapping[str, str]) -> str:
    fold = answer.question.fold
    parts = [_label(name, value) for name, value in labels.items()]
    shown = [fold] if len(plan.folds) > 1 or not parts else []
    return " ".join([", ".join(parts), *shown] if parts else shown)


def _label(name: str, value: str) -> str:
    if name in LABELS_OF_WORDS:
        return words_of(value)
    return value or f"no {_CALLED.get(name, name)}"


def _figure(plan: Plan, answer: Answer, labels: Mapping[str, str]) -> str:
    return figure_of(plan.topic, plan.metric.name, answer.question.fold, labels, plan.where)


def topics_of_events(principal: Principal, topic: str) -> list[str]:
    """Topics whose events are shown: this one first, and of an org those of the sessions that serve it,
    as far as they may see them: what moves their streams slows the org."""
    topics = [topic]
    if kind_of(topic) == ORG:
        org = get_org(principal, topic.partition(":")[2])
        serving = Job.objects.filter(driver__in=drivers_serving(org)).values("session")
        sessions = visible_sessions(principal).filter(pk__in=serving).order_by("name")
        topics += map(of_session, sessions.values_list("name", flat=True)[:SESSIONS_MAX])
    return topics


def _markers(topics: Sequence[str], over: Range) -> list[dict[str, Any]]:
    """The newest events in the range."""
    since, until = (datetime.fromtimestamp(at, UTC) for at in (over.start, over.end))
    found = events_of(*topics, since=since, until=until).order_by("-pk")[:MARKERS_MAX]
    return [
        {"id": event.pk, "at": event.at.timestamp(), "sentence": event.sentence, "kind": event.kind}
        for event in reversed(found)
    ]


def _of_buckets(counts: Value) -> list[Value]:
    """A row of a heat map's table: p50, p99 and count."""
    if not isinstance(counts, list):
        return [None, None, None]
    histogram = Histogram(counts)
    return [histogram.quantile(0.5), histogram.quantile(0.99), histogram.count]


def plan_of(
    topic: str, title: str, name: str, folds: str, *, by: str = "", over: str = "", where: str = ""
) -> Plan:
    """A plan from the arguments of a template tag. Raises ValueError or KeyError for an unknown metric,
    fold or label: a mistake in the template."""
    labels = [one.partition(":") for one in where.split()]
    plan = Plan(
        topic=topic,
        title=title,
        metric=METRICS[name],
        folds=tuple(Fold(fold) for fold in folds.split()),
        by=tuple(by.split()),
        over=METRICS[over] if over else None,
        where={label: value for label, _, value in labels},
    )
    if not plan.folds or (Fold.HEATMAP in plan.folds and not plan.is_heat_map):
        raise ValueError(f"{title}: either lines or one heat map")
    return plan


def topics_for(principal: Principal) -> list[str]:
    """The topics with data that they may see, the widest first."""
    if not principal.on_platform(Role.VIEWER):
        return [of_org(org.slug) for org in visible_orgs(principal)[:TOPICS_MAX]]
    shown = Q(name__startswith="node:") | Q(name__startswith="driver:") | Q(name__startswith="org:")
    told = Topic.objects.filter(shown | Q(name__startswith="session:")).order_by("name")
    return [FLEET, *told.values_list("name", flat=True)[:TOPICS_MAX]]
