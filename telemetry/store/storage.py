"""Rows in PostgreSQL: how topics and shapes become numbers, how rows get in and come out.

`telemetry_fresh` has what has come in, in pieces; a table for each level has what was made of it, in
partitions of a day. Rows of the same topic and bucket are added up, wherever they are: so nothing is
ever updated, and what is late is one more row.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any, Final, NamedTuple

import msgspec
from django.db import OperationalError, connection, transaction
from msgspec import Raw

from telemetry.cells import Cell, Cells, Gauge, Number, Sparse, clamped
from telemetry.decoder import Limits, unpack
from telemetry.ingest.folder import BUCKET_SECONDS, Row
from telemetry.metrics import Kind
from telemetry.shapes import Shape

log = logging.getLogger(__name__)

LEVELS: Final[Mapping[str, int]] = {"10s": BUCKET_SECONDS, "1m": 60, "1h": 3600}  # seconds of a bucket
FRESH: Final = "fresh"
SHAPES_KEPT: Final = 16_384  # whose numbers are remembered
SERIES_KEPT: Final = 1_000_000  # of shapes in the memory of a process
_LOCKED: Final = "55P03"  # the SQLSTATE of a lock that was waited for long enough

ROW: Final = Limits(16 << 20)  # 4,096 histograms, each with all of its buckets in use

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Cells)
# Of one kind each: the others are left as they are.
_OF_KIND: Final = (
    msgspec.msgpack.Decoder(tuple[list[Number], Raw, Raw]),
    msgspec.msgpack.Decoder(tuple[Raw, list[Gauge], Raw]),
    msgspec.msgpack.Decoder(tuple[Raw, Raw, list[Sparse]]),
)


class Stored(NamedTuple):
    """A row as it lies there."""

    topic: int
    shape: int
    bucket: int
    cells: bytes


class Names:
    """The numbers of topics and shapes, as this process has learned them today."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """After a transaction that failed: what it added is not there."""
        self._topics: dict[str, int] = {}
        self._shapes: dict[bytes, int] = {}
        self._on: date | None = None

    def stored(self, rows: Collection[Row], today: date) -> list[Stored]:
        """Within the transaction that writes them."""
        self._learn_topics({row.topic for row in rows}, today)
        self.learn_shapes([row.shape for row in rows], today)
        return [
            Stored(self._topics[row.topic], self.number(row.shape), row.bucket, encoded(row.cells))
            for row in rows
        ]

    def _learn_topics(self, names: Collection[str], today: date) -> None:
        self._begin(today)
        # In one order, so that two members never wait for each other in a circle.
        unknown = sorted(set(names) - self._topics.keys())
        if unknown:
            with connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO telemetry_topic (name, seen_on) SELECT unnest(%s::text[]), %s "
                    "ON CONFLICT (name) DO UPDATE SET "
                    "seen_on = greatest(telemetry_topic.seen_on, EXCLUDED.seen_on) RETURNING name, id",
                    [unknown, today],
                )
                self._topics.update(cursor.fetchall())

    def learn_shapes(self, shapes: Collection[Shape], today: date) -> None:
        """Within the transaction. Once a day each is noted to be in use."""
        self._begin(today)
        unknown = {one.digest: one for one in shapes if one.digest not in self._shapes}
        if unknown:
            digests = sorted(unknown)
            with connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO telemetry_storedshape (digest, encoded, seen_on) "
                    "SELECT unnest(%s::bytea[]), unnest(%s::bytea[]), %s ON CONFLICT (digest) "
                    "DO UPDATE SET seen_on = EXCLUDED.seen_on RETURNING digest, id",
                    [digests, [unknown[digest].encoded for digest in digests], today],
                )
                self._shapes.update((bytes(digest), number) for digest, number in cursor.fetchall())

    def _begin(self, today: date) -> None:
        if today != self._on or len(self._shapes) > SHAPES_KEPT:
            self.clear()
            self._on = today

    def number(self, shape: Shape) -> int:
        return self._shapes[shape.digest]


class Shapes:
    """Shapes by their numbers, read when they are needed."""

    def __init__(self) -> None:
        self._known: dict[int, Shape] = {}

    def of(self, numbers: Collection[int]) -> Mapping[int, Shape]:
        """A number never means another shape. Those that can't be read are left out."""
        known = {number: self._known[number] for number in numbers if number in self._known}
        unknown = set(numbers) - known.keys()
        if unknown:
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT id, encoded FROM telemetry_storedshape WHERE id = ANY(%s)", [list(unknown)]
                )
                known |= dict(_decoded(cursor))
            self._keep(known)
        return known

    def _keep(self, known: Mapping[int, Shape]) -> None:
        both = {**self._known, **known}  # a new one: other threads may be reading
        series = sum(len(shape.series) for shape in both.values())
        self._known = both if series <= SERIES_KEPT else dict(known)


def _decoded(rows: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, Shape]]:
    for number, encoded in rows:
        try:
            yield number, Shape.decode(bytes(encoded))
        except ValueError as error:
            log.warning("The stored shape %d can't be read: %s", number, error)


def cells_of(encoded: bytes | memoryview) -> Cells:
    """What was stored: numbers within bounds, and sums of them. Raises Malformed."""
    return unpack(encoded, _DECODER, ROW, has_bounds=True)


def cells_of_kind(encoded: bytes | memoryview, kind: Kind) -> list[Cell]:
    """Only these: who asks for a counter has not to wait for histograms."""
    parts: tuple[Any, ...] = _OF_KIND[kind].decode(encoded)
    found: list[Cell] = parts[kind]
    return found


def encoded(cells: Cells) -> bytes:
    try:
        return _ENCODER.encode(cells)
    except OverflowError:  # what a fleet of terabytes comes to in hours: not to the last byte then
        return _ENCODER.encode(clamped(cells))


def copy_in(table: str, rows: Iterable[Stored]) -> None:
    """Append rows to `fresh` or to a level, within the transaction."""
    with connection.cursor() as cursor:
        statement = f"COPY telemetry_{table} (topic, shape, bucket, cells) FROM STDIN (FORMAT BINARY)"
        # psycopg's errors as Django's: callers tell a lost connection from a row that is refused.
        with connection.wrap_database_errors, _copying(cursor, statement) as copying:
            copying.set_types(["int4", "int4", "int8", "bytea"])
            for row in rows:
                copying.write_row(row)


def _copying(cursor: Any, statement: str) -> Any:
    """psycopg's own method, which Django's cursors pass on and do not declare."""
    return cursor.copy(statement)


def make_days(level: str, days: Iterable[date]) -> None:
    """Partitions for these days, as far as they are not there. For one that is there it waits for
    nobody: who makes or drops days has a lock, and may wait for what the caller has read."""
    with connection.cursor() as cursor:
        for day in days:
            cursor.execute(
                "SELECT telemetry_make_day(%s, %s) WHERE to_regclass(%s) IS NULL",
                [level, day, f"telemetry_{level}_{day:%Y%m%d}"],
            )


def drop_days(level: str, before: date) -> int:
    """Remove what is older; how many partitions that was. None while somebody reads for long, as backups
    do: who tried again at once would keep all others from reading."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT telemetry_drop_days(%s, %s)", [level, before])
            return int(cursor.fetchone()[0])
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != _LOCKED:
            raise
        log.warning("Days of %s that are over are dropped later: they are being read.", level)
        return 0


def day_of(seconds: float) -> date:
    return datetime.fromtimestamp(seconds, UTC).date()
