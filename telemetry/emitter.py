"""A process tells once a second that it is there. No Django; never in the way of its host.

What cannot be sent is dropped and counted: presence that is late is worth nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

import redis

from telemetry.records import STREAM, STREAM_LENGTH_MAX, Record

PERIOD_SECONDS = 1.0


class Emitter:
    """Emits for one process, from a thread of its own, until `stop`."""

    def __init__(self, redis_url: str, kind: str, version: str) -> None:
        self.kind = kind
        self.version = version
        self.host = socket.gethostname()
        self.started_at = time.time()
        self.source = f"{kind}@{self.host}/{os.getpid()}-{secrets.token_hex(4)}"
        self.sequence = 0
        self.dropped = 0
        self._redis = redis.Redis.from_url(
            redis_url, socket_timeout=2, socket_connect_timeout=2, decode_responses=True
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)

    def start(self) -> Emitter:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)
        self._redis.close()

    def emit(self, now: float) -> bool:
        """Add the record of this moment; False where Redis would not have it."""
        self.sequence += 1
        record = Record(
            source=self.source,
            sequence=self.sequence,
            kind=self.kind,
            version=self.version,
            host=self.host,
            process_id=os.getpid(),
            started_at=self.started_at,
            at=now,
        )
        try:
            self._redis.xadd(STREAM, record.encode(), maxlen=STREAM_LENGTH_MAX)
        except redis.RedisError:
            self.dropped += 1
            return False
        return True

    def _run(self) -> None:
        while True:
            self.emit(time.time())
            if self._stopped.wait(PERIOD_SECONDS):
                return
