"""What is done beside requests: replacing lost nodes, and forgetting those that streams have left."""

from __future__ import annotations

import logging

from celery import shared_task
from django.utils import timezone

from console.sessions.changes import replacements
from console.sessions.steps import former_homes

log = logging.getLogger(__name__)


@shared_task
def replace_lost_nodes() -> None:
    if begun := replacements.look(timezone.now()):
        log.warning("%d lost nodes are being replaced", begun)


@shared_task
def forget_former_homes() -> None:
    former_homes.forget_emptied()
