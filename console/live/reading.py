"""What live topics are made of, read from storage: events, numbers, states. Synchronous."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from django.db.models import Max

from console.live.feed import EVENTS_KEPT, Event, Feed, Update
from console.live.messages import moment
from console.live.services import state_of
from telemetry import models
from telemetry.events import events_of
from telemetry.figures import CurrentFigures, figures_now

EVENTS_AT_ONCE: Final = 1000  # of a round; the rest is for the next


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a round of reading is for."""

    event: int | None  # the last one known; None at the beginning
    begin: Collection[str] = ()  # topics that nobody has watched before
    watched: Collection[str] = ()
    hints: Mapping[str, Collection[str]] = field(default_factory=dict)  # by topic
    is_full: bool = True  # numbers and states of all topics, not only of changed ones


@dataclass(frozen=True, slots=True)
class Reading:
    event: int
    begun: Mapping[str, Feed]
    updates: Mapping[str, Update]


def read(wanted: Wanted) -> Reading:
    """One round, for all topics at once."""
    now = time.time()
    event, events = _events_since(wanted)
    full = [*wanted.begin, *(wanted.watched if wanted.is_full else ())]
    numbers = {topic: _numbers(one, now) for topic, one in figures_now(full, now).items()}
    updates = {}
    for topic in wanted.watched:
        hints, its = wanted.hints.get(topic, ()), events.get(topic, ())
        state = state_of(topic) if wanted.is_full or hints or its else None
        told = numbers.get(topic, {}) if wanted.is_full else None
        updates[topic] = Update(event, its, hints, told, state)
    begun = {topic: _begin(topic, event, numbers.get(topic, {}), now) for topic in wanted.begin}
    return Reading(event, begun, updates)


def feed_of(topic: str) -> Feed:
    """As it is now, for somebody who asks once."""
    return read(Wanted(None, begin=[topic])).begun[topic]


def _events_since(wanted: Wanted) -> tuple[int, Mapping[str, list[Event]]]:
    """Up to which number the log is read, and what is new for the topics that are watched. Events become
    visible in the order of their numbers, so nothing is missed below the highest."""
    last = models.Event.objects.aggregate(last=Max("pk"))["last"] or 0
    if wanted.event is None or last <= wanted.event or not wanted.watched:
        return max(last, wanted.event or 0), {}
    log = models.Event.objects.filter(
        pk__gt=wanted.event, pk__lte=last, topics__overlap=list(wanted.watched)
    )
    found = list(log.order_by("pk")[:EVENTS_AT_ONCE])
    by_topic: dict[str, list[Event]] = defaultdict(list)
    for one in found:
        for topic in one.topics:
            by_topic[topic].append(_shown(one))
    return found[-1].pk if len(found) == EVENTS_AT_ONCE else last, by_topic


def _begin(topic: str, event: int, numbers: Mapping[str, Any], now: float) -> Feed:
    before = events_of(topic).filter(pk__lte=event).order_by("-pk")[:EVENTS_KEPT]
    events: Iterable[Event] = [_shown(one) for one in reversed(before)]
    return Feed.begin(topic, event, events, Update(event, (), (), numbers, state_of(topic)), now)


def _shown(event: models.Event) -> Event:
    """As in the API, without whom else it is told: that is not for all to know."""
    return {
        "id": event.pk,
        "at": moment(event.at.timestamp()),
        "kind": event.kind,
        "sentence": event.sentence,
        "data": event.data,
    }


def _numbers(now: CurrentFigures, at: float) -> dict[str, Any]:
    return {
        "at": moment(at),
        "seconds": round(now.seconds, 1),
        "figures": _rounded(now.figures),
        "points": [{"at": bucket, "figures": _rounded(its)} for bucket, its in now.points.items()],
    }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """To what somebody can see."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
