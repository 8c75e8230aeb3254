"""Names that are used again: what was told of a topic may be of somebody else than has its name now."""

from __future__ import annotations

from django.db import connection

from telemetry import events
from telemetry.ingest.slowest import free_transfers
from telemetry.store.storage import FRESH, LEVELS


def free_topic(topic: str) -> None:
    """Within the transaction that makes something of this name: delete the numbers of what had it
    before, and take events and slowest transfers from it. Waits for a roll-up to end its step, so that
    nothing is on its way from one level to another."""
    events.free_topic(topic)
    free_transfers(topic)
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM telemetry_topic WHERE name = %s", [topic])
        if (found := cursor.fetchone()) is None:
            return
        cursor.execute("SELECT FROM telemetry_watermark ORDER BY level FOR UPDATE")
        for table in (FRESH, *LEVELS):
            cursor.execute(f"DELETE FROM telemetry_{table} WHERE topic = %s", [found[0]])  # noqa: S608
