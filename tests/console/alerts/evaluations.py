"""Evaluating rules at moments of a test, and a session across the spine."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

from django.utils import timezone

from console.alerts.models import Evaluation
from console.alerts.rules.rule import Rule
from console.alerts.state import evaluation
from telemetry.ingest.folder import Row
from telemetry.models import Source
from telemetry.shapes import Series, Shape
from telemetry.store.storage import FRESH, Names, copy_in, day_of

NOW = timezone.now().replace(microsecond=0)  # for all of this: no test depends on how long it takes
_ticks = itertools.count(1)


def put(topic: str, values: dict[Series, Any], ago: int = 10) -> None:
    """As many seconds ago as are over when it is asked."""
    shape, bucket = Shape(values), int(NOW.timestamp()) // 10 * 10 - ago
    copy_in(FRESH, Names().stored([Row(topic, bucket, shape, shape.cells(values))], day_of(bucket)))


def heard(topic: str, seconds_ago: float = 0) -> None:
    kind, _, name = topic.partition(":")
    Source.objects.update_or_create(
        name=topic,
        defaults={
            "kind": kind,
            "topic": topic,
            "version": "1",
            "host": name,
            "process_id": 1,
            "started_at": NOW,
            "sequence": 1,
            "seen_at": NOW - timedelta(seconds=seconds_ago),
        },
    )


def tick(*rules: Rule) -> int:
    """As if the last one were long enough ago. Each is a little later than the one before."""
    Evaluation.objects.all().delete()
    return evaluation.tick(NOW + timedelta(microseconds=next(_ticks)), rules)
