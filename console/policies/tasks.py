"""What happens to policies without anybody asking."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from console.policies import schedule


@shared_task
def run_due() -> None:
    """Scheduled policies begin and end."""
    schedule.run_due(timezone.now())
