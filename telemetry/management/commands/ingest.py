"""`manage.py ingest`: read the telemetry stream into PostgreSQL until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from typing import Any, Final

import redis
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError
from django.db import close_old_connections

from telemetry.emitter import Emitter
from telemetry.ingest import BATCH_MAX, Counts, Ingest
from telemetry.notify import notify
from telemetry.rollup import RollUp

log = logging.getLogger(__name__)

PAUSE_AFTER_FAULT_SECONDS: Final = 1.0
ROUND_SECONDS: Final = 0.5  # a batch is what has come in meanwhile: fewer transactions, fewer rows
ROLL_UP_SECONDS: Final = 1.0
TEND_SECONDS: Final = 3600.0


class Command(BaseCommand):
    help = "Read the telemetry stream into PostgreSQL until told to stop. Several may run."

    def handle(self, *_args: Any, **_options: Any) -> None:
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=10, socket_connect_timeout=5)
        counts = Counts()
        reader = Ingest(client, f"{socket.gethostname()}-{os.getpid()}", counts)
        emitter = Emitter(settings.REDIS_URL, "ingest", settings.VERSION, collect=counts.collect).start()
        work = Rounds(reader, RollUp())
        while not stopped.is_set():
            pause = 0.0
            try:
                pause = work.round()
            except (redis.RedisError, DatabaseError) as error:
                # Both come back by themselves; what was not acknowledged is read again.
                log.warning("waiting for Redis or PostgreSQL: %s", error)
                work.begin_anew()
                close_old_connections()
                pause = PAUSE_AFTER_FAULT_SECONDS
            notify("WATCHDOG=1")
            stopped.wait(pause)
        notify("STOPPING=1")
        emitter.stop()
        client.close()
        log.info("stopped after %s", dict(counts.records))


class Rounds:
    """What an ingest process does in turns: read and write, roll up, tend partitions."""

    def __init__(self, reader: Ingest, roll_up: RollUp) -> None:
        self.reader = reader
        self.roll_up = roll_up
        self._joined = False
        self._roll_up_at = self._tend_at = 0.0

    def begin_anew(self) -> None:
        self._joined = False

    def round(self) -> float:
        """One turn; how long to pause before the next."""
        began = time.monotonic()
        if not self._joined:
            self.reader.join()
            self._joined = True
            notify("READY=1")
        if began >= self._tend_at:
            self.roll_up.tend_days(time.time())
            self._tend_at = began + TEND_SECONDS
        read = self.reader.step()
        if began >= self._roll_up_at:
            is_behind = self.roll_up.advance(time.time())
            self.reader.counts.rows = self.roll_up.rows
            self._roll_up_at = began + (0.0 if is_behind else ROLL_UP_SECONDS)
        if read >= BATCH_MAX:
            return 0.0
        return max(0.0, ROUND_SECONDS - (time.monotonic() - began))
