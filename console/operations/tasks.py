"""Advancing operations: at once after what asked for them, and again and again until they have ended."""

from __future__ import annotations

import logging
from typing import Final
from uuid import UUID

from celery import shared_task
from django.db import OperationalError
from django.utils import timezone
from psycopg.errors import LockNotAvailable

from console.operations import services

log = logging.getLogger(__name__)

STEPS_AT_ONCE: Final = 20  # then others have their turn, and the sweep goes on with it


@shared_task
def advance_operation(operation_id: str) -> None:
    """Do the steps that can be done now."""
    for _ in range(STEPS_AT_ONCE):
        if not services.advance(UUID(operation_id)):
            return


@shared_task
def sweep_operations() -> None:
    """Once a second while there are any: what waits, and what was lost with a worker or with Redis.
    While their table is locked, workers do other work: the next sweep finds what this one did not."""
    try:
        due = services.take_due(timezone.now())
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        log.warning("Operations wait, since their table is locked")
        return
    for operation_id in due:
        advance_operation.delay(str(operation_id))
