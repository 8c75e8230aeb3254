"""Metrics by topic: who may see them, and what they were."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, Final

from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.orgs.models import Org
from console.orgs.services import get_org
from console.sessions.models import Session
from console.sessions.services import get_session
from console.workloads.services import get_workload
from telemetry.metrics import Metric
from telemetry.models import Source, Topic
from telemetry.queries import GROUPS_MAX, Fold, Question, ResultSeries, ask
from telemetry.topics import ORG, SESSION, WORKLOAD, kind_of, of_org, of_session

_OF_AN_ORG: Final = f"{ORG}:"
_OF_A_SESSION: Final = f"{SESSION}:"
_OF_A_WORKLOAD: Final = f"{WORKLOAD}:"


def check_topic(principal: Principal, topic: str) -> None:
    """The one access function for metrics. Members see their orgs, sessions and workloads; nodes,
    drivers and the fleet, which all orgs share, need a role on the platform. Raises Http404."""
    if topic.startswith(_OF_AN_ORG) and not topic.endswith("*"):
        get_org(principal, topic.removeprefix(_OF_AN_ORG))
        return
    if topic.startswith(_OF_A_SESSION) and not topic.endswith("*"):
        get_session(principal, topic.removeprefix(_OF_A_SESSION))
        return
    if topic.startswith(_OF_A_WORKLOAD) and not topic.endswith("*"):
        get_workload(principal, topic.removeprefix(_OF_A_WORKLOAD))
        return
    if not principal.on_platform(Role.VIEWER):
        raise Http404("There is no such topic, or you may not see it.")


def check_has_data(topic: str) -> None:
    """Raises Http404 for a topic without any metrics, which may be misspelled."""
    is_one = ":" in topic and not topic.startswith(_OF_AN_ORG) and not topic.endswith("*")
    if is_one and not Topic.objects.filter(name=topic).exists():
        raise Http404("This topic has no metrics yet.")


def existing_topics(pattern: str) -> tuple[str, ...]:
    """The topics of the orgs or sessions that there are, or of the processes that have reported within a
    day. A driver may report numbers of any number of others."""
    kind = kind_of(pattern)
    if kind == ORG:
        return tuple(map(of_org, Org.objects.values_list("slug", flat=True)))
    if kind == SESSION:
        return tuple(map(of_session, Session.objects.values_list("name", flat=True)))
    sources = Source.objects.filter(topic__startswith=f"{kind}:").order_by()
    return tuple(sources.values_list("topic", flat=True).distinct())


def series(
    topic: str,
    metric: Metric,
    fold: Fold,
    since: datetime,
    until: datetime,
    step: int,
    groups_max: int = GROUPS_MAX,
    **more: Any,
) -> list[ResultSeries]:
    """What a metric was between two moments. `more`: what else a question may say. Raises
    telemetry.queries.Unanswerable."""
    start, end = since.timestamp(), until.timestamp()
    question = Question(topic=topic, metric=metric, fold=fold, start=start, end=end, step=step, **more)
    return ask(question, time.time(), groups_max).lines


def numbers(
    topic: str, metric: Metric, fold: Fold, since: datetime, until: datetime, step: int, **more: Any
) -> list[float]:
    """The values that are known of all such series. Raises telemetry.queries.Unanswerable."""
    found = series(topic, metric, fold, since, until, step, **more)
    return [number for one in found for number in one.numbers]
