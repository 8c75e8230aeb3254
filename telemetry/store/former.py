"""Names that are used again: what was told of a topic may be of somebody else than has its name now."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from django.db import connection
from django.db.models.functions import Now

from telemetry import events
from telemetry.ingest.slowest import free_transfers
from telemetry.models import FormerTopic
from telemetry.records import BEHIND_SECONDS_MAX, LATE_SECONDS_MAX
from telemetry.store.storage import FRESH, LEVELS


def free_topic(topic: str) -> None:
    """Within the transaction that makes something of this name: delete the numbers of what had it
    before, and take events and slowest transfers from it. Waits for a roll-up to end its step, so that
    nothing is on its way from one level to another. Records of before that are still in Redis are not
    counted for it, but in a batch that is being written just now.

    A record of just now tells of what came before and after. Of a name that nobody is known to have had
    it counts: else the first seconds of whatever is new would be lost. Who has had it is known by its
    numbers, and for as long as records of it are taken, which may not have been read yet."""
    events.free_topic(topic)
    free_transfers(topic)
    FormerTopic.objects.filter(ended_at__lt=Now() - timedelta(seconds=LATE_SECONDS_MAX)).delete()
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM telemetry_topic WHERE name = %s", [topic])
        found = cursor.fetchone()
        is_known = found is not None or FormerTopic.objects.filter(name=topic).exists()
        ended_at = Now() if is_known else Now() - timedelta(seconds=BEHIND_SECONDS_MAX)
        FormerTopic.objects.update_or_create(name=topic, defaults={"ended_at": ended_at})
        if found is None:
            return
        cursor.execute("SELECT FROM telemetry_watermark ORDER BY level FOR UPDATE")
        for table in (FRESH, *LEVELS):
            cursor.execute(f"DELETE FROM telemetry_{table} WHERE topic = %s", [found[0]])  # noqa: S608


def ended_since(at: float) -> Mapping[str, float]:
    """The topics whose names others have by now, and until when they had them; of those since `at`."""
    found = FormerTopic.objects.filter(ended_at__gt=datetime.fromtimestamp(at, UTC))
    return {name: ended_at.timestamp() for name, ended_at in found.values_list("name", "ended_at")}
