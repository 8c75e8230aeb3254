"""`manage.py rollup`: make roll-ups of what ingest has written, and partitions, until told to stop.

A process of its own: in one with the reader they would share an interpreter, and a record would wait for
an hour of a large fleet to be added up.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Final

from django.conf import settings
from django.core.management.base import BaseCommand

from telemetry.emit.reporter import Reporter
from telemetry.notify import notify
from telemetry.store.clock import agreed_now
from telemetry.store.rollup import Counts, RollUp
from telemetry.store.rounds import run_rounds

log = logging.getLogger(__name__)

ROUND_SECONDS: Final = 1.0
STEPS_AT_ONCE: Final = 3  # so that it is told to stop in between
TEND_SECONDS: Final = 3600.0
ALIVE_SECONDS: Final = 1.0  # between two signs of life, in the middle of long work
NICE: Final = 5  # a minute may be added up a moment later; a record should not be read later


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = "Make roll-ups of what ingest writes until told to stop. Of several one at a time works."

    def handle(self, *_args: Any, **_options: Any) -> None:
        os.nice(NICE)
        counts = Counts()
        rolling = RollingUp(counts)
        reporter = Reporter(
            settings.TELEMETRY_URL, settings.OTLP_URL, "rollup", settings.VERSION, collect=counts.collect
        )
        run_rounds(rolling.round)
        reporter.stop()
        log.info("stopped after %s", dict(counts.rows))


class RollingUp:
    """From what is fresh to roll-ups, and partitions for them."""

    def __init__(self, counts: Counts) -> None:
        self._roll_up = RollUp(counts, self._alive)
        self._tend_at = 0.0
        self._alive_at = 0.0

    def round(self) -> float:
        began, now = time.monotonic(), agreed_now()
        if began >= self._tend_at:
            self._roll_up.tend_days(now)
            self._tend_at = began + TEND_SECONDS
            notify("READY=1")
        return 0.0 if self._roll_up.advance(now, STEPS_AT_ONCE) else ROUND_SECONDS

    def _alive(self) -> None:
        if (now := time.monotonic()) >= self._alive_at:
            self._alive_at = now + ALIVE_SECONDS
            notify("WATCHDOG=1")
