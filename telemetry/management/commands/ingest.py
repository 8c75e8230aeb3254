"""`manage.py ingest`: read the telemetry stream into PostgreSQL until told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import Any

import redis
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError
from django.db import close_old_connections

from telemetry.emitter import Emitter
from telemetry.ingest import Ingest
from telemetry.notify import notify

log = logging.getLogger(__name__)

PAUSE_AFTER_FAULT_SECONDS = 1.0


class Command(BaseCommand):
    help = "Read the telemetry stream into PostgreSQL until told to stop. Several may run."

    def handle(self, *_args: Any, **_options: Any) -> None:
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        client = redis.Redis.from_url(
            settings.REDIS_URL, socket_timeout=10, socket_connect_timeout=5, decode_responses=True
        )
        ingest = Ingest(client, consumer=f"{socket.gethostname()}-{os.getpid()}")
        emitter = Emitter(settings.REDIS_URL, "ingest", settings.VERSION).start()
        joined = False
        while not stopped.is_set():
            try:
                if not joined:
                    ingest.join()
                    joined = True
                    notify("READY=1")
                ingest.step()
            except (redis.RedisError, DatabaseError) as error:
                # Both come back by themselves; what was not acknowledged is read again.
                log.warning("waiting for Redis or PostgreSQL: %s", error)
                joined = False
                close_old_connections()
                stopped.wait(PAUSE_AFTER_FAULT_SECONDS)
            notify("WATCHDOG=1")
        notify("STOPPING=1")
        emitter.stop()
        client.close()
        log.info("stopped after %s", ingest.counts)
