"""The records that processes add to the stream, and how they are written down. No Django.

A source is one life of one process: restarted, it is another source. Within a source the sequence
counts from 1, so (source, sequence) names a record, however often it is delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from telemetry.cells import Cells, ReportedCells
from telemetry.decoder import Limits, unpack
from telemetry.shapes import DIGEST_BYTES

STREAM: Final = "tidegate:telemetry"
# What waits for ingest; older records are cut off beyond it: three minutes of a thousand nodes, half an
# hour of a hundred. What has been written is taken out.
STREAM_LENGTH_MAX: Final = 200_000
# The stream of a process that has a Redis user of its own, which is called as its topic: it may add to
# this one and to no other. Ten minutes of its records, twice.
OWN_STREAM: Final = "tidegate:telemetry:of:"
OWN_STREAM_LENGTH_MAX: Final = 1_200
# Beside telemetry, in the same Redis: cache maps of drivers, which brains read, and what brains share.
MAP_STREAM: Final = "tidegate:map:of:"  # and the driver's topic
ROUTING: Final = "tidegate:routing:"
RECALL_STREAM: Final = "tidegate:recall:of:"  # and the driver's topic; brains add, the driver reads
# And where replicas of workloads are: a key for each model, as clients name it, and a channel on which
# the leader names those that have changed. Only the leader writes these keys; brains read them.
ENDPOINTS: Final = "tidegate:endpoints::"
# Where brains of the version before read the same. They do so as the user that counts, which can't read
# what it may not write. To be removed with the next release.
ENDPOINTS_BEFORE: Final = "tidegate:endpoints:"
ENDPOINTS_CHANNEL: Final = "tidegate:endpoints"
ENDPOINTS_SECONDS: Final = 90  # for how long a key stays that no leader writes again
GROUP: Final = "ingest"
SHAPE_KEY: Final = "tidegate:telemetry:shape:"  # and a digest, in hex; of the shared stream
SHAPE_SECONDS: Final = 2 * 86_400  # for how long Redis keeps one that nobody tells again
TOLD_SECONDS: Final = 300.0  # after which a process tells a shape again: Redis may have been emptied
FIELD: Final = b"record"
LAST_FIELD: Final = b"last"  # beside the record with which a process has ended as it should
SHAPE_FIELD: Final = b"shape"  # in a stream of one's own: the shape comes with the first of its records
FIELD_LIMITS: Final = Limits(1 << 20)
# For how long a record is taken: as long as there are partitions, and sources are remembered.
LATE_SECONDS_MAX: Final = 86_400
EARLY_SECONDS_MAX: Final = 300  # a clock may be ahead by so much
# By so much is `at` before a record is made, as each process begins its whole seconds at another moment.
BEHIND_SECONDS_MAX: Final = 2

NO_NUL: Final = "^[^\\x00]*$"  # which PostgreSQL can't store
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=NO_NUL)]
# redis-py's stubs want the whole union, for keys and values alike.
Field = bytes | bytearray | memoryview | str | int | float


class Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What happened in one process in about a second; `shape` is empty where it only says that it is
    there."""

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=120, pattern=NO_NUL)]
    sequence: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=32, pattern=NO_NUL)]
    name: Name  # of what runs there: the same in its next life
    version: Annotated[str, msgspec.Meta(max_length=40, pattern=NO_NUL)]
    host: Annotated[str, msgspec.Meta(max_length=120, pattern=NO_NUL)]
    process_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    started_at: Annotated[float, msgspec.Meta(ge=0, lt=1 << 33)]  # seconds since 1970
    at: Annotated[float, msgspec.Meta(ge=0, lt=1 << 33)]
    shape: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
    cells: Cells

    def encode(self) -> bytes:
        return _ENCODER.encode(self)


class _ReportedRecord(Record, array_like=True, frozen=True, forbid_unknown_fields=True):
    cells: ReportedCells


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_ReportedRecord)


def decode(fields: Mapping[bytes, bytes]) -> Record:
    """Raises ValueError for what is no record of this version."""
    try:
        raw = fields[FIELD]
    except KeyError:
        raise ValueError("there is no field `record`") from None
    record = unpack(raw, _DECODER, FIELD_LIMITS, has_bounds=True)
    record.cells.check()
    return record
