"""Advancing operations: at once after what asked for them, and again and again until they have ended."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from celery import shared_task
from django.utils import timezone

from console.operations import services
from console.periodic import periodic

STEPS_AT_ONCE: Final = 20  # then others have their turn, and the sweep goes on with it


@shared_task
def advance_operation(operation_id: str) -> None:
    """Do the steps that can be done now."""
    for _ in range(STEPS_AT_ONCE):
        if not services.advance(UUID(operation_id)):
            return


@periodic
def sweep_operations() -> None:
    """Once a second while there are any: what waits, and what was lost with a worker or with Redis."""
    for operation_id in services.take_due(timezone.now()):
        advance_operation.delay(str(operation_id))
