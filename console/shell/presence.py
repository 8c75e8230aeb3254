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
NEEDED = ("web", "worker", "beat", "ingest", "rollup")
KINDS = (*NEEDED, "orchestrator")  # a console without a Cluster Server has none


@dataclass(frozen=True)
class Presence:
    processes: list[tuple[Source, bool]]  # and whether it is silent
    left_out: int  # how many more there are
    missing: list[str]  # needed kinds of which none is known to be alive
    at: datetime


def presence() -> Presence:
    now = timezone.now()
    running = Source.objects.filter(ended_at=None)  # those that ended as they should are not missed
    sources = running.filter(kind__in=KINDS, seen_at__gt=now - SHOWN)
    alive = set(sources.filter(seen_at__gte=now - STALE).values_list("kind", flat=True).distinct())
    shown = sources.order_by("kind", "-seen_at")[:SHOWN_MAX]
    processes = [(source, now - source.seen_at > STALE) for source in shown]
    left_out = max(0, sources.count() - SHOWN_MAX)
    return Presence(processes, left_out, [kind for kind in NEEDED if kind not in alive], now)
