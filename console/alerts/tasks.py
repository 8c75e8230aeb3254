"""What beat asks for every ten seconds; and each channel apart, so that none waits for another."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from console.alerts import delivering, evaluating


@shared_task
def tick() -> None:
    """What fires is planned before and after: nothing is over before it was planned to be told."""
    delivering.plan(timezone.now())
    evaluating.tick(timezone.now())
    now = timezone.now()
    delivering.plan(now)
    for channel in delivering.due_channels(now):
        deliver.apply_async((channel,), expires=60)


@shared_task
def deliver(channel: int) -> None:
    delivering.deliver(channel)
