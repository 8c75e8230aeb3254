"""Housekeeping."""

from __future__ import annotations

import logging

from celery import shared_task
from django.conf import settings
from django.contrib.sessions.models import Session
from django.utils import timezone

from console.accounts import throttle
from console.api.models import drop_old_answers
from console.control.services import forget_old_changes
from console.operations.services import forget_old_operations
from console.workloads.lifecycle import forget_old as forget_old_instances
from telemetry.events import forget_old_events
from telemetry.ingest.dead_letters import forget_old_letters
from telemetry.ingest.slowest import forget_old_transfers
from telemetry.ingest.sources import forget_silent_sources

log = logging.getLogger(__name__)


@shared_task
def forget_what_is_over() -> None:
    """Drop sessions, log-in windows, stored answers, silent processes and old changes."""
    now = timezone.now()
    sessions, _ = Session.objects.filter(expire_date__lt=now).delete()
    log.info(
        "forgot %d sessions, %d log-in windows, %d stored answers, %d processes, %d events, "
        "%d changes, %d operations, %d instances, %d slow transfers, %d dead letters",
        sessions,
        throttle.drop_ended_windows(now),
        drop_old_answers(now),
        forget_silent_sources(now),
        forget_old_events(now, settings.TELEMETRY_DAYS_1H),
        forget_old_changes(now),
        forget_old_operations(now),
        forget_old_instances(now),
        forget_old_transfers(now, settings.TELEMETRY_HOURS_SLOWEST),
        forget_old_letters(now),
    )
