"""The processes that tell of themselves: which of their records have been written, and for how long a
silent one is remembered."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final

from django.db import connection
from django.db.backends.utils import CursorWrapper

from telemetry import topics
from telemetry.events import NewEvent, note_all
from telemetry.ingest.received import Ranges, admit, missing, parse, write
from telemetry.models import Source
from telemetry.records import Record
from telemetry.shapes import Shape

Telling = tuple[Record, Shape | None]

REMEMBERED = timedelta(days=1)
ALIVE = timedelta(seconds=10)  # who was heard since then
_NOTED: Final = frozenset({"agent", "driver", "brain"})


def forget_silent_sources(now: datetime) -> int:
    """Each life of a process is a source of its own, so those that ended have to go some day."""
    deleted, _ = Source.objects.filter(seen_at__lt=now - REMEMBERED).delete()
    return deleted


def admitted(
    told: Sequence[Telling], ended: Collection[tuple[str, int]] = ()
) -> tuple[list[Telling], list[Record]]:
    """Those that were never written before, and those that have the id of another's life. Within the
    transaction that writes them; it holds their sources until its end. `ended`: sources and sequences
    with which they ended."""
    by_source = {source: list(its) for source, its in groupby(sorted(told, key=_source), key=_source)}
    if not by_source:
        return [], []
    new: list[Telling] = []
    foreign: list[Record] = []
    updates: list[tuple[Any, ...]] = []
    with connection.cursor() as cursor:
        for source, topic, ranges in _known_sources(cursor, by_source):
            its = [one for one in by_source[source] if _topic(one[0]) == topic]
            foreign += [record for record, _ in by_source[source] if _topic(record) != topic]
            if not its:
                continue
            fresh, joined = admit(ranges, [record.sequence for record, _ in its])
            for record, shape in its:
                if record.sequence in fresh:
                    fresh.remove(record.sequence)
                    new.append((record, shape))
            last = max((record for record, _ in its), key=lambda record: record.sequence)
            # Its clock may be ahead. Heard from it has been now, and others are compared with that.
            heard_at = _moment(min(last.at, time.time()))
            ended_at = heard_at if (source, last.sequence) in ended else None
            updates.append((source, write(joined), missing(joined), last.sequence, heard_at, ended_at))
        if updates:
            _update_sources(cursor, updates)
    return new, foreign


def _source(telling: Telling) -> str:
    return telling[0].source


def _topic(record: Record) -> str:
    return topics.of_source(record.kind, record.name)


def _known_sources(
    cursor: CursorWrapper, by_source: dict[str, list[Telling]]
) -> Iterable[tuple[str, str, Ranges]]:
    """All of them, held, with whose they are and what has arrived of each. In one order, so that two
    members never wait for each other in a circle."""
    names = sorted(by_source)
    select = (
        "SELECT name, topic, received::text FROM telemetry_source WHERE name = ANY(%s) "
        "ORDER BY name FOR UPDATE"
    )
    cursor.execute(select, [names])
    found = cursor.fetchall()
    if len(found) < len(names):
        new = sorted(set(names) - {name for name, _, _ in found})
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
                [_topic(one) for one in firsts],
                [one.version for one in firsts],
                [one.host for one in firsts],
                [one.process_id for one in firsts],
                [_started(one) for one in firsts],
            ],
        )
        began = [by_source[name][0][0] for (name,) in cursor.fetchall()]
        cursor.execute(select, [names])
        found = cursor.fetchall()
        _note_beginnings(began)
    return [(name, topic, parse(received)) for name, topic, received in found]


def _note_beginnings(firsts: Iterable[Record]) -> None:
    """Nodes and drivers were started, or started again: what changed shortly before."""
    note_all(
        [
            NewEvent(
                "node.started",
                [_topic(first)],
                f"{first.kind.capitalize()} {first.name} was started, {first.version}.",
                {"host": first.host, "version": first.version},
                _started(first),
            )
            for first in firsts
            if first.kind in _NOTED
        ]
    )


def _update_sources(cursor: CursorWrapper, updates: list[tuple[Any, ...]]) -> None:
    cursor.execute(
        "UPDATE telemetry_source AS s SET received = v.received::int8multirange, missing = v.missing, "
        "sequence = greatest(s.sequence, v.sequence), seen_at = greatest(s.seen_at, v.seen_at), "
        "ended_at = CASE WHEN s.sequence > v.sequence THEN s.ended_at ELSE v.ended_at END "
        "FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::timestamptz[], "
        "%s::timestamptz[]) AS v (name, received, missing, sequence, seen_at, ended_at) "
        "WHERE s.name = v.name",
        [list(column) for column in zip(*updates, strict=True)],
    )


def _started(first: Record) -> datetime:
    """By its clock, which may be ahead. What is of the future would never be old enough to delete."""
    return _moment(min(first.started_at, time.time()))


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
