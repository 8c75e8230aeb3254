"""REST API of alerts. Bulk changes, silences, rules and channels have modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

from django.db.models import QuerySet
from django.utils import timezone
from ninja import Field, Path, Schema, Status
from pydantic import BeforeValidator

from console.accounts.browser import SignedInRequest
from console.accounts.models import NAME
from console.alerts import services
from console.alerts.models import Alert, Comment, Silence, Transition
from console.alerts.services import Filters
from console.alerts.state.silences import active_silences, silence_of
from console.alerts.suggested_fixes import services as suggested_fixes
from console.alerts.suggested_fixes.definition import SuggestedFix
from console.api.fields import NO_NUL, Input, Reason, ReasonIn, SearchText
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
from console.api.shown import Context, KeyOf, SlugOf, UsernameOf
from console.orgs.services import get_org

router = Router(tags=["alerts"])

Number = Annotated[int, Path(ge=1, le=2**63 - 1)]
AlertState = Literal["quiet", "pending", "firing", "no_data", "resolved"]
SeverityName = Literal["page", "ticket", "notice"]


class TransitionOut(Schema):
    number: int
    episode: int
    at: datetime
    before: AlertState
    after: AlertState
    sentence: str


class CommentOut(Schema):
    id: int
    at: datetime
    author: str
    text: str


class AlertOut(Schema):
    id: int
    rule: str
    title: str
    severity: SeverityName
    state: AlertState = Field(description="`no_data`: no metrics arrive, so the state is unknown.")
    since: datetime = Field(validation_alias="state_since", description="When it entered this state.")
    begun_at: datetime = Field(description="First breach of this episode.")
    fired_at: datetime | None
    observed_at: datetime = Field(description="Last evaluation.")
    topic: str
    subject: str
    org: SlugOf | None
    labels: dict[str, str] = Field(
        validation_alias="all_labels", description="The labels that matchers compare with."
    )
    sentence: str
    value: float | None
    threshold: float | None
    evidence: dict[str, Any]
    episode: int
    acknowledged_at: datetime | None
    acknowledged_by: str
    assignee: UsernameOf | None
    suppressed_by: int | None = Field(
        description="The alert that causes this one, for users who may see the fleet."
    )
    silenced_by: KeyOf | None
    suggested_fix: str = Field(description="General advice of the rule.")
    runbook: str

    @staticmethod
    def resolve_evidence(alert: Alert, context: Context) -> dict[str, Any]:
        return services.evidence(context["request"].principal, alert)

    @staticmethod
    def resolve_suppressed_by(alert: Alert, context: Context) -> int | None:
        sees_causes = services.sees_causes(context["request"].principal)
        return alert.suppressed_by_id if sees_causes else None

    @staticmethod
    def resolve_suggested_fix(alert: Alert) -> str:
        return alert.definition.suggested_fix if alert.definition else ""

    @staticmethod
    def resolve_runbook(alert: Alert) -> str:
        return f"docs/runbooks/{alert.definition.runbook}" if alert.definition else ""


class PlannedChangeOut(Schema):
    what: str
    before: str
    after: str


class CallOut(Schema):
    method: Literal["POST", "PUT"]
    path: Annotated[str, BeforeValidator("/api/v1{}".format)]
    headers: dict[str, str] = Field(description="In addition to those of every request.")
    body: dict[str, Any]


class SuggestedFixOut(Schema):
    action: str = Field(description="Empty for general advice.")
    text: str
    plan: list[PlannedChangeOut]
    refusal: str = Field(description="Why you cannot apply it; empty if you can.")
    call: CallOut | None = Field(description="The API request that applies it.")
    operation_page: str = Field(description="Page of the running operation that may fix the alert.")


class AlertWithHistory(AlertOut):
    transitions: list[TransitionOut]
    comments: list[CommentOut]

    @staticmethod
    def resolve_transitions(alert: Alert) -> QuerySet[Transition]:
        return alert.transitions.order_by("-number")[:100]

    @staticmethod
    def resolve_comments(alert: Alert) -> QuerySet[Comment]:
        return alert.comments.order_by("-pk")[:100]


class CommentIn(Input):
    text: Annotated[str, Field(min_length=1, max_length=2000, pattern=NO_NUL)]


class AssigneeIn(Input):
    username: Annotated[str, Field(pattern=NAME, max_length=63)] | None
    reason: Reason = ""


def with_silence(alert: Alert, active: list[Silence]) -> Alert:
    """The alert as the API shows it, with the silence among these that matches it."""
    alert.silenced_by = silence_of(alert, active)
    return alert


def _whole(alert: Alert) -> Alert:
    return with_silence(alert, active_silences(timezone.now()))


@listing(router, "/alerts", AlertOut, 404, by="-pk")
def list_alerts(
    request: SignedInRequest,
    state: Literal["open", "all", "pending", "firing", "no_data", "resolved"] = "open",
    severity: Literal["", "page", "ticket", "notice"] = "",
    rule: SearchText = "",
    org: SearchText = "",
    topic: Annotated[str, Field(max_length=240, pattern=NO_NUL)] = "",
    q: SearchText = "",
    *,
    suppressed: bool = False,
) -> Rows:
    """List alerts.

    The newest first. Suppressed alerts, which have a known cause, are left out by default.
    """
    filters = Filters(
        state=state,
        severity=severity,
        rule=rule,
        org=get_org(request.principal, org) if org else None,
        topic=topic,
        q=q,
        suppressed=suppressed,
    )
    alerts = filters.apply(request.principal)
    show = partial(with_silence, active=active_silences(timezone.now()))
    return alerts, show


@router.get("/alerts/{alert_id}", response=answers(AlertWithHistory, 404))
def get_alert(request: SignedInRequest, alert_id: Number) -> Alert:
    """Get an alert."""
    return _whole(services.get_alert(request.principal, alert_id))


@router.get("/alerts/{alert_id}/suggested-fixes", response=answers(list[SuggestedFixOut], 404))
def list_suggested_fixes(request: SignedInRequest, alert_id: Number) -> Sequence[SuggestedFix]:
    """Suggested fixes of an alert.

    Each with its plan, made at the time of the request, and the `call` that applies it.
    """
    return suggested_fixes.suggest(request.principal, services.get_alert(request.principal, alert_id))


@router.post("/alerts/{alert_id}/acknowledge", response=answers(AlertWithHistory, 404, 409))
def acknowledge(request: SignedInRequest, alert_id: Number, payload: ReasonIn) -> Alert:
    """Acknowledge an alert."""
    return _whole(services.acknowledge(request.principal, alert_id, payload.reason))


@router.post("/alerts/{alert_id}/unacknowledge", response=answers(AlertWithHistory, 404))
def unacknowledge(request: SignedInRequest, alert_id: Number, payload: ReasonIn) -> Alert:
    """Take an acknowledgement back."""
    return _whole(services.unacknowledge(request.principal, alert_id, payload.reason))


@router.post("/alerts/{alert_id}/comments", response=answers(CommentOut, 404, status=201))
def comment(request: SignedInRequest, alert_id: Number, payload: CommentIn) -> Status[Comment]:
    """Comment on an alert."""
    return Status(201, services.comment(request.principal, alert_id, payload.text))


@router.put("/alerts/{alert_id}/assignee", response=answers(AlertWithHistory, 404))
def assign(request: SignedInRequest, alert_id: Number, payload: AssigneeIn) -> Alert:
    """Assign an alert, or unassign it with null."""
    username = payload.username or ""
    return _whole(services.assign(request.principal, alert_id, username, payload.reason))
