"""What is done beside requests: to go on with the replacement of a root."""

from __future__ import annotations

from celery import shared_task

from console.authority import services


@shared_task
def advance() -> None:
    services.advance()
