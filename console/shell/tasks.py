"""Housekeeping."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime

from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import DatabaseError

from console.accounts import throttle
from console.api.models import drop_old_answers
from console.control.services import forget_old_changes
from console.operations.services import forget_old_operations
from console.periodic import is_locked, periodic
from console.workloads.lifecycle import forget_old as forget_old_instances
from telemetry.events import forget_old_events
from telemetry.ingest.dead_letters import forget_old_letters
from telemetry.ingest.slowest import forget_old_transfers
from telemetry.ingest.sources import forget_silent_sources
from telemetry.store.clock import agreed_now

log = logging.getLogger(__name__)


@periodic
def forget_what_is_over() -> None:
    """Drop sessions, log-in windows, stored answers, silent processes and old changes.

    In another order each time: one kind that fails, or takes all the time of a task, keeps no other from
    being dropped for ever."""
    now = datetime.fromtimestamp(agreed_now(), UTC)
    kinds: list[tuple[str, Callable[[], int]]] = [
        ("sessions", lambda: Session.objects.filter(expire_date__lt=now).delete()[0]),
        ("log-in windows", lambda: throttle.drop_ended_windows(now)),
        ("stored answers", lambda: drop_old_answers(now)),
        ("processes", lambda: forget_silent_sources(now)),
        ("events", lambda: forget_old_events(now, settings.TELEMETRY_DAYS_1H)),
        ("changes", lambda: forget_old_changes(now)),
        ("operations", lambda: forget_old_operations(now)),
        ("instances", lambda: forget_old_instances(now)),
        ("slow transfers", lambda: forget_old_transfers(now, settings.TELEMETRY_HOURS_SLOWEST)),
        ("dead letters", lambda: forget_old_letters(now)),
    ]
    random.shuffle(kinds)
    forgotten = {}
    for kind, forget in kinds:
        try:
            forgotten[kind] = forget()
        except DatabaseError as error:
            if is_locked(error):
                log.warning("old %s could not be dropped yet: something is locked", kind)
            else:
                log.exception("old %s could not be dropped", kind)
    log.info("forgot %s", ", ".join(f"{count} {kind}" for kind, count in sorted(forgotten.items())))
