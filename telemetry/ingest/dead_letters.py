"""What could not be stored: how much of what and from whom, and some of it to look at.

It stops nothing. Both tables are bounded: of letters the newest are kept, few of each source; of counts
there are so many sources a day, and the others are counted together.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec
from django.db import connection
from django.db.models import Sum

from telemetry.metrics import OTHER
from telemetry.models import DeadLetter, DeadLetterCount

log = logging.getLogger(__name__)

LETTERS_MAX: Final = 1_000
LETTERS_OF_SOURCE_MAX: Final = 50
LETTERS_AT_ONCE_MAX: Final = 50  # of one batch, and of these
LETTERS_ALIKE_MAX: Final = 3  # with the same cause and source
LETTER_DAYS: Final = 7
COUNT_DAYS: Final = 30
SOURCES_A_DAY_MAX: Final = 2_000
EXCERPT_MAX: Final = 1_000  # characters
LOGGED_MAX: Final = 10  # causes and sources of one batch
_READ_BYTES_MAX: Final = 256 << 10  # of a record that is shown as JSON
_SOURCE_MAX: Final = 240
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('telemetry dead letters'))"


class Cause(StrEnum):
    """Why something could not be stored; also the outcome that it is counted under."""

    MALFORMED = "malformed"
    MALFORMED_SLOWEST = "malformed_slowest"
    UNTIMELY = "untimely"
    UNKNOWN_SHAPE = "unknown_shape"
    FOREIGN = "foreign"
    REFUSED = "refused_by_database"
    UNREADABLE = "unreadable_row"
    SHAPES = "over_quota_shapes"
    TOPICS = "over_quota_topics"
    SERIES = "over_quota_series"
    LIVES = "over_quota_lives"
    TRANSFERS = "over_quota_transfers"
    FOLDED = "topic_full"
    CUT_OFF = "stream_cut_off"


MEANINGS: Final[dict[Cause, str]] = {
    Cause.MALFORMED: "The record is not one of this version, or has a number that is out of range.",
    Cause.MALFORMED_SLOWEST: "The slowest transfers beside a record make no sense; the record counts.",
    Cause.UNTIMELY: "The record is of more than a day ago, or of the future: see the clock of its host.",
    Cause.UNKNOWN_SHAPE: "Nobody has told which series the record has.",
    Cause.FOREIGN: "A process has told numbers in the name of another.",
    Cause.REFUSED: "PostgreSQL refuses to store the record.",
    Cause.UNREADABLE: "A stored row can't be read, and was left out of the roll-up.",
    Cause.SHAPES: "The process changes its series too often: its numbers are refused for this hour.",
    Cause.TOPICS: "The process adds to too many orgs, sessions or nodes: not counted for further ones.",
    Cause.SERIES: "The process has too many series for a topic: further ones are added to `other`.",
    Cause.LIVES: "The process starts again too often: records of further starts are refused this hour.",
    Cause.TRANSFERS: "The driver reports too many slowest transfers: further ones are not stored.",
    Cause.FOLDED: "The topic has too many series: those told least often are added to `other`.",
    Cause.CUT_OFF: "The stream of the process was longer than it may be: the oldest records are gone.",
}


class Letter(NamedTuple):
    cause: Cause
    source: str
    reason: str
    raw: bytes


class DeadLetters:
    """The dead letters of one batch or one step. Bounded."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Cause, str]] = Counter()
        self.letters: list[Letter] = []

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, cause: Cause, source: str, reason: str, raw: bytes) -> None:
        """Count it, and keep it to look at while there is room."""
        source = source[:_SOURCE_MAX].replace("\0", "")
        self.counts[cause, source] += 1
        if self.counts[cause, source] <= LETTERS_ALIKE_MAX and len(self.letters) < LETTERS_AT_ONCE_MAX:
            self.letters.append(Letter(cause, source, reason[:300].replace("\0", ""), raw))

    def count(self, cause: Cause, source: str, times: int) -> None:
        """Count what there is nothing to see of."""
        self.counts[cause, source[:_SOURCE_MAX].replace("\0", "")] += times


def store(aside: DeadLetters, now: float) -> None:
    """Within a transaction. One at a time, so that the bounds hold."""
    at = datetime.fromtimestamp(now, UTC)
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)
        _add_counts(cursor, aside.counts, at)
    DeadLetter.objects.bulk_create(
        [
            DeadLetter(
                at=at,
                cause=letter.cause.value,
                source=letter.source,
                reason=letter.reason,
                size=len(letter.raw),
                excerpt=excerpt(letter.raw),
            )
            for letter in aside.letters
        ]
    )
    if aside.letters:
        _forget_the_oldest()
    told = [f"{cause.value} of {source}: {times}" for (cause, source), times in aside.counts.items()]
    log.warning("Stored as dead letters: %s", "; ".join(told[:LOGGED_MAX]))


def excerpt(raw: bytes) -> str:
    """The beginning of it: as JSON where it is MessagePack, in hexadecimal digits where it is not. Of
    nothing, nothing."""
    if not raw:
        return ""
    if len(raw) <= _READ_BYTES_MAX:
        try:
            text = msgspec.json.encode(msgspec.msgpack.decode(raw)).decode()
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
            pass
        else:
            return _cut(text.encode("ascii", "backslashreplace").decode())
    return _cut(f"hex {raw[:EXCERPT_MAX].hex(' ')}")


def _cut(text: str) -> str:
    return text if len(text) <= EXCERPT_MAX else text[: EXCERPT_MAX - 1] + "…"


def _add_counts(cursor: Any, counts: Counter[tuple[Cause, str]], at: datetime) -> None:
    day = at.date()
    sources = {source for _, source in counts}
    cursor.execute("SELECT count(DISTINCT source) FROM telemetry_deadlettercount WHERE day = %s", [day])
    (there,) = cursor.fetchone()
    cursor.execute(
        "SELECT DISTINCT source FROM telemetry_deadlettercount WHERE day = %s AND source = ANY(%s)",
        [day, list(sources)],
    )
    known = {source for (source,) in cursor.fetchall()}
    room = max(0, SOURCES_A_DAY_MAX - there)
    named = known | set(sorted(sources - known)[:room])
    sums: Counter[tuple[str, str]] = Counter()
    for (cause, source), times in counts.items():
        sums[cause.value, source if source in named else OTHER] += times
    listed = sorted(sums)
    cursor.execute(
        "INSERT INTO telemetry_deadlettercount (day, cause, source, count, last_at) "
        "SELECT %s, cause, source, count, %s FROM unnest(%s::text[], %s::text[], %s::bigint[]) "
        "AS v (cause, source, count) ON CONFLICT (day, cause, source) DO UPDATE SET "
        "count = telemetry_deadlettercount.count + EXCLUDED.count, last_at = EXCLUDED.last_at",
        [
            day,
            at,
            [cause for cause, _ in listed],
            [source for _, source in listed],
            [sums[key] for key in listed],
        ],
    )


def _forget_the_oldest() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM telemetry_deadletter WHERE id IN (SELECT id FROM (SELECT id, "
            "row_number() OVER (ORDER BY id DESC) AS place, "
            "row_number() OVER (PARTITION BY source ORDER BY id DESC) AS its_place "
            "FROM telemetry_deadletter) AS l WHERE place > %s OR its_place > %s)",
            [LETTERS_MAX, LETTERS_OF_SOURCE_MAX],
        )


def forget_old_letters(now: datetime) -> int:
    """Letters after a week, counts after a month."""
    deleted, _ = DeadLetter.objects.filter(at__lt=now - timedelta(days=LETTER_DAYS)).delete()
    counts, _ = DeadLetterCount.objects.filter(
        day__lt=(now - timedelta(days=COUNT_DAYS)).date()
    ).delete()
    return deleted + counts


def counts_of_today(now: datetime) -> list[tuple[str, int]]:
    """By cause."""
    found = DeadLetterCount.objects.filter(day=now.date()).values("cause").annotate(times=Sum("count"))
    return [(row["cause"], row["times"]) for row in found]
