"""A batch of entries on its way to the database: what each is, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from telemetry import topics, transfers
from telemetry.credentials import may_tell
from telemetry.dead_letters import Aside, Cause
from telemetry.known_shapes import KnownShapes
from telemetry.records import FIELD, LATE_SECONDS_MAX, SHAPE_FIELD, TOLD_SECONDS, Record, decode
from telemetry.shapes import Shape
from telemetry.streams import IDLE_MS_BEFORE_TAKEN_OVER, Entry
from telemetry.transfers import Transfer

EARLY_SECONDS_MAX: Final = 300  # a clock may be ahead by so much
# In a stream of one's own the shape comes with the first of its records, which another member may be
# writing just now, or which was lost with all that was in Redis: the others are read again after they
# have been idle, up to so long after they came.
SHAPE_SECONDS_MAX: Final = TOLD_SECONDS + 60
# Those that say that they are of the future, as often as others in that time.
DELIVERIES_MAX: Final = int(SHAPE_SECONDS_MAX / (IDLE_MS_BEFORE_TAKEN_OVER / 1000))
UNKNOWN: Final = "unknown"  # who told something that can't be read, in the stream that many share


class Readable(NamedTuple):
    """A record that makes sense, and all that came with it."""

    record: Record
    shape: Shape | None  # none where it only says that it is there
    slowest: Sequence[Transfer]
    raw: bytes


class Batch:
    """What is read of it, what is set aside, and which entries have to be read again later."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.outcomes: Counter[str] = Counter()  # of records
        self.aside = Aside()
        self.done: list[Entry] = []

    def refuse(self, cause: Cause, source: str, reason: str, raw: bytes) -> None:
        self.outcomes[cause.value] += 1
        self.aside.add(cause, source, reason, raw)

    def read(self, entries: Sequence[Entry], shapes: KnownShapes) -> Iterator[Readable]:
        """Those that make sense. What can't be stored is set aside and done with."""
        decoded = [(entry, record) for entry in entries if (record := self._decoded(entry))]
        for entry, record in decoded:
            if told := entry.fields.get(SHAPE_FIELD):
                shapes.learn(record.shape, told)
        told_as = {record.shape for _, record in decoded if record.shape}
        if unknown := {digest for digest in told_as if shapes.get(digest) is None}:
            shared = {record.shape for entry, record in decoded if not entry.writer}
            shapes.ask_for(unknown, shared & unknown)
        for entry, record in decoded:
            shape = shapes.get(record.shape) if record.shape else None
            if shape is None and record.shape:
                if self._may_wait(entry):
                    continue
                reason = "nobody has told which series it has"
                if entry.is_ahead(self.now):
                    reason += f"; it was read {entry.deliveries} times, and claims to be of the future"
                self.refuse(Cause.UNKNOWN_SHAPE, _source(record), reason, entry.fields[FIELD])
            elif shape and not shape.fits(record.cells):
                reason = "it has more or fewer numbers than series"
                self.refuse(Cause.MALFORMED, _source(record), reason, entry.fields[FIELD])
            else:
                yield Readable(record, shape, self._slowest(entry, record), entry.fields[FIELD])
            self.done.append(entry)

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
            elif not self.now - LATE_SECONDS_MAX < record.at < self.now + EARLY_SECONDS_MAX:
                reason = f"it is of {record.at:.0f}, read at {self.now:.0f}"
                self.refuse(Cause.UNTIMELY, _source(record), reason, raw)
            else:
                return record
        self.done.append(entry)
        return None

    def _may_wait(self, entry: Entry) -> bool:
        """Whether its shape may still come."""
        if not entry.writer:
            return False
        if entry.is_ahead(self.now):
            return entry.deliveries < DELIVERIES_MAX
        return self.now < entry.arrived_at(self.now) + SHAPE_SECONDS_MAX

    def _slowest(self, entry: Entry, record: Record) -> Sequence[Transfer]:
        """What else came with a record, which counts without it."""
        if transfers.FIELD not in entry.fields:
            return ()
        try:
            return transfers.decode(entry.fields)
        except ValueError as error:
            raw = entry.fields[transfers.FIELD]
            self.refuse(Cause.MALFORMED_SLOWEST, _source(record), str(error), raw)
            return ()


def _source(record: Record) -> str:
    return topics.of_source(record.kind, record.name)
