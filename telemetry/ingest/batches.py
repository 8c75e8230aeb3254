"""A batch of entries on its way to the database: what each is, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from telemetry import topics
from telemetry.credentials import may_tell
from telemetry.emit import transfers
from telemetry.emit.transfers import Transfer
from telemetry.ingest.dead_letters import Cause, DeadLetters
from telemetry.ingest.known_shapes import KnownShapes
from telemetry.ingest.quotas import LIVES_MAX, Quotas
from telemetry.ingest.streams import IDLE_MS_BEFORE_TAKEN_OVER, Entry
from telemetry.records import (
    EARLY_SECONDS_MAX,
    FIELD,
    LAST_FIELD,
    LATE_SECONDS_MAX,
    SHAPE_FIELD,
    TOLD_SECONDS,
    Record,
    decode,
)
from telemetry.shapes import Shape

# In a stream of one's own the shape comes with the first of its records, which another member may be
# writing just now, or which was lost with all that was in Redis: the others are read again after they
# have been idle, up to so long after they came.
SHAPE_SECONDS_MAX: Final = TOLD_SECONDS + 60
# Those that say that they are of the future, as often as others in that time.
DELIVERIES_MAX: Final = int(SHAPE_SECONDS_MAX / (IDLE_MS_BEFORE_TAKEN_OVER / 1000))
# What waits lies in the memory of all, so it is not large: a record of 4,096 counters has 36 KiB.
WAITING_BYTES_MAX: Final = 64 << 10
UNKNOWN: Final = "unknown"  # who told something that can't be read, in the stream that many share


class Readable(NamedTuple):
    """A record that makes sense, and all that came with it."""

    record: Record
    shape: Shape | None  # none where it only says that it is there
    slowest: Sequence[Transfer]
    raw: bytes
    is_last: bool  # of its process


Told = tuple[Entry, Record]


class Batch:
    """What is read of it, what is set aside, and which entries have to be read again later."""

    def __init__(self, now: float, quotas: Quotas) -> None:
        self.now = now
        self._quotas = quotas
        self.outcomes: Counter[str] = Counter()  # of records
        self.aside = DeadLetters()
        self.done: list[Entry] = []

    def refuse(self, cause: Cause, source: str, reason: str, raw: bytes) -> None:
        self.outcomes[cause.value] += 1
        self.aside.add(cause, source, reason, raw)

    def records(self, entries: Sequence[Entry]) -> list[Told]:
        """What is a record, and can be of now and of its stream. All else is set aside and done with."""
        return [(entry, record) for entry in entries if (record := self._decoded(entry))]

    def read(self, told: Sequence[Told], shapes: KnownShapes) -> tuple[list[Readable], list[Told]]:
        """Those that make sense, and those to read after them, since all of their series are too many to
        have in memory at once. What can't be stored is set aside and done with."""
        _find_shapes(told, shapes)
        found, later = list[Readable](), list[Told]()
        for entry, record in told:
            source, shape = _source(record), shapes.use(record.shape)
            is_unknown = bool(record.shape) and shape is None
            if is_unknown and shapes.may_teach(source, record.shape):
                if shapes.is_full:
                    later.append((entry, record))
                    continue
                if self._may_wait(entry):
                    continue
                self._refuse_without_shape(entry, source)
            elif shape and not shape.fits(record.cells):
                reason = "it has more or fewer numbers than series"
                self.refuse(Cause.MALFORMED, source, reason, entry.fields[FIELD])
            else:
                if is_unknown:  # its numbers are refused, but it is there
                    self.aside.count(Cause.SHAPES, source, 1)
                slowest, is_last = self._slowest(entry, record), LAST_FIELD in entry.fields
                found.append(Readable(record, shape, slowest, entry.fields[FIELD], is_last))
            self.done.append(entry)
        return found, later

    def _decoded(self, entry: Entry) -> Record | None:
        """None, with the entry done, for what is no record or can't be of now or of its stream."""
        raw, writer = entry.fields.get(FIELD, b""), entry.writer
        try:
            record = decode(entry.fields)
        except ValueError as error:
            self.refuse(Cause.MALFORMED, writer or UNKNOWN, str(error), raw)
        else:
            if writer and not may_tell(writer, record.kind, _source(record)):
                self.refuse(Cause.FOREIGN, writer, f"it says that it is {_source(record)}", raw)
            elif not self._is_timely(record.at):
                reason = f"it is of {record.at:.0f}, read at {self.now:.0f}"
                self.refuse(Cause.UNTIMELY, _source(record), reason, raw)
            elif not self._quotas.admits_life(_source(record), record.source):
                reason = f"it has been started {LIVES_MAX} times within the hour"
                self.refuse(Cause.LIVES, _source(record), reason, raw)
            else:
                return record
        self.done.append(entry)
        return None

    def _is_timely(self, at: float) -> bool:
        return self.now - LATE_SECONDS_MAX < at < self.now + EARLY_SECONDS_MAX

    def _refuse_without_shape(self, entry: Entry, source: str) -> None:
        reason = "nobody has told which series it has"
        if entry.is_ahead(self.now):
            reason += f"; it was read {entry.deliveries} times, and claims to be of the future"
        self.refuse(Cause.UNKNOWN_SHAPE, source, reason, entry.fields[FIELD])

    def _may_wait(self, entry: Entry) -> bool:
        """Whether its shape may still come."""
        if not entry.writer or entry.bytes > WAITING_BYTES_MAX:
            return False
        if entry.is_ahead(self.now):
            return entry.deliveries < DELIVERIES_MAX
        return self.now < entry.arrived_at(self.now) + SHAPE_SECONDS_MAX

    def _slowest(self, entry: Entry, record: Record) -> Sequence[Transfer]:
        """What else came with a record, which counts without it."""
        if transfers.FIELD not in entry.fields:
            return ()
        raw = entry.fields[transfers.FIELD]
        try:
            told = transfers.decode(entry.fields)
        except ValueError as error:
            self.refuse(Cause.MALFORMED_SLOWEST, _source(record), str(error), raw)
            return ()
        timely = [one for one in told if self._is_timely(one.at)]
        if len(timely) < len(told):
            reason = f"{len(told) - len(timely)} of {len(told)} are of another time than {self.now:.0f}"
            self.refuse(Cause.MALFORMED_SLOWEST, _source(record), reason, raw)
        return timely


def _find_shapes(told: Sequence[Told], shapes: KnownShapes) -> None:
    """Shapes of these are in use then, as far as somebody knows them and there is room."""
    shapes.release()
    unknown = [
        (entry, record) for entry, record in told if record.shape and shapes.use(record.shape) is None
    ]
    for entry, record in unknown:
        if encoded := entry.fields.get(SHAPE_FIELD):
            shapes.learn(_source(record), record.shape, encoded)
    wanted, shared = dict[bytes, str](), set[bytes]()
    for entry, record in unknown:
        source, digest = _source(record), record.shape
        if shapes.use(digest) is None and shapes.may_teach(source, digest):
            wanted[digest] = source
            if not entry.writer:
                shared.add(digest)
    if wanted:
        shapes.ask_for(wanted, shared)


def _source(record: Record) -> str:
    return topics.of_source(record.kind, record.name)
