"""Reports the numbers of a process once a second. No Django; it never slows its host.

One thread looks at the numbers, which the host keeps anyway, and adds what has changed to the stream.
What Redis does not take waits here, up to a limit beyond which the oldest is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import redis

from telemetry.cells import Cells
from telemetry.credentials import user_of
from telemetry.emit.deltas import Collect, Deltas, combined
from telemetry.emit.transfers import FIELD as SLOWEST
from telemetry.emit.transfers import INTERVAL_SECONDS, TakeSlowest, encode
from telemetry.metrics import Catalog, LabelLimits, Sink, put
from telemetry.outages import Outage
from telemetry.records import (
    FIELD,
    LAST_FIELD,
    OWN_STREAM,
    OWN_STREAM_LENGTH_MAX,
    SHAPE_FIELD,
    SHAPE_KEY,
    SHAPE_SECONDS,
    STREAM,
    STREAM_LENGTH_MAX,
    TOLD_SECONDS,
    Field,
    Record,
)
from telemetry.redis_clients import client
from telemetry.shapes import Shape

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
BACKLOG_MAX: Final = 600  # records: ten minutes
SENT_AT_ONCE: Final = 100
REDIS_SECONDS_MAX: Final = 1.0  # for an answer
RETRY_SECONDS: Final = 3.0
COVERED_SECONDS_MAX: Final = 60  # by one record: a machine that slept for longer was away

METRICS: Final = Catalog()
DROPPED = METRICS.counter(
    "telemetry_dropped_records_total", "Records that Redis was not there for, and that were too many."
)
BACKLOG = METRICS.gauge("telemetry_backlog_records", "Records that wait for Redis.")
OVERFLOWED = METRICS.counter(
    "telemetry_overflowed_label_sets_total", "Sets of labels that were too many, and went to `other`."
)
LEFT_OUT = METRICS.counter(
    "telemetry_left_out_series_total",
    "Series that did not fit into a record and were added to `other`, summed over records.",
)


@dataclass(slots=True)
class _Waiting:
    shape: Shape | None
    encoded: bytes
    slowest: bytes
    is_last: bool


class Emitter:
    """Emits for one process, from a thread of its own, until `stop`."""

    def __init__(
        self,
        redis_url: str,
        kind: str,
        version: str,
        *,
        name: str = "",
        collect: Collect | None = None,
        limits: LabelLimits | None = None,
        slowest: TakeSlowest | None = None,
    ) -> None:
        """`name` is the same in the next life of the process (default: the host's). `collect` puts all
        of its numbers into a sink; without it the process only says that it is there. `slowest` gives
        the slowest transfers since it was asked last."""
        self.kind = kind
        self.version = version
        self.host = socket.gethostname()
        self.name = name or self.host
        self.started_at = time.time()
        self.source = f"{kind}@{self.host}/{os.getpid()}-{secrets.token_hex(4)}"
        self.sequence = 0
        self.dropped = 0
        self._take_slowest = slowest
        self._deltas = Deltas(combined(collect, self._collect_own), limits) if collect else None
        self._backlog: deque[_Waiting] = deque()
        self._reported: dict[bytes, float] = {}  # shapes that Redis knows, and when to tell them again
        self._second = 0  # up to which has been told
        self._retry_at = 0.0
        self._outage = Outage(log, "Numbers are queued, waiting for Redis")
        user = user_of(redis_url)
        self._own_stream = f"{OWN_STREAM}{user}" if user else ""
        self._redis = client(redis_url, answer_seconds=REDIS_SECONDS_MAX)
        self._phase = secrets.randbelow(1000) / 1000  # so that not everybody comes at once
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)

    def start(self) -> Emitter:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Tell what is left, and end."""
        self._stopped.set()
        self._thread.join(timeout=5)
        self._redis.close()

    def emit(self, now: float) -> bool:
        """Add the record of this moment; False where Redis has not all of them."""
        self._note(now)
        return self._send()

    # Inside

    def _run(self) -> None:
        while True:
            is_last = self._stopped.wait(PERIOD_SECONDS - (time.time() - self._phase) % PERIOD_SECONDS)
            try:
                self._note(time.time(), is_last=is_last)
                if time.monotonic() >= self._retry_at or is_last:
                    self._send()
            except Exception:
                log.exception(
                    "Could not report the numbers of this second; the next report includes them"
                )
            if is_last:
                return

    def _note(self, now: float, *, is_last: bool = False) -> None:
        """Put what has happened since the last time behind what waits."""
        second = int(now - self._phase)
        covered = min(max(second - self._second, 0), COVERED_SECONDS_MAX) if self._second else 1
        shape, cells = self._deltas.take(covered) if self._deltas else (None, Cells([], [], []))
        slowest = b""
        is_over = second // INTERVAL_SECONDS != self._second // INTERVAL_SECONDS
        if self._take_slowest and (is_over or is_last):
            slowest = encode(self._take_slowest())
        self._second = second
        self.sequence += 1
        record = Record(
            source=self.source,
            sequence=self.sequence,
            kind=self.kind,
            name=self.name,
            version=self.version,
            host=self.host,
            process_id=os.getpid(),
            started_at=self.started_at,
            at=float(second),
            shape=shape.digest if shape else b"",
            cells=cells,
        )
        if len(self._backlog) >= BACKLOG_MAX:
            self._backlog.popleft()
            self.dropped += 1
        self._backlog.append(_Waiting(shape, record.encode(), slowest, is_last))

    def _send(self) -> bool:
        """All that waits, oldest first. What was sent without an answer is sent again: whoever reads
        knows it by its sequence."""
        try:
            while self._backlog:
                batch = [self._backlog[place] for place in range(min(SENT_AT_ONCE, len(self._backlog)))]
                self._send_batch(batch)
                for _ in batch:
                    self._backlog.popleft()
        except redis.RedisError as error:
            now = time.monotonic()
            self._outage.goes_on(error, now)
            self._reported.clear()  # it may come back empty
            self._retry_at = now + RETRY_SECONDS
            return False
        self._outage.ends()
        self._retry_at = 0.0
        return True

    def _send_batch(self, batch: Iterable[_Waiting]) -> None:
        """No record is there before its shape: in a stream of our own it brings it, in the one that is
        shared both are added in one transaction."""
        now, told, own = time.monotonic(), dict[bytes, float](), self._own_stream
        pipe = self._redis.pipeline(transaction=not own)
        for waiting in batch:
            fields: dict[Field, Field] = {FIELD: waiting.encoded}
            shape = waiting.shape
            if shape and shape.digest not in told and self._reported.get(shape.digest, now) <= now:
                told[shape.digest] = now + TOLD_SECONDS
                if own:
                    fields[SHAPE_FIELD] = shape.encoded
                else:
                    pipe.set(SHAPE_KEY + shape.digest.hex(), shape.encoded, ex=SHAPE_SECONDS)
            if waiting.slowest:
                fields[SLOWEST] = waiting.slowest
            if waiting.is_last:
                fields[LAST_FIELD] = b"1"
            pipe.xadd(own or STREAM, fields, maxlen=OWN_STREAM_LENGTH_MAX if own else STREAM_LENGTH_MAX)
        pipe.execute()
        self._reported = {
            digest: again for digest, again in self._reported.items() if again > now
        } | told

    def _collect_own(self, into: Sink) -> None:
        limits = self._deltas.limits if self._deltas else LabelLimits()
        values = {
            DROPPED: self.dropped,
            BACKLOG: len(self._backlog),
            OVERFLOWED: limits.overflowed,
            LEFT_OUT: self._deltas.left_out if self._deltas else 0,
        }
        for metric, value in values.items():
            put(into, metric, value)
