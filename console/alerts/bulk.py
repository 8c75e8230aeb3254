"""Bulk changes of alerts. If one alert may not be changed, none is."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction

from console.accounts.principal import Principal
from console.alerts import services
from console.alerts.models import Alert
from console.alerts.state import silences
from console.alerts.timeline import matchers_of

ALERTS_MAX: Final = 100


class Verb(StrEnum):
    ACKNOWLEDGE = "acknowledge"
    ASSIGN = "assign"
    SILENCE = "silence"


@transaction.atomic
def do(
    principal: Principal,
    alert_ids: Collection[int],
    verb: Verb,
    *,
    username: str = "",
    ends_at: datetime | None = None,
    reason: str = "",
) -> list[Alert]:
    """Apply `verb` to each alert, with an audit entry each.

    Raises Http404, Refused, NoSuchUser or ValidationError as the change of one alert does.
    """
    listed = sorted(set(alert_ids))
    if not listed:
        raise ValidationError("Select at least one alert.")
    if len(listed) > ALERTS_MAX:
        raise ValidationError(f"At most {ALERTS_MAX} alerts at a time.")
    # Locked in one order, so that two requests cannot deadlock.
    match verb:
        case Verb.ACKNOWLEDGE:
            return [_acknowledge(principal, one, reason) for one in listed]
        case Verb.ASSIGN:
            return [services.assign(principal, one, username, reason) for one in listed]
        case Verb.SILENCE:
            return [_silence(principal, one, ends_at, reason) for one in listed]


def _acknowledge(principal: Principal, alert_id: int, reason: str) -> Alert:
    """One that has ended meanwhile stays as it is: the others are acknowledged nevertheless."""
    alert = services.for_change(principal, alert_id)
    return services.acknowledge(principal, alert_id, reason) if alert.is_open else alert


def _silence(principal: Principal, alert_id: int, ends_at: datetime | None, reason: str) -> Alert:
    alert = services.for_change(principal, alert_id)
    if ends_at is None:
        raise ValidationError({"ends_at": "Enter when it ends."})
    silences.create_silence(
        principal,
        org=alert.org,
        matchers=matchers_of(alert),
        starts_at=None,
        ends_at=ends_at,
        reason=reason,
    )
    return alert
