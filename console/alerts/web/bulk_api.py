"""REST API of bulk changes and statistics of alerts."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from django.utils import timezone
from ninja import Field, Query, Schema

from console.accounts.browser import SignedInRequest
from console.accounts.models import NAME
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.alerts import bulk, statistics
from console.alerts.state.silences import active_silences
from console.alerts.web.api import AlertOut, with_silence
from console.api.fields import Input, Moment, Reason
from console.api.idempotency import Answer, idempotent
from console.api.routes import Router, answers
from console.api.shown import read

router = Router(tags=["alerts"])

Days = Annotated[int, Query(ge=1, le=statistics.DAYS_MAX)]


class AlertsIn(Input):
    verb: Literal["acknowledge", "assign", "silence"]
    alerts: list[Annotated[int, Field(ge=1, le=2**63 - 1)]] = Field(
        min_length=1, max_length=bulk.ALERTS_MAX
    )
    username: Annotated[str, Field(pattern=NAME, max_length=63)] | None = Field(
        None, description="Assignee; null to unassign."
    )
    ends_at: Moment | None = Field(None, description="End of the silences; at most 90 days from now.")
    reason: Reason = Field("", description="Required for silences.")


class AlertsOut(Schema):
    items: list[AlertOut]


class RuleStatistics(Schema):
    rule: str = Field(description="Empty for the total.")
    episodes: int = Field(description="How often it fired.")
    acknowledged: int
    noise: int = Field(description="Resolved within ten minutes and never acknowledged.")
    seconds_to_acknowledge: float | None = Field(description="The median.")
    seconds_open: float | None = Field(description="The median of resolved episodes.")


class StatisticsOut(Schema):
    days: int
    at: datetime
    all: RuleStatistics
    rules: list[RuleStatistics] = Field(description="Those that fired most first.")
    left_out: bool = Field(description="Whether there were too many, and only the newest are counted.")


@router.post("/alerts/bulk", response=answers(AlertsOut, 404, 409))
@idempotent
def change_many(request: SignedInRequest, payload: AlertsIn) -> Answer:
    """Acknowledge, assign or silence several alerts.

    If you may not change one of them, none is changed.
    """
    changed = bulk.do(
        request.principal,
        payload.alerts,
        bulk.Verb(payload.verb),
        username=payload.username or "",
        ends_at=payload.ends_at,
        reason=payload.reason,
    )
    active = active_silences(timezone.now())
    orgs = {alert.org_id for alert in changed}
    return Answer(
        200,
        [Authority(org, Role.ON_CALL) for org in orgs],
        read(AlertsOut, {"items": [with_silence(alert, active) for alert in changed]}, request),
    )


@router.get("/alert-statistics", response=answers(StatisticsOut))
def get_statistics(
    request: SignedInRequest, days: Days = statistics.DAYS_DEFAULT
) -> statistics.Statistics:
    """How often rules fired, time to acknowledge and time to resolve."""
    return statistics.statistics(request.principal, days)
