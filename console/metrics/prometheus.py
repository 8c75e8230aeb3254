"""The console's own Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Final

import redis
from django.conf import settings
from django.db import connection
from django.db.models import Count, F
from django.utils import timezone

from console.alerts.models import Alert, Notification
from console.alerts.services import Evaluator
from console.alerts.state.lifecycle import OPEN
from console.control.models import BadAnswers, Target
from console.metrics import own
from console.redis_client import connected
from telemetry.emit.exposition import Page
from telemetry.ingest.dead_letters import counts_of_today
from telemetry.ingest.sources import ALIVE
from telemetry.ingest.streams import waiting
from telemetry.metrics import LabelLimits, Sink
from telemetry.models import Source

_LIMITS: Final = LabelLimits()
REDIS_SECONDS_MAX: Final = 2.0
WAITING_LONG: Final = timedelta(minutes=5)  # a notification
_SIZES: Final = """
    SELECT l.level, sum(pg_total_relation_size(i.inhrelid))
    FROM telemetry_watermark AS l
    JOIN pg_inherits AS i ON i.inhparent = ('telemetry_' || l.level)::regclass
    GROUP BY l.level UNION ALL SELECT 'fresh', pg_total_relation_size('telemetry_fresh')
"""


def page() -> str:
    made = Page(_LIMITS)
    collect(made)
    return str(made)


def collect(into: Sink) -> None:
    """Every web process returns the same: it is all in PostgreSQL and Redis."""
    now = timezone.now()
    alive = list(Source.objects.filter(seen_at__gt=now - ALIVE).values_list("kind", "missing"))
    into.put(own.SOURCES, [({"kind": kind}, 1) for kind, _ in alive])
    into.put(own.MISSING, [({}, sum(missing for _, missing in alive))])
    try:
        with connected(settings.INGEST_URL, REDIS_SECONDS_MAX) as client:
            into.put(own.STREAM_LENGTH, [({}, waiting(client))])
    except redis.RedisError:
        into.put(own.STREAM_LENGTH, [])  # the other metrics are still valid
    into.put(own.DEAD_LETTERS, [({"cause": cause}, times) for cause, times in counts_of_today(now)])
    _collect_alerts(into)
    _collect_targets(into)
    with connection.cursor() as cursor:
        cursor.execute("SELECT level, at FROM telemetry_watermark WHERE at > 0")
        into.put(own.LINE_AGE, [({"level": level}, now.timestamp() - at) for level, at in cursor])
        cursor.execute(_SIZES)
        into.put(own.STORED, [({"level": level}, int(size)) for level, size in cursor])


def _collect_alerts(into: Sink) -> None:
    """Evaluation and notifications."""
    now = timezone.now()
    at = Evaluator.now().at
    into.put(own.ALERTS_AGE, [({}, (now - at).total_seconds())] if at else [])
    open_alerts = Alert.objects.filter(state__in=OPEN).order_by()
    counts = open_alerts.values_list("state", "severity").annotate(Count("pk"))
    into.put(
        own.ALERTS, [({"state": state, "severity": grave}, count) for state, grave, count in counts]
    )
    unsent = Notification.objects.filter(state=Notification.State.WAITING)
    given_up = Notification.objects.filter(
        state=Notification.State.GIVEN_UP, created_at__gt=now - timedelta(days=1)
    ).exclude(what=Notification.What.TEST)
    of_state = {
        "waiting": unsent,
        "waiting_long": unsent.filter(created_at__lt=now - WAITING_LONG),
        "given_up": given_up,
    }
    into.put(own.NOTIFICATIONS, [({"state": state}, rows.count()) for state, rows in of_state.items()])


def _collect_targets(into: Sink) -> None:
    """Who is behind, and whose answers are none."""
    told = Target.objects.filter(generation__gt=0)
    faults = Counter(told.exclude(fault="").values_list("fault", flat=True))
    behind = told.filter(fault="").exclude(observed_generation=F("generation")).count()
    states = {"as told": told.count() - faults.total() - behind, "behind": behind, **faults}
    into.put(own.TARGETS, [({"state": state}, count) for state, count in sorted(states.items())])
    counted = BadAnswers.objects.order_by("fault").values_list("fault", "count")
    into.put(own.BAD_ANSWERS, [({"fault": fault}, count) for fault, count in counted])
