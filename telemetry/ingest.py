"""From the stream to PostgreSQL: each record counts once, however often it is delivered.

A batch is written in one transaction and acknowledged after it. Whoever is killed in between leaves the
batch pending; it is read again, and what is known of each source's records tells which were written.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, cast

import redis
from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper

from telemetry import topics, transfers
from telemetry.events import Happening, note_all
from telemetry.folding import Folder
from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink
from telemetry.received import Ranges, admit, missing, parse, write
from telemetry.records import GROUP, SHAPE_KEY, STREAM, Record, decode
from telemetry.shapes import Shape
from telemetry.slowest import keep
from telemetry.storage import FRESH, Names, copy_in, day_of
from telemetry.transfers import Transfer

log = logging.getLogger(__name__)

Entries = list[tuple[bytes, dict[bytes, bytes]]]
Telling = tuple[Record, Shape | None]

BATCH_MAX: Final = 2000
BLOCK_MS: Final = 500
IDLE_MS_BEFORE_TAKEN_OVER: Final = 30_000
EARLY_SECONDS_MAX: Final = 300  # a clock may be ahead by so much
LATE_SECONDS_MAX: Final = 86_400  # as long as there are partitions; sources are remembered as long
_NOTED: Final = frozenset({"agent", "driver"})
SHAPES_MAX: Final = 8192  # that are kept in memory

METRICS: Final = Catalog()
RECORDS = METRICS.counter(
    "telemetry_ingest_records_total", "Records read, by what became of them.", "outcome"
)
LAG = METRICS.histogram(
    "telemetry_ingest_lag_seconds", "From a record's arrival in Redis to its being written."
)
BATCH = METRICS.histogram("telemetry_ingest_batch_seconds", "Writing a batch.")
WAITING = METRICS.gauge("telemetry_ingest_waiting_records", "Records in Redis that are not written.")


@dataclass
class Counts:
    """What this process did since it started."""

    records: Counter[str] = field(default_factory=Counter)  # by outcome
    lag: Histogram = field(default_factory=Histogram)
    batches: Histogram = field(default_factory=Histogram)
    waiting: int = 0

    def collect(self, into: Sink) -> None:
        into.put(RECORDS, [({"outcome": what}, count) for what, count in self.records.copy().items()])
        into.put(LAG, [({}, self.lag)])
        into.put(BATCH, [({}, self.batches)])
        into.put(WAITING, [({}, self.waiting)])


class Ingest:
    """One member of the consumer group. Several may run; none owns anything but what it reads."""

    def __init__(self, client: redis.Redis, consumer: str, counts: Counts | None = None) -> None:
        """`client` gives answers as bytes."""
        self.client = client
        self.consumer = consumer
        self.counts = counts or Counts()
        self._folder = Folder()
        self._names = Names()
        self._shapes: dict[bytes, Shape] = {}

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
            self._write(entries, time.time())
            self._done(entries)
        return len(entries)

    # Redis

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
        # redis-py's types cover every protocol and encoding at once; ours is RESP2 with bytes.
        streams = cast("list[tuple[bytes, Entries]]", answer)
        return streams[0][1] if streams else []

    def _done(self, entries: Entries) -> None:
        """What is written is taken out of the stream: its length is what waits."""
        ids = [entry_id for entry_id, _ in entries]
        pipe = self.client.pipeline(transaction=False)
        pipe.xack(STREAM, GROUP, *ids)
        pipe.xdel(STREAM, *ids)
        pipe.xlen(STREAM)
        self.counts.waiting = int(pipe.execute()[-1])
        now = time.time()
        for entry_id in ids:
            self.counts.lag.record(max(0.0, now - int(entry_id.split(b"-")[0]) / 1000))

    # Writing

    def _write(self, entries: Entries, now: float) -> None:
        """Malformed and untimely records are counted, and stop nothing."""
        began = time.perf_counter()
        outcomes: Counter[str] = Counter()
        records, slowest = [], dict[tuple[str, int], list[Transfer]]()
        for entry in entries:
            if record := self._read(entry, now, outcomes):
                records.append(record)
                if transfers.FIELD in entry[1]:
                    slowest[record.source, record.sequence] = _transfers(entry, outcomes)
        shapes = self._shapes_of({record.shape for record in records})
        told = [telling for one in records if (telling := _told(one, shapes, outcomes))]
        try:
            with transaction.atomic():
                fresh = _admitted(told, outcomes)
                rows = self._folder.fold((record, shape) for record, shape in fresh if shape)
                copy_in(FRESH, self._names.stored(rows, day_of(now)))
                for record, _ in fresh:
                    keep(record.name, slowest.get((record.source, record.sequence), ()))
        except BaseException:
            self._names.clear()  # what this transaction added is not there
            raise
        self.counts.records += outcomes
        self.counts.batches.record(time.perf_counter() - began)

    def _read(
        self, entry: tuple[bytes, dict[bytes, bytes]], now: float, outcomes: Counter[str]
    ) -> Record | None:
        entry_id, fields = entry
        try:
            record = decode(fields)
        except ValueError as error:
            outcomes["malformed"] += 1
            log.warning("record %s is malformed: %s", entry_id.decode(), error)
            return None
        if not now - LATE_SECONDS_MAX < record.at < now + EARLY_SECONDS_MAX:
            outcomes["untimely"] += 1
            return None
        return record

    def _shapes_of(self, digests: set[bytes]) -> dict[bytes, Shape]:
        """Those that are known here, or that Redis has."""
        if len(self._shapes) > SHAPES_MAX:
            self._shapes.clear()
        unknown = sorted(digests - self._shapes.keys() - {b""})
        if unknown:
            found = self.client.mget([SHAPE_KEY + digest.hex() for digest in unknown])
            for digest, told in zip(unknown, cast("list[bytes | None]", found), strict=True):
                try:
                    shape = Shape.decode(told) if told else None
                except ValueError as error:
                    log.warning("shape %s is malformed: %s", digest.hex(), error)
                    continue
                if shape and shape.digest == digest:
                    self._shapes[digest] = shape
        return self._shapes


def _transfers(entry: tuple[bytes, dict[bytes, bytes]], outcomes: Counter[str]) -> list[Transfer]:
    """What else came with a record, which counts without it."""
    entry_id, fields = entry
    try:
        return transfers.decode(fields)
    except ValueError as error:
        outcomes["malformed_slowest"] += 1
        log.warning("the slowest transfers of record %s are malformed: %s", entry_id.decode(), error)
        return []


def _told(record: Record, shapes: dict[bytes, Shape], outcomes: Counter[str]) -> Telling | None:
    """A record and its shape, if they belong together; None as the shape where it only says that it is
    there."""
    if not record.shape:
        return record, None
    shape = shapes.get(record.shape)
    if shape is None:
        outcomes["unknown_shape"] += 1
        return None
    if not shape.fits(record.cells):
        outcomes["malformed"] += 1
        return None
    return record, shape


def _admitted(told: Sequence[Telling], outcomes: Counter[str]) -> list[Telling]:
    """Those that were never written before. Within the transaction that writes them; it holds their
    sources until its end."""
    by_source = {source: list(its) for source, its in groupby(sorted(told, key=_source), key=_source)}
    if not by_source:
        return []
    admitted: list[Telling] = []
    updates: list[tuple[Any, ...]] = []
    with connection.cursor() as cursor:
        for source, ranges in _known_sources(cursor, by_source):
            its = by_source[source]
            fresh, joined = admit(ranges, [record.sequence for record, _ in its])
            for record, shape in its:
                if record.sequence in fresh:
                    fresh.remove(record.sequence)
                    admitted.append((record, shape))
            last = max((record for record, _ in its), key=lambda record: record.sequence)
            updates.append((source, write(joined), missing(joined), last.sequence, _moment(last.at)))
        _update_sources(cursor, updates)
    outcomes["written"] += len(admitted)
    outcomes["repeated"] += len(told) - len(admitted)
    return admitted


def _source(telling: Telling) -> str:
    return telling[0].source


def _known_sources(
    cursor: CursorWrapper, by_source: dict[str, list[Telling]]
) -> Iterable[tuple[str, Ranges]]:
    """All of them, held, with what has arrived of each. In one order, so that two members never wait for
    each other in a circle."""
    names = sorted(by_source)
    select = (
        "SELECT name, received::text FROM telemetry_source WHERE name = ANY(%s) ORDER BY name FOR UPDATE"
    )
    cursor.execute(select, [names])
    found = cursor.fetchall()
    if len(found) < len(names):
        new = sorted(set(names) - {name for name, _ in found})
        firsts = [by_source[name][0][0] for name in new]
        cursor.execute(
            "INSERT INTO telemetry_source (name, kind, topic, version, host, process_id, started_at, "
            "sequence, missing, seen_at) SELECT *, 0, 0, %s FROM unnest(%s::text[], %s::text[], "
            "%s::text[], %s::text[], %s::text[], %s::int[], %s::timestamptz[]) ON CONFLICT DO NOTHING "
            "RETURNING name",
            [
                _moment(0),
                new,
                [one.kind for one in firsts],
                [topics.of_source(one.kind, one.name) for one in firsts],
                [one.version for one in firsts],
                [one.host for one in firsts],
                [one.process_id for one in firsts],
                [_moment(one.started_at) for one in firsts],
            ],
        )
        began = [by_source[name][0][0] for (name,) in cursor.fetchall()]
        cursor.execute(select, [names])
        found = cursor.fetchall()
        _note_beginnings(began)
    return [(name, parse(received)) for name, received in found]


def _note_beginnings(firsts: Iterable[Record]) -> None:
    """Nodes and drivers were started, or started again: what changed shortly before."""
    note_all(
        [
            Happening(
                "node.started",
                [topics.of_source(first.kind, first.name)],
                f"{first.kind.capitalize()} {first.name} was started, {first.version}.",
                {"source": first.source, "host": first.host, "version": first.version},
                _moment(first.started_at),
            )
            for first in firsts
            if first.kind in _NOTED
        ]
    )


def _update_sources(cursor: CursorWrapper, updates: list[tuple[Any, ...]]) -> None:
    cursor.execute(
        "UPDATE telemetry_source AS s SET received = v.received::int8multirange, missing = v.missing, "
        "sequence = greatest(s.sequence, v.sequence), seen_at = greatest(s.seen_at, v.seen_at) "
        "FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::timestamptz[]) "
        "AS v (name, received, missing, sequence, seen_at) WHERE s.name = v.name",
        [list(column) for column in zip(*updates, strict=True)],
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
