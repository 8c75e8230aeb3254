"""The console's own Prometheus metrics."""

from __future__ import annotations

from typing import Final

import redis
from django.conf import settings
from django.db import connection
from django.utils import timezone

from console.alerts import metrics as of_alerts
from console.control import own as of_targets
from console.metrics.own import DEAD_LETTERS, LINE_AGE, MISSING, SOURCES, STORED, STREAM_LENGTH
from telemetry.emit.exposition import Page
from telemetry.ingest.dead_letters import counts_of_today
from telemetry.ingest.sources import ALIVE
from telemetry.ingest.streams import waiting
from telemetry.metrics import LabelLimits, Sink
from telemetry.models import Source

_LIMITS: Final = LabelLimits()
REDIS_SECONDS_MAX: Final = 2.0
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
    into.put(SOURCES, [({"kind": kind}, 1) for kind, _ in alive])
    into.put(MISSING, [({}, sum(missing for _, missing in alive))])
    client = redis.Redis.from_url(
        settings.INGEST_URL,
        socket_timeout=REDIS_SECONDS_MAX,
        socket_connect_timeout=REDIS_SECONDS_MAX,
        driver_info=None,
    )
    try:
        into.put(STREAM_LENGTH, [({}, waiting(client))])
    except redis.RedisError:
        into.put(STREAM_LENGTH, [])  # the other metrics are still valid
    finally:
        client.close()
    into.put(DEAD_LETTERS, [({"cause": cause}, times) for cause, times in counts_of_today(now)])
    of_alerts.collect(into)
    of_targets.collect(into)
    with connection.cursor() as cursor:
        cursor.execute("SELECT level, at FROM telemetry_watermark WHERE at > 0")
        into.put(LINE_AGE, [({"level": level}, now.timestamp() - at) for level, at in cursor])
        cursor.execute(_SIZES)
        into.put(STORED, [({"level": level}, int(size)) for level, size in cursor])
