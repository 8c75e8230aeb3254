"""What happened, in one order: to policies, sessions, placements and nodes; and alerts.

The markers on charts, and what a page shows as "what changed shortly before". An event is noted in the
transaction of what it tells of, so it is there exactly if that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import connection, transaction
from django.db.models import F, Func, QuerySet, Value
from django.utils import timezone

from telemetry.hints import hint
from telemetry.models import Event
from telemetry.topics import FLEET

TOPICS_MAX: Final = 32
SENTENCE_MAX: Final = 300
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('telemetry events'))"


class NewEvent(NamedTuple):
    """What is to be noted: for these topics, and for the fleet. `at` is now, unless it was earlier."""

    kind: str
    topics: Sequence[str]
    sentence: str
    data: Mapping[str, Any] | None = None
    at: datetime | None = None


def note(
    kind: str,
    topics: Sequence[str],
    sentence: str,
    data: Mapping[str, Any] | None = None,
    at: datetime | None = None,
) -> Event:
    """Add an event to the log; live viewers are told at once. See `note_all`."""
    [event] = note_all([NewEvent(kind, topics, sentence, data, at)])
    return event


def note_all(events: Sequence[NewEvent]) -> list[Event]:
    """Add events to the log.

    Call it inside the transaction of what they tell of, and late in it: until its end others wait. So
    events become visible in the order of their numbers: who reads from a number on misses none.
    """
    if not events:
        return []
    if not transaction.get_connection().in_atomic_block:
        kind = events[0].kind
        raise RuntimeError(f"{kind} must be noted in the transaction of its change")
    in_order_of_commits()
    now = timezone.now()
    made = [
        Event(
            at=one.at or now,
            kind=one.kind,
            topics=list(dict.fromkeys([*one.topics[: TOPICS_MAX - 1], FLEET])),
            sentence=one.sentence[:SENTENCE_MAX],
            data=dict(one.data or {}),
        )
        for one in events
    ]
    for kind in dict.fromkeys(one.kind for one in made):
        hint({topic for one in made if one.kind == kind for topic in one.topics}, kind)
    return Event.objects.bulk_create(made)


def in_order_of_commits() -> None:
    """What is numbered from here on in this transaction is visible before any higher number is.

    There is one order for all that is numbered so: two would wait for one another.
    """
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)


def events_of(
    *topics: str,
    kind: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
) -> QuerySet[Event]:
    """Of any of these topics, unordered; of a kind, or all that begin so: `org` is also `org.update`."""
    found = Event.objects.filter(topics__overlap=list(topics))
    if kind:
        found = found.filter(kind=kind) | found.filter(kind__startswith=f"{kind}.")
    if since:
        found = found.filter(at__gte=since)
    if until:
        found = found.filter(at__lt=until)
    return found


def free_topic(topic: str) -> None:
    """Take a topic from all events so far: something new has its name, which may be somebody else's."""
    kept = Func(F("topics"), Value(topic), function="array_remove")
    Event.objects.filter(topics__contains=[topic]).update(topics=kept)


def forget_old_events(now: datetime, days: int) -> int:
    """Charts reach no further back."""
    deleted, _ = Event.objects.filter(at__lt=now - timedelta(days=days)).delete()
    return deleted
