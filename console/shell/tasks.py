"""Housekeeping."""

from __future__ import annotations

import logging

from celery import shared_task
from django.contrib.sessions.models import Session
from django.utils import timezone

from console.accounts import throttle
from console.api import idempotency

log = logging.getLogger(__name__)


@shared_task
def forget_what_is_over() -> None:
    """Drop sessions, log-in windows and stored answers whose time has passed."""
    now = timezone.now()
    sessions, _ = Session.objects.filter(expire_date__lt=now).delete()
    log.info(
        "forgot %d sessions, %d log-in windows, %d stored answers",
        sessions,
        throttle.drop_ended_windows(now),
        idempotency.drop_old(now),
    )
