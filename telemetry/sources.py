"""The processes that tell of themselves, and for how long a silent one is remembered."""

from __future__ import annotations

from datetime import datetime, timedelta

from telemetry.models import Source

REMEMBERED = timedelta(days=1)
ALIVE = timedelta(seconds=10)  # who was heard since then


def forget_silent_sources(now: datetime) -> int:
    """Each life of a process is a source of its own, so those that ended have to go some day."""
    deleted, _ = Source.objects.filter(seen_at__lt=now - REMEMBERED).delete()
    return deleted
