"""Metrics by topic: who may see them, and what they were."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, Final

from django.http import Http404

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.orgs.services import get_org
from console.sessions.services import get_session
from console.workloads.services import get_workload
from telemetry.metrics import Metric
from telemetry.models import Topic
from telemetry.queries import Fold, Question, ResultSeries, ask
from telemetry.topics import ORG, SESSION, WORKLOAD

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


def series(
    topic: str, metric: Metric, fold: Fold, since: datetime, until: datetime, step: int, **more: Any
) -> list[ResultSeries]:
    """What a metric was between two moments. `more`: what else a question may say."""
    start, end = since.timestamp(), until.timestamp()
    question = Question(topic=topic, metric=metric, fold=fold, start=start, end=end, step=step, **more)
    return ask(question, time.time()).lines


def numbers(
    topic: str, metric: Metric, fold: Fold, since: datetime, until: datetime, step: int, **more: Any
) -> list[float]:
    """The values that are known of all such series."""
    found = series(topic, metric, fold, since, until, step, **more)
    return [number for one in found for number in one.numbers]
