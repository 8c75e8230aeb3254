"""The records that processes add to the stream, and how they are written down. No Django.

A source is one life of one process: restarted, it is another source. Within a source the sequence
counts from 1, so (source, sequence) names a record, however often it is delivered.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

STREAM = "tidegate:telemetry"
STREAM_LENGTH_MAX = 100_000  # a day of a small fleet; what is cut off is older than anyone waits
GROUP = "ingest"


# redis-py's stubs want the whole union, for keys and values alike.
Field = bytes | bytearray | memoryview | str | int | float


@dataclass(frozen=True)
class Record:
    source: str
    sequence: int
    kind: str
    version: str
    host: str
    process_id: int
    started_at: float  # seconds since 1970
    at: float

    def encode(self) -> dict[Field, Field]:
        return {"record": json.dumps(asdict(self), separators=(",", ":"))}

    @classmethod
    def decode(cls, fields: dict[str, str]) -> Record:
        """Raises ValueError for what is no record of this version."""
        try:
            record = cls(**json.loads(fields["record"]))
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from None
        if record.sequence < 1 or not record.source:
            raise ValueError("a record needs a source and a sequence from 1 on")
        return record
