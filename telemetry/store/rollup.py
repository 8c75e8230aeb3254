"""Roll-up: fresh rows to ten seconds, those to minutes and hours; and dropping what is too old.

Each level has a *watermark*: everything before it has been added up into that level. A record that
arrives late, from before the watermark, is added to the level at once, as one more row. So at every
moment a level has exactly what is before its watermark, once, and the finer level has the rest.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Final

from django.conf import settings
from django.db import connection, transaction

from telemetry.cells import is_sound
from telemetry.decoder import Malformed
from telemetry.histogram import Histogram
from telemetry.ingest import dead_letters
from telemetry.ingest.dead_letters import Cause, DeadLetters
from telemetry.ingest.folder import bucket_of
from telemetry.metrics import Catalog, Sink, put
from telemetry.shapes import Shape
from telemetry.store.merge import Merged, Part, merge
from telemetry.store.storage import (
    LEVELS,
    Names,
    Shapes,
    Stored,
    cells_of,
    copy_in,
    day_of,
    drop_days,
    encoded,
    make_days,
)
from telemetry.units import counted

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3  # for records of a bucket that is over
DAYS_AHEAD: Final = 2
DAYS_LATE: Final = 1  # for records: older ones are not taken
TOPICS_AT_ONCE: Final = 200
STEPS_MAX: Final = 60  # of one call, so that who calls can do something else, too
# A finer level, and what is made of it.
_COARSER: Final = (("10s", "1m"), ("1m", "1h"))

METRICS: Final = Catalog()
ROWS = METRICS.counter("telemetry_roll_up_rows_total", "Rows of roll-ups written, by level.", "level")
ASIDE = METRICS.counter(
    "telemetry_roll_up_set_aside_total",
    "What could not be rolled up as it was, by cause: rows that can't be read, and series that were "
    "added to `other`.",
    "cause",
)
STEP = METRICS.histogram(
    "telemetry_roll_up_seconds",
    "Making ten seconds, a minute or an hour of what is finer, of all topics.",
)


@dataclass
class Counts:
    """What this process did since it started."""

    rows: Counter[str] = field(default_factory=Counter)  # by level
    dead: Counter[str] = field(default_factory=Counter)  # by cause
    steps: Histogram = field(default_factory=Histogram)

    def collect(self, into: Sink) -> None:
        put(into, ROWS, self.rows)
        put(into, ASIDE, self.dead)
        put(into, STEP, self.steps)


def _nothing() -> None:
    """Do nothing: no watchdog is waiting."""


class RollUp:
    """One at a time does it, whoever comes first; the others find nothing to do."""

    def __init__(self, counts: Counts | None = None, alive: Callable[[], None] = _nothing) -> None:
        """`alive` is called again and again while it works."""
        self.days = days_kept()
        self.counts = counts or Counts()
        self._alive = alive
        self._shapes = Shapes()
        self._names = Names()
        self._today = day_of(0)
        self._aside = DeadLetters()

    # Partitions

    def tend_days(self, now: float) -> None:
        """Make partitions ahead and drop those that are over. Often enough is once an hour."""
        today = day_of(now)
        for level in self.days:
            make_days(level, [today + timedelta(days=day) for day in range(-DAYS_LATE, DAYS_AHEAD + 1)])
        for level, days in self.days.items():
            if dropped := drop_days(level, today - timedelta(days=days)):
                log.info("Dropped %s of %s", counted(dropped, "day"), level)
        longest = today - timedelta(days=max(self.days.values()) + 1)
        with connection.cursor() as cursor:
            for table in ("storedshape", "topic"):  # of what nothing is stored any more
                cursor.execute(f"DELETE FROM telemetry_{table} WHERE seen_on < %s", [longest])  # noqa: S608

    # Watermarks

    def advance(self, now: float, steps: int = STEPS_MAX) -> bool:
        """Do what is due, oldest first, each step in a transaction of its own. Whether there is more."""
        return all(self._step(now) for _ in range(steps))

    def _step(self, now: float) -> bool:
        """Whether something was done."""
        began = time.perf_counter()
        over = bucket_of(now - GRACE_SECONDS)
        self._today = day_of(now)
        self._aside = DeadLetters()
        try:
            with transaction.atomic():
                watermarks = _lock_watermarks()
                is_done = bool(watermarks) and (
                    self._from_fresh(watermarks, over) or self._advance_watermark(watermarks, over)
                )
                if self._aside:
                    dead_letters.store(self._aside, now)
        except BaseException:
            self._names.clear()
            raise
        for (cause, _), times in self._aside.counts.items():
            self.counts.dead[cause.value] += times
        if is_done:
            self.counts.steps.record(time.perf_counter() - began)
        return is_done

    def _from_fresh(self, watermarks: dict[str, int], over: int) -> bool:
        """The oldest ten seconds that are over and lie in pieces."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT min(bucket) FROM telemetry_fresh WHERE bucket < %s", [over])
            (bucket,) = cursor.fetchone()
            if bucket is None:
                return False
            cursor.execute(
                "DELETE FROM telemetry_fresh WHERE bucket = %s RETURNING topic, shape, bucket, cells",
                [bucket],
            )
            rows = self._merged(map(Stored._make, cursor.fetchall()), bucket)
        self._write("10s", rows)
        for level, width in LEVELS.items():
            if level != "10s" and bucket < watermarks[level]:
                self._write(level, [row._replace(bucket=bucket_of(bucket, width)) for row in rows])
        return True

    def _advance_watermark(self, watermarks: dict[str, int], over: int) -> bool:
        """Add up a minute or an hour whose rows are all there, and advance the watermark past it."""
        ends = {"10s": over, "1m": watermarks["1m"]}
        for finer, coarser in _COARSER:
            width = LEVELS[coarser]
            end = bucket_of(ends[finer], width)
            if end <= watermarks[coarser]:
                continue
            with connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT min(bucket) FROM telemetry_{finer} WHERE bucket >= %s AND bucket < %s",  # noqa: S608
                    [watermarks[coarser], end],
                )
                (first,) = cursor.fetchone()
                if first is not None:
                    start = bucket_of(first, width)
                    end = start + width
                    self._add_up(finer, coarser, start, end)
                cursor.execute("UPDATE telemetry_watermark SET at = %s WHERE level = %s", [end, coarser])
            return True
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE telemetry_watermark SET at = %s WHERE level = '10s' AND at < %s", [over] * 2
            )
        return False

    def _add_up(self, finer: str, coarser: str, start: int, end: int) -> None:
        """Some topics after the other: an hour of a large fleet would not fit into memory well."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT id FROM telemetry_topic ORDER BY id")
            topics = [topic for (topic,) in cursor.fetchall()]
            for place in range(0, len(topics), TOPICS_AT_ONCE):
                cursor.execute(
                    f"SELECT topic, shape, bucket, cells FROM telemetry_{finer} "  # noqa: S608
                    "WHERE topic = ANY(%s) AND bucket >= %s AND bucket < %s",
                    [topics[place : place + TOPICS_AT_ONCE], start, end],
                )
                self._write(coarser, self._merged(map(Stored._make, cursor.fetchall()), start))

    def _merged(self, rows: Iterable[Stored], bucket: int) -> list[Stored]:
        """One for each topic, or a few where it has very many series. A row that can't be read costs
        only itself."""
        listed = sorted(rows, key=attrgetter("topic"))
        shapes = self._shapes.of({row.shape for row in listed})
        made = []
        for topic, its in groupby(listed, key=attrgetter("topic")):
            merged = self._merged_topic(topic, list(its), shapes)
            made += [(topic, shape, encoded(cells)) for shape, cells in merged.parts]
            if beyond := merged.folded + merged.left_out:
                self._aside.count(Cause.FOLDED, _name_of(topic), beyond)
            self._alive()
        self._names.learn_shapes([shape for _, shape, _ in made], self._today)
        return [Stored(topic, self._names.number(shape), bucket, cells) for topic, shape, cells in made]

    def _merged_topic(self, topic: int, rows: list[Stored], shapes: Mapping[int, Shape]) -> Merged:
        parts, unreadable = [], []
        for row in rows:
            if part := _part(row, shapes):
                parts.append(part)
            else:
                unreadable.append(row)
        try:
            merged = merge(parts)
        except (ValueError, TypeError, LookupError):  # cells that nobody checked: of earlier versions
            unreadable += [row for row in rows if (part := _part(row, shapes)) and not is_sound(part[1])]
            merged = merge([part for part in parts if is_sound(part[1])])
        for row in unreadable:
            reason = f"the row of {row.bucket} with shape {row.shape} can't be read"
            self._aside.add(Cause.UNREADABLE, _name_of(topic), reason, bytes(row.cells))
        return merged

    def _write(self, level: str, rows: list[Stored]) -> None:
        """All of one bucket. Its day is there as a rule; not after days in which nobody rolled up, nor
        where the clock was set, or the machine has slept, since days were made."""
        if rows:
            make_days(level, [day_of(rows[0].bucket)])
        copy_in(level, rows)
        self.counts.rows[level] += len(rows)


def days_kept() -> dict[str, int]:
    """How many days each level is stored, from the settings."""
    return {
        "10s": settings.TELEMETRY_DAYS_10S,
        "1m": settings.TELEMETRY_DAYS_1M,
        "1h": settings.TELEMETRY_DAYS_1H,
    }


def _lock_watermarks() -> dict[str, int]:
    """Lock and return the watermarks. Empty if another process has locked them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT level, at FROM telemetry_watermark ORDER BY level FOR UPDATE SKIP LOCKED")
        watermarks = dict(cursor.fetchall())
    return watermarks if watermarks.keys() >= LEVELS.keys() else {}


def _part(row: Stored, shapes: Mapping[int, Shape]) -> Part | None:
    """None for what is no row of its shape."""
    shape = shapes.get(row.shape)
    try:
        cells = cells_of(row.cells)
    except Malformed:
        return None
    return (shape, cells) if shape and shape.fits(cells) else None


def _name_of(topic: int) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM telemetry_topic WHERE id = %s", [topic])
        found = cursor.fetchone()
    return str(found[0]) if found else f"topic {topic}"
