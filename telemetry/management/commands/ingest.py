"""`manage.py ingest`: read the telemetry stream into PostgreSQL until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
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
        reading = Reading(Ingest(client, f"{socket.gethostname()}-{os.getpid()}", counts))
        rolling = RollingUp(RollUp(counts.rows))
        # Beside the reading, which an hour of a large fleet would hold up for seconds.
        thread = threading.Thread(target=_keep, args=(rolling.round, stopped), name="roll-up")
        emitter = Emitter(settings.REDIS_URL, "ingest", settings.VERSION, collect=counts.collect).start()
        thread.start()
        _keep(reading.round, stopped, lambda: notify("WATCHDOG=1"))
        notify("STOPPING=1")
        thread.join()
        emitter.stop()
        client.close()
        log.info("stopped after %s", dict(counts.records))


def _keep(
    one_round: Callable[[], float], stopped: threading.Event, alive: Callable[[], object] = bool
) -> None:
    """Round after round, with the pause that each asks for. Redis and PostgreSQL come back by
    themselves: what was not finished is done again."""
    while not stopped.is_set():
        try:
            pause = one_round()
        except (redis.RedisError, DatabaseError) as error:
            log.warning("waiting for Redis or PostgreSQL: %s", error)
            close_old_connections()
            pause = PAUSE_AFTER_FAULT_SECONDS
        alive()
        stopped.wait(pause)
    close_old_connections()


class Reading:
    """From the stream to what is fresh."""

    def __init__(self, reader: Ingest) -> None:
        self._reader = reader
        self._joined = False

    def round(self) -> float:
        began = time.monotonic()
        if not self._joined:
            self._reader.join()
            self._joined = True
            notify("READY=1")
        self._joined = False  # unless this round ends well: a Redis that comes back may know of no group
        read = self._reader.step()
        self._joined = True
        return 0.0 if read >= BATCH_MAX else max(0.0, ROUND_SECONDS - (time.monotonic() - began))


class RollingUp:
    """From what is fresh to roll-ups, and partitions for them."""

    def __init__(self, roll_up: RollUp) -> None:
        self._roll_up = roll_up
        self._tend_at = 0.0

    def round(self) -> float:
        began = time.monotonic()
        if began >= self._tend_at:
            self._roll_up.tend_days(time.time())
            self._tend_at = began + TEND_SECONDS
        return 0.0 if self._roll_up.advance(time.time()) else ROLL_UP_SECONDS
