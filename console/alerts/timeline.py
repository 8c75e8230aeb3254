"""What the page of an alert tells beside its state: its history, and what to ask."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from console.alerts.models import Alert, Notification
from telemetry.topics import kind_of

ENTRIES_MAX: Final = 200


@dataclass(frozen=True)
class Entry:
    """Something that happened to an alert."""

    at: datetime
    kind: str  # flip, comment or told
    text: str
    who: str = ""
    state: str = ""  # of a flip


def of(alert: Alert) -> list[Entry]:
    """The latest first."""
    flips = [
        Entry(flip.at, "flip", flip.sentence, state=flip.after)
        for flip in alert.flips.order_by("-number")[:ENTRIES_MAX]
    ]
    comments = [
        Entry(comment.at, "comment", comment.text, comment.author)
        for comment in alert.comments.order_by("-pk")[:ENTRIES_MAX]
    ]
    told = [
        Entry(one.sent_at, "told", one.what, one.channel.name)
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
