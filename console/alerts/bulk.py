"""The same for several alerts at once: all of them, or, where one is not theirs to change, none."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction

from console.accounts.principal import Principal
from console.alerts import services, silences
from console.alerts.models import Alert
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
    """What `verb` does to one, to each of these; each has its own entry in the trail.

    Raises what that raises for one of them: Http404, Refused, NoSuchUser, ValidationError.
    """
    listed = sorted(set(alert_ids))
    if not listed:
        raise ValidationError("Choose some alerts first.")
    if len(listed) > ALERTS_MAX:
        raise ValidationError(f"At most {ALERTS_MAX} alerts at a time.")
    # Locked in one order, so that two never wait for each other.
    found = [services.for_change(principal, one) for one in listed]
    for alert in found:
        match verb:
            case Verb.ACKNOWLEDGE:
                services.acknowledge(principal, alert, reason)
            case Verb.ASSIGN:
                services.assign(principal, alert, username, reason)
            case Verb.SILENCE:
                _silence(principal, alert, ends_at, reason)
    return found


def _silence(principal: Principal, alert: Alert, ends_at: datetime | None, reason: str) -> None:
    if ends_at is None:
        raise ValidationError({"ends_at": "Say when it ends."})
    silences.create_silence(
        principal,
        org=alert.org,
        matchers=matchers_of(alert),
        starts_at=None,
        ends_at=ends_at,
        reason=reason,
    )
