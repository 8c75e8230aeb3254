"""Prometheus metrics of alerts: evaluation and notifications."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.db.models import Count, Max
from django.utils import timezone

from console.alerts.models import Alert, Evaluation, Notification
from console.alerts.state.lifecycle import OPEN
from console.metrics.own import ALERTS, ALERTS_AGE, NOTIFICATIONS
from telemetry.metrics import Sink

WAITING_LONG: Final = timedelta(minutes=5)


def collect(into: Sink) -> None:
    now = timezone.now()
    at = Evaluation.objects.aggregate(at=Max("at"))["at"]
    into.put(ALERTS_AGE, [({}, (now - at).total_seconds())] if at else [])
    open_alerts = Alert.objects.filter(state__in=OPEN).order_by()
    counts = open_alerts.values_list("state", "severity").annotate(Count("pk"))
    into.put(ALERTS, [({"state": state, "severity": grave}, count) for state, grave, count in counts])
    waiting = Notification.objects.filter(state=Notification.State.WAITING)
    given_up = Notification.objects.filter(
        state=Notification.State.GIVEN_UP, created_at__gt=now - timedelta(days=1)
    ).exclude(what=Notification.What.TEST)
    of_state = {
        "waiting": waiting,
        "waiting_long": waiting.filter(created_at__lt=now - WAITING_LONG),
        "given_up": given_up,
    }
    into.put(NOTIFICATIONS, [({"state": state}, rows.count()) for state, rows in of_state.items()])
