"""Celery tasks: evaluation every ten seconds, and delivery per channel."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from console.alerts.delivery import notifications
from console.alerts.state import evaluation
from console.periodic import periodic


@periodic
def tick() -> None:
    """Evaluate rules. Planning before, too, ensures that no alert resolves before it was planned. Due
    notifications are sent even if the evaluation fails."""
    notifications.plan(timezone.now())
    try:
        evaluation.tick(timezone.now())
    finally:
        now = timezone.now()
        notifications.plan(now)
        for channel in notifications.due_channels(now):
            deliver.apply_async((channel,), expires=60)


@shared_task
def deliver(channel: int) -> None:
    notifications.deliver(channel)
