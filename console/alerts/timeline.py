"""The history of an alert, its metrics and their charts, for its page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.http import Http404

from console.accounts.principal import Principal
from console.alerts.delivery.channels import visible_channels
from console.alerts.models import Alert, Notification
from console.alerts.rules.rule import MetricQuery
from console.charts.ranges import Range
from console.metrics.services import check_topic
from telemetry.queries import Fold
from telemetry.topics import kind_of

ENTRIES_MAX: Final = 200
HIDDEN: Final = "a platform channel"
AROUND: Final = timedelta(minutes=30)
# Folds of rules, and the folds that their charts show.
_FOLDS: Final = {Fold.HEATMAP: "p50 p99", Fold.SUM: "rate"}


@dataclass(frozen=True)
class Entry:
    """An entry of the timeline."""

    at: datetime
    kind: str  # transition, comment or notification
    text: str
    who: str = ""
    state: str = ""  # after a transition


def of(principal: Principal, alert: Alert) -> list[Entry]:
    """The newest first. Channels that they may not see are not named."""
    seen = set(visible_channels(principal).values_list("pk", flat=True))
    transitions = [
        Entry(transition.at, "transition", transition.sentence, state=transition.after)
        for transition in alert.transitions.order_by("-number")[:ENTRIES_MAX]
    ]
    comments = [
        Entry(comment.at, "comment", comment.text, comment.author)
        for comment in alert.comments.order_by("-pk")[:ENTRIES_MAX]
    ]
    notifications = [
        Entry(
            one.sent_at, "notification", one.what, one.channel.name if one.channel_id in seen else HIDDEN
        )
        for one in alert.notifications.filter(state=Notification.State.SENT)
        .select_related("channel")
        .order_by("-pk")[:ENTRIES_MAX]
        if one.sent_at
    ]
    return sorted([*transitions, *comments, *notifications], key=lambda entry: entry.at, reverse=True)[
        :ENTRIES_MAX
    ]


def questions(alert: Alert) -> list[tuple[str, str]]:
    """The metrics that its rule reads, each with the API request that returns them for this alert. One
    that takes several requests is there with what each has of its own: `kvss_generation desired`."""
    rule = alert.definition
    if rule is None:
        return []
    found = {
        query.address(_topic_of(alert, query.topic), alert.labels): query
        for query in rule.queries.values()
    }
    times = Counter(query.metric for query in found.values())
    return [
        (query.metric if times[query.metric] == 1 else f"{query.metric} {_own(query)}", address)
        for address, query in found.items()
    ]


def _own(query: MetricQuery) -> str:
    return " ".join(filter(None, query.where.values())) or query.fold.value


@dataclass(frozen=True)
class AlertChart:
    """The chart of an alert."""

    topic: str
    title: str
    metric: str
    fold: str
    by: str
    over: str
    where: str


def charts(principal: Principal, alert: Alert) -> list[AlertChart]:
    """A chart of the first metric that its rule reads, if they may see the metrics of its topic."""
    rule = alert.definition
    query = next(iter(rule.queries.values()), None) if rule else None
    if rule is None or query is None:
        return []
    topic = _topic_of(alert, query.topic)
    try:
        check_topic(principal, topic)
    except Http404:
        return []
    own = {name: alert.labels[name] for name in query.by if name in alert.labels}
    where = {**query.where, **own}
    return [
        AlertChart(
            topic,
            rule.title,
            query.metric,
            _FOLDS.get(query.fold, query.fold),
            " ".join(name for name in query.by if name not in own and len(query.by) == 1),
            query.over or "",
            # The list is separated by blanks, so no label in it may contain one.
            " ".join(f"{name}:{text}" for name, text in where.items() if text and " " not in text),
        )
    ]


def around(alert: Alert, now: datetime) -> Range:
    """From half an hour before the alert began until half an hour after it resolved, or now."""
    end = now if alert.is_open else min(now, alert.state_since + AROUND)
    return Range((alert.begun_at - AROUND).timestamp(), end.timestamp())


def _topic_of(alert: Alert, queried: str) -> str:
    """The topic of its metrics: the alert's own, unless the rule reads those of one of its labels."""
    kind = kind_of(queried)
    named = alert.labels.get(kind)
    return f"{kind}:{named}" if named and kind != kind_of(alert.topic) else alert.topic


def matchers_of(alert: Alert) -> list[str]:
    """Matchers that select this alert only."""
    kind, _, name = alert.topic.partition(":")
    about = [f"{kind}={name}"] if name else []
    return [
        f"rule={alert.rule}",
        *about,
        *(f"{label}={text}" for label, text in sorted(alert.labels.items())),
    ]
