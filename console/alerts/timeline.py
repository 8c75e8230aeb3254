"""What the page of an alert tells beside its state: its history, and what to ask."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.http import Http404

from console.accounts.principal import Principal
from console.alerts.channels import visible_channels
from console.alerts.models import Alert, Notification
from console.charts.ranges import Range
from console.metrics.services import check_topic
from telemetry.queries import Fold
from telemetry.topics import kind_of

ENTRIES_MAX: Final = 200
HIDDEN: Final = "a channel of the platform"
AROUND: Final = timedelta(minutes=30)
# What is judged by counts in buckets, or by sums, is seen better so.
_FOLDS: Final = {Fold.HEATMAP: "p50 p99", Fold.SUM: "rate"}


@dataclass(frozen=True)
class Entry:
    """Something that happened to an alert."""

    at: datetime
    kind: str  # flip, comment or told
    text: str
    who: str = ""
    state: str = ""  # of a flip


def of(principal: Principal, alert: Alert) -> list[Entry]:
    """The latest first. A channel that they may not see has no name."""
    seen = set(visible_channels(principal).values_list("pk", flat=True))
    flips = [
        Entry(flip.at, "flip", flip.sentence, state=flip.after)
        for flip in alert.flips.order_by("-number")[:ENTRIES_MAX]
    ]
    comments = [
        Entry(comment.at, "comment", comment.text, comment.author)
        for comment in alert.comments.order_by("-pk")[:ENTRIES_MAX]
    ]
    told = [
        Entry(one.sent_at, "told", one.what, one.channel.name if one.channel_id in seen else HIDDEN)
        for one in alert.notifications.filter(state=Notification.State.SENT)
        .select_related("channel")
        .order_by("-pk")[:ENTRIES_MAX]
        if one.sent_at
    ]
    return sorted([*flips, *comments, *told], key=lambda entry: entry.at, reverse=True)[:ENTRIES_MAX]


def questions(alert: Alert) -> list[tuple[str, str]]:
    """The metrics that its rule reads, each with the address where the API tells them of this alert."""
    rule = alert.definition
    if rule is None:
        return []
    found = {
        reading.address(_asked_of(alert, reading.topic), alert.labels): reading.metric
        for reading in rule.readings.values()
    }
    return [(metric, address) for address, metric in found.items()]


@dataclass(frozen=True)
class Drawn:
    """What a chart of an alert's numbers shows."""

    topic: str
    title: str
    metric: str
    fold: str
    by: str
    over: str
    where: str


def charts(principal: Principal, alert: Alert) -> list[Drawn]:
    """Of the first metric that its rule reads, if they may see the numbers of its topic."""
    rule = alert.definition
    reading = next(iter(rule.readings.values()), None) if rule else None
    if rule is None or reading is None:
        return []
    topic = _asked_of(alert, reading.topic)
    try:
        check_topic(principal, topic)
    except Http404:
        return []
    its = {name: alert.labels[name] for name in reading.by if name in alert.labels}
    where = {**reading.where, **its}
    return [
        Drawn(
            topic,
            rule.title,
            reading.metric,
            _FOLDS.get(reading.fold, reading.fold),
            " ".join(name for name in reading.by if name not in its and len(reading.by) == 1),
            reading.over or "",
            # Of what is parted by blanks none can have one; empty labels tell nothing.
            " ".join(f"{name}:{text}" for name, text in where.items() if text and " " not in text),
        )
    ]


def around(alert: Alert, now: datetime) -> Range:
    """From half an hour before it began until as long after it was over, or now."""
    end = now if alert.is_open else min(now, alert.state_since + AROUND)
    return Range((alert.begun_at - AROUND).timestamp(), end.timestamp())


def _asked_of(alert: Alert, read: str) -> str:
    """The topic that has the numbers: the alert's, unless the rule read those of one of its labels."""
    kind = kind_of(read)
    named = alert.labels.get(kind)
    return f"{kind}:{named}" if named and kind != kind_of(alert.topic) else alert.topic


def matchers_of(alert: Alert) -> list[str]:
    """What would silence this one and no other."""
    kind, _, name = alert.topic.partition(":")
    about = [f"{kind}={name}"] if name else []
    return [
        f"rule={alert.rule}",
        *about,
        *(f"{label}={text}" for label, text in sorted(alert.labels.items())),
    ]
