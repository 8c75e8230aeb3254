"""From the stream to PostgreSQL: each record counts once, however often it is delivered.

A batch is written in one transaction and acknowledged after it. Whoever is killed in between leaves
the batch pending; it is read again at the next start, and the sequence tells what was written.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

import redis
from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from telemetry.records import GROUP, STREAM, Record

log = logging.getLogger(__name__)

Entries = list[tuple[str, dict[str, str]]]

BATCH_MAX = 500
BLOCK_MS = 1000
IDLE_MS_BEFORE_TAKEN_OVER = 30_000


@dataclass
class Counts:
    """What this process did since it started."""

    written: int = 0
    repeated: int = 0
    malformed: int = 0


class Ingest:
    """One member of the consumer group. Several may run; none owns anything but what it reads."""

    def __init__(self, client: redis.Redis, consumer: str) -> None:
        self.client = client
        self.consumer = consumer
        self.counts = Counts()

    def join(self) -> None:
        """Make the group if it is not there yet. It begins with the oldest record there is."""
        try:
            self.client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def step(self) -> int:
        """Write one batch, waiting for it at most BLOCK_MS; the number of records read.

        What another member took and never finished comes before anything new.
        """
        entries = self._left_behind() or self._fresh()
        if entries:
            self._write(entries)
            self.client.xack(STREAM, GROUP, *[entry_id for entry_id, _ in entries])
        return len(entries)

    def _left_behind(self) -> Entries:
        answer = self.client.xautoclaim(
            STREAM,
            GROUP,
            self.consumer,
            min_idle_time=IDLE_MS_BEFORE_TAKEN_OVER,
            count=BATCH_MAX,
        )
        return [(entry_id, fields) for entry_id, fields in answer[1] if fields]

    def _fresh(self) -> Entries:
        answer = self.client.xreadgroup(
            GROUP, self.consumer, {STREAM: ">"}, count=BATCH_MAX, block=BLOCK_MS
        )
        # redis-py's types cover every protocol and encoding at once; ours is RESP2 with texts.
        streams = cast("list[tuple[str, Entries]]", answer)
        return streams[0][1] if streams else []

    def _write(self, entries: Entries) -> None:
        latest: dict[str, Record] = {}
        for entry_id, fields in entries:
            try:
                record = Record.decode(fields)
            except ValueError as error:
                self.counts.malformed += 1
                log.warning("record %s is malformed: %s", entry_id, error)
                continue
            known = latest.get(record.source)
            if known is None or record.sequence > known.sequence:
                latest[record.source] = record
        # In one order, so that two members never wait for each other in a circle.
        with transaction.atomic(), connection.cursor() as cursor:
            for source in sorted(latest):
                written = _upsert(cursor, latest[source])
                self.counts.written += written
                self.counts.repeated += 1 - written


def _upsert(cursor: CursorWrapper, record: Record) -> int:
    cursor.execute(
        """
        INSERT INTO telemetry_source AS s
            (name, kind, version, host, process_id, started_at, sequence, seen_at)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
        ON CONFLICT (name) DO UPDATE
            SET sequence = EXCLUDED.sequence, seen_at = EXCLUDED.seen_at
            WHERE s.sequence < EXCLUDED.sequence
        """,
        [
            record.source,
            record.kind,
            record.version,
            record.host,
            record.process_id,
            datetime.fromtimestamp(record.started_at, UTC),
            record.sequence,
            datetime.fromtimestamp(record.at, UTC),
        ],
    )
    return int(cursor.rowcount)
