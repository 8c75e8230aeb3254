"""What the page of an alert tells beside its state: its history, what to ask, and what would end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from console.accounts.principal import Principal
from console.alerts.models import Alert, Notification

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
        reading.address(alert.topic, alert.labels): reading.metric for reading in rule.readings.values()
    }
    return [(metric, address) for address, metric in found.items()]


def matchers_of(alert: Alert) -> list[str]:
    """What would silence this one and no other."""
    kind, _, name = alert.topic.partition(":")
    about = [f"{kind}={name}"] if name else []
    return [
        f"rule={alert.rule}",
        *about,
        *(f"{label}={text}" for label, text in sorted(alert.labels.items())),
    ]


# What would end it


@dataclass(frozen=True)
class Fix:
    """Something to do, and the page where it is done, if there is one."""

    text: str
    address: str = ""


Find = Callable[[Principal, Alert], list[Fix]]
_FINDERS: dict[str, Find] = {}


def fix_of(rule: str) -> Callable[[Find], Find]:
    """Register who knows what would end alerts of a rule, in the case at hand."""

    def register(find: Find) -> Find:
        _FINDERS[rule] = find
        return find

    return register


def fixes(principal: Principal, alert: Alert) -> list[Fix]:
    """What the rule says in general, after what is known of this case."""
    rule, find = alert.definition, _FINDERS.get(alert.rule)
    of_this_case = find(principal, alert) if find else []
    return [*of_this_case, *([Fix(rule.remedy)] if rule else [])]
