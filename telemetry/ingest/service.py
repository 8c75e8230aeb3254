"""From the streams to PostgreSQL: each record counts once, however often it is delivered.

A batch is written in one transaction and acknowledged after it. Whoever is killed in between leaves the
batch pending; it is read again, and what is known of each source's records tells which were written.
What can't be written is taken aside (`dead_letters`), and the rest of its batch is written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import redis
from django.db import DataError, IntegrityError, transaction

from telemetry import topics
from telemetry.histogram import Histogram
from telemetry.ingest import dead_letters
from telemetry.ingest.batches import Batch, Readable
from telemetry.ingest.dead_letters import Cause
from telemetry.ingest.folder import Folder
from telemetry.ingest.known_shapes import KnownShapes
from telemetry.ingest.quotas import Quotas
from telemetry.ingest.slowest import store_slowest
from telemetry.ingest.sources import admitted
from telemetry.ingest.streams import Entry, Streams
from telemetry.metrics import Catalog, Sink, put
from telemetry.store.former import ended_since
from telemetry.store.storage import FRESH, Names, copy_in, day_of

# What a record is refused for. All else that a database says is a reason to wait for it.
_REFUSALS: Final = (DataError, IntegrityError, OverflowError, ValueError)

METRICS: Final = Catalog()
RECORDS = METRICS.counter("telemetry_ingest_records_total", "Records read, by outcome.", "outcome")
DEAD = METRICS.counter(
    "telemetry_dead_letters_total",
    "What could not be stored, by cause: records, rows, or series over a quota. See dead letters.",
    "cause",
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
    dead: Counter[str] = field(default_factory=Counter)  # by cause
    lag: Histogram = field(default_factory=Histogram)
    batches: Histogram = field(default_factory=Histogram)
    waiting: int = 0

    def collect(self, into: Sink) -> None:
        put(into, RECORDS, self.records)
        put(into, DEAD, self.dead)
        put(into, LAG, self.lag)
        put(into, BATCH, self.batches)
        put(into, WAITING, self.waiting)


class Ingest:
    """One member of the consumer group. Several may run; none owns anything but what it reads."""

    def __init__(self, client: redis.Redis, consumer: str, counts: Counts | None = None) -> None:
        """`client` gives answers as bytes."""
        self.streams = Streams(client, consumer)
        self.counts = counts or Counts()
        self._quotas = Quotas()
        self._folder = Folder(self._quotas)
        self._names = Names()
        self._shapes = KnownShapes(client, self._quotas)

    def join(self) -> None:
        """Make the groups that are not there yet."""
        self.streams.join()

    def step(self) -> int:
        """Write one batch, waiting for it at most BLOCK_MS; the number of records read.

        What another member took and never finished comes before anything new.
        """
        entries = self.streams.read()
        if entries or self.streams.cut_off:
            self.done(self.write(entries, time.time()))
        return len(entries)

    def done(self, entries: Sequence[Entry]) -> None:
        self.streams.done(entries)
        self.counts.waiting = self.streams.waiting
        now = time.time()
        for entry in entries:
            self.counts.lag.record(now - entry.arrived_at(now))

    def write(self, entries: Sequence[Entry], now: float) -> list[Entry]:
        """Write what makes sense and set aside what does not; the entries that are done with then."""
        began = time.perf_counter()
        self._quotas.begin(now)
        batch = Batch(now, self._quotas)
        records = batch.records(entries)
        while records:
            read, records = batch.read(records, self._shapes)
            self._store(read, batch)
        self._set_aside(batch)
        self.counts.records += batch.outcomes
        self.counts.batches.record(time.perf_counter() - began)
        return batch.done

    def _store(self, read: Sequence[Readable], batch: Batch) -> None:
        """In one transaction. Where the database refuses that, in halves, until it is known what it does
        not take. A database that is away raises, and nothing is lost."""
        try:
            self._store_all(read, batch)
        except _REFUSALS as error:
            if len(read) > 1:
                middle = len(read) // 2
                self._store(read[:middle], batch)
                self._store(read[middle:], batch)
            else:
                [one] = read
                source = topics.of_source(one.record.kind, one.record.name)
                batch.refuse(Cause.REFUSED, source, str(error), one.raw)

    def _store_all(self, read: Sequence[Readable], batch: Batch) -> None:
        slowest = {(one.record.source, one.record.sequence): one.slowest for one in read if one.slowest}
        stored, beyond = Counter[str](), Counter[str]()  # of the slowest transfers, by source
        try:
            with transaction.atomic():
                ended = {(one.record.source, one.record.sequence) for one in read if one.is_last}
                fresh, foreign = admitted([(one.record, one.shape) for one in read], ended)
                told = [(record, shape) for record, shape in fresh if shape]
                former = ended_since(min((record.at for record, _ in told), default=batch.now))
                rows = self._folder.fold(told, batch.now, former)
                copy_in(FRESH, self._names.stored(rows, day_of(batch.now)))
                for record, _ in fresh:
                    if its := slowest.get((record.source, record.sequence)):
                        source = topics.of_source(record.kind, record.name)
                        kept = its[: self._quotas.transfers_left(source) - stored[source]]
                        store_slowest(record.name, kept)
                        stored[source] += len(kept)
                        beyond[source] += len(its) - len(kept)
        except BaseException:
            self._names.clear()  # what this transaction added is not there
            raise
        self._quotas.took_transfers(stored)
        for source, times in (+beyond).items():
            batch.aside.count(Cause.TRANSFERS, source, times)
        batch.outcomes += Counter(written=len(fresh), repeated=len(read) - len(fresh) - len(foreign))
        for record in foreign:
            reason = f"it has the id of another's life, {record.source}"
            source = topics.of_source(record.kind, record.name)
            batch.refuse(Cause.FOREIGN, source, reason, record.encode())

    def _set_aside(self, batch: Batch) -> None:
        for (what, source), times in self._folder.over_quota.items():
            batch.aside.count(Cause(f"over_quota_{what}"), source, times)
        for writer, times in self.streams.cut_off.items():
            batch.aside.count(Cause.CUT_OFF, writer, times)
        if not batch.aside:
            return
        with transaction.atomic():
            dead_letters.store(batch.aside, batch.now)
        self._folder.over_quota.clear()
        self.streams.cut_off.clear()
        for (cause, _), times in batch.aside.counts.items():
            self.counts.dead[cause.value] += times
