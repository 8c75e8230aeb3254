"""`manage.py ingest`: read the telemetry stream into PostgreSQL until told to stop."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand

from telemetry.emit.reporter import Reporter
from telemetry.ingest.service import Counts, Ingest
from telemetry.ingest.streams import BATCH_MAX
from telemetry.notify import notify
from telemetry.redis_clients import client
from telemetry.store.rounds import run_rounds

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 3.0  # longer than it waits for records; a Redis that is stopped costs so much
ROUND_SECONDS: Final = 0.5  # a batch is what has come in meanwhile: fewer transactions, fewer rows


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = "Read the telemetry stream into PostgreSQL until told to stop. Several may run."

    def handle(self, *_args: Any, **_options: Any) -> None:
        reading_from = client(settings.INGEST_URL, answer_seconds=ANSWER_SECONDS)
        counts = Counts()
        reading = Reading(Ingest(reading_from, f"{socket.gethostname()}-{os.getpid()}", counts))
        reporter = Reporter(
            settings.TELEMETRY_URL, settings.OTLP_URL, "ingest", settings.VERSION, collect=counts.collect
        )
        run_rounds(reading.round)
        reporter.stop()
        reading_from.close()
        log.info("stopped after %s", dict(counts.records))


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
