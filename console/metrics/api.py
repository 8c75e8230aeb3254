"""REST API of metrics and events."""

from __future__ import annotations

import difflib
import time
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import Field, Query, Schema
from pydantic import BeforeValidator

from console.accounts.browser import SignedInRequest
from console.accounts.roles import Role
from console.api.fields import Moment
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import ApiError, FieldError
from console.api.routes import Router, answers
from console.metrics.catalog import METRICS
from console.metrics.services import check_has_data, check_topic
from telemetry.events import events_of
from telemetry.histogram import BOUNDS
from telemetry.metrics import Metric
from telemetry.models import Event
from telemetry.queries import FOLDS, Answer, Fold, Question, Unanswerable, as_csv, ask
from telemetry.topics import FLEET

router = Router(tags=["metrics"])

DEFAULT_SPAN = timedelta(hours=1)
YEARS_MAX = 3

Topic = Annotated[
    str,
    Query(
        pattern=r"^[a-z]+(:[A-Za-z0-9._*-]{1,200})?$",
        max_length=240,
        description="`fleet`, `org:acme`, `node:ax-7`, `driver:job7`; or `node:*` for all of a kind.",
        examples=["fleet"],
    ),
]
Name = Annotated[
    str,
    Query(
        pattern=r"^[a-z0-9_]{1,100}$",
        description="One of `GET /metrics`.",
        examples=["swdriver_refill_seconds"],
    ),
]
Label = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
Filter = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}:[^\x00]{0,200}$")]


class MetricOut(Schema):
    name: str
    kind: Annotated[
        Literal["counter", "gauge", "histogram"], BeforeValidator(lambda kind: kind.name.lower())
    ]
    text: str
    labels: list[str]
    folds: list[Fold]

    @staticmethod
    def resolve_folds(metric: Metric) -> tuple[Fold, ...]:
        return FOLDS[metric.kind]


class LineOut(Schema):
    labels: dict[str, str]
    values: list[float | list[int] | None] = Field(
        description="One for each step. Null: no data, or for a ratio, no traffic."
    )


class AnswerOut(Schema):
    topic: str
    name: str
    fold: Fold
    start: datetime = Field(description="Start of the first step.")
    step_seconds: int
    resolution: Literal["10s", "1m", "1h"] = Field(description="The roll-up that was read.")
    bounds: list[float] | None = Field(
        description="Upper bounds of a heat map's buckets, in seconds; the last bucket has none."
    )
    series: list[LineOut]


class Asked(Schema):
    """The query parameters."""

    topic: Topic
    name: Name
    fold: Fold
    start: Moment | None = Field(None, description="Default: an hour before the end.")
    end: Moment | None = Field(None, description="Default: now.")
    step: int | None = Field(
        None,
        ge=10,
        le=86_400,
        description="Seconds, a multiple of 10. Default: chosen for a few hundred points.",
    )
    label: list[Filter] = Field([], max_length=8, description="`name:value` filters.")
    by: list[Label] = Field(
        [], max_length=4, description="Labels, or `topic`, to group by; others are summed."
    )
    over: Name | None = Field(None, description="For a ratio: the counter to divide by.")
    resolution: Literal["10s", "1m", "1h"] | None = Field(
        None, description="The roll-up to read. Default: the coarsest that fits."
    )


@router.get("/metrics", response=answers(list[MetricOut]))
def list_metrics(request: HttpRequest) -> list[Metric]:
    """List metrics."""
    del request  # everybody may
    return list(METRICS.values())


@router.get("/metrics/query", response=answers(AnswerOut, 404))
def query(request: SignedInRequest, asked: Query[Asked]) -> dict[str, object]:
    """Query one metric of one topic."""
    answer = _answer(request, asked)
    return {
        "topic": asked.topic,
        "name": asked.name,
        "fold": asked.fold,
        "start": datetime.fromtimestamp(answer.start, timezone.get_current_timezone()),
        "step_seconds": answer.step,
        "resolution": answer.level,
        "bounds": BOUNDS if asked.fold is Fold.HEATMAP else None,
        "series": answer.lines,
    }


@router.get(
    "/metrics/query.csv",
    response=answers(str, 404),
    openapi_extra={"responses": {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}},
)
def query_csv(request: SignedInRequest, asked: Query[Asked]) -> HttpResponse:
    """The same as a table."""
    name = f"{asked.topic}-{asked.name}-{asked.fold}".replace(":", "-").replace("*", "all")
    return HttpResponse(
        as_csv(_answer(request, asked)),
        content_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}.csv"'},
    )


class EventOut(Schema):
    id: int = Field(description="They become visible in this order.")
    at: datetime
    kind: str
    topics: list[str]
    sentence: str
    data: dict[str, Any]


@router.get("/events", response=answers(Page[EventOut], 404))
def list_events(
    request: SignedInRequest,
    topic: Topic = FLEET,
    kind: Annotated[str, Query(pattern=r"^[a-z._-]{0,48}$")] = "",
    since: Moment | None = None,
    until: Moment | None = None,
    order: Literal["newest", "oldest"] = "newest",
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    """List events."""
    check_topic(request.principal, topic)
    found = events_of(topic, kind=kind, since=since, until=until)
    show = None if request.principal.on_platform(Role.VIEWER) else partial(_as_of, topic)
    return paginate(found, "-pk" if order == "newest" else "pk", cursor, limit, show)


def _as_of(topic: str, event: Event) -> Event:
    """Of whom else it is told is for those who see all of them."""
    event.topics = [topic]
    return event


def _answer(request: SignedInRequest, asked: Asked) -> Answer:
    check_topic(request.principal, asked.topic)
    check_has_data(asked.topic)
    end = asked.end or timezone.now()
    start = asked.start or end - DEFAULT_SPAN
    if end - start > timedelta(days=366 * YEARS_MAX):
        raise _refused("start", f"That is more than {YEARS_MAX} years.")
    try:
        return ask(
            Question(
                topic=asked.topic,
                metric=_metric("name", asked.name),
                fold=asked.fold,
                start=start.timestamp(),
                end=end.timestamp(),
                step=asked.step,
                where=dict(one.split(":", 1) for one in asked.label),
                by=tuple(dict.fromkeys(asked.by)),
                over=_metric("over", asked.over) if asked.over else None,
                level=asked.resolution,
            ),
            time.time(),
        )
    except Unanswerable as error:
        raise _refused(error.about, str(error)) from None


def _metric(about: str, name: str) -> Metric:
    if name not in METRICS:
        close = difflib.get_close_matches(name, METRICS, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise _refused(about, f"There is no metric {name}.{hint}")
    return METRICS[name]


def _refused(about: str, sentence: str) -> ApiError:
    errors = [FieldError(pointer=f"/query/{about}", detail=sentence)]
    return ApiError("InvalidRequest", sentence, errors=errors)
