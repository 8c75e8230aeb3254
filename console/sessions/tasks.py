"""What is done beside requests: replacing lost nodes."""

from __future__ import annotations

import logging

from celery import shared_task
from django.utils import timezone

from console.sessions.changes import replacements

log = logging.getLogger(__name__)


@shared_task
def replace_lost_nodes() -> None:
    if begun := replacements.look(timezone.now()):
        log.warning("%d lost nodes are being replaced", begun)
