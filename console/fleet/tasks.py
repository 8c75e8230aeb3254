"""What is done beside requests: to notice who is silent."""

from __future__ import annotations

import logging

from celery import shared_task
from django.utils import timezone

from console.fleet import watching

log = logging.getLogger(__name__)


@shared_task
def find_who_is_lost() -> None:
    if lost := watching.find_lost(timezone.now()):
        log.warning("%d nodes and drivers are lost", lost)
