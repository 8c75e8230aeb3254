"""Who is lost: those of whom nothing is heard for too long, while the console listens.

Whoever could not hear says nothing about who was silent. A break in listening, because no web process
ran or because nobody looked, begins the time anew; so a console that was away finds its fleet as it was.

Whoever looks does so by the clock of the database: workers look in turns, and theirs may differ.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Min

from console.fleet.models import Brain, Driver, Node, Watch, topic
from console.placement.topology import State
from telemetry.events import note
from telemetry.ingest.sources import ALIVE
from telemetry.models import Source

BREAK: Final = timedelta(seconds=20)  # longer between two looks, and nobody has looked
# Who is in maintenance is expected to be silent.
WATCHED: Final = [State.READY.value, State.CORDONED.value, State.DRAINING.value]
AT_ONCE_MAX: Final = 500


def database_now() -> datetime:
    """The time as all who look have it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (now,) = cursor.fetchone()
    found: datetime = now
    return found


def silent_since(now: datetime) -> datetime | None:
    """Who was heard last before this has been silent for too long; None where the console itself has not
    listened for so long, or nobody has looked whether it has: it may have been off, and just start."""
    since = now - timedelta(seconds=settings.LOST_AFTER_SECONDS)
    return since if has_listened(since, now) else None


def has_listened(since: datetime, now: datetime) -> bool:
    """Whether the console has listened to heartbeats since then without a break."""
    listened = Watch.objects.filter(listening_since__lte=since, swept_at__gte=now - BREAK)
    return listened.exists()


def has_gone_silent(heard_at: datetime | None, now: datetime) -> bool:
    """Whether nothing was heard of somebody for too long, although the console listened all the time."""
    since = silent_since(now)
    return since is not None and heard_at is not None and heard_at < since


@transaction.atomic
def find_lost(now: datetime) -> int:
    """Mark who has been silent for too long, with an event each; how many. Any number may look."""
    patience = timedelta(seconds=settings.LOST_AFTER_SECONDS)
    if _listening_since(now) > now - patience:
        return 0
    nodes = Node.objects.select_for_update(no_key=True, skip_locked=True).filter(
        state__in=WATCHED, last_heartbeat_at__lt=now - patience
    )[:AT_ONCE_MAX]
    silent: list[Driver | Brain] = [
        one
        for model in (Driver, Brain)
        for one in model.objects.select_for_update(no_key=True, skip_locked=True).filter(
            lost_at=None, last_heartbeat_at__lt=now - patience
        )[:AT_ONCE_MAX]
    ]
    lost = [_lose_node(node, now) for node in nodes] + [_lose(one, now) for one in silent]
    for name, kind, sentence in lost:
        note(f"{kind}.lost", [name], sentence, at=now)
    return len(lost)


def _listening_since(now: datetime) -> datetime:
    """Since when somebody has looked, and a web process has been there to hear."""
    watch, _ = Watch.objects.select_for_update(no_key=True).get_or_create(
        pk=1, defaults={"listening_since": now, "swept_at": now}
    )
    web = Source.objects.filter(kind="web", seen_at__gt=now - ALIVE).aggregate(since=Min("started_at"))
    if abs(now - watch.swept_at) > BREAK or web["since"] is None:  # also a clock that was set back
        watch.listening_since = now
    elif web["since"] <= now:  # else it began by a clock that was ahead
        watch.listening_since = max(watch.listening_since, web["since"])
    watch.swept_at = now
    watch.save()
    return watch.listening_since


def _lose_node(node: Node, now: datetime) -> tuple[str, str, str]:
    node.held_state, node.held_reason = node.state, node.state_reason
    node.state, node.state_since = State.LOST.value, now
    node.state_reason = f"No heartbeat for {settings.LOST_AFTER_SECONDS} s."
    node.version += 1
    node.save()
    return topic(node), "node", f"{node.name} is lost: no heartbeat."


def _lose(one: Driver | Brain, now: datetime) -> tuple[str, str, str]:
    one.lost_at = now
    one.version += 1
    one.save()
    kind = one.KIND.value
    return topic(one), kind, f"{kind.capitalize()} {one.name} is lost: no heartbeat."
