"""The console's own processes, by what they report through telemetry. Agents and drivers are the
fleet's, and not among them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from telemetry.models import Source

SHOWN = timedelta(minutes=10)  # for how long a silent process stays on the page
STALE = timedelta(seconds=10)
SHOWN_MAX = 200
KINDS = ("web", "worker", "beat", "ingest", "rollup")


@dataclass(frozen=True)
class Presence:
    processes: list[tuple[Source, bool]]  # and whether it is silent
    missing: list[str]  # kinds of which none is known to be alive
    at: datetime


def presence() -> Presence:
    now = timezone.now()
    sources = Source.objects.filter(kind__in=KINDS, seen_at__gt=now - SHOWN).order_by("kind", "-seen_at")
    processes = [(source, now - source.seen_at > STALE) for source in sources[:SHOWN_MAX]]
    alive = {source.kind for source, is_silent in processes if not is_silent}
    return Presence(processes, [kind for kind in KINDS if kind not in alive], now)
