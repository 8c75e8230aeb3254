"""REST API of alerts. Bulk changes, silences, rules and channels have modules of their own."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import Http404, HttpRequest
from django.utils import timezone
from ninja import Field, Path, Router, Schema, Status

from console.accounts.browser import requester
from console.accounts.models import NAME
from console.accounts.principal import Principal
from console.alerts import services
from console.alerts.models import Alert, Comment, Silence
from console.alerts.services import Filters
from console.alerts.state.silences import active_silences, silence_of
from console.alerts.suggested_fixes import services as suggested_fixes
from console.alerts.suggested_fixes.definition import Call, SuggestedFix
from console.api.fields import NO_NUL, Input, Reason, SearchText
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.orgs.services import NoSuchUser, get_org

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
    since: datetime = Field(description="When it entered this state.")
    begun_at: datetime = Field(description="First breach of this episode.")
    fired_at: datetime | None
    observed_at: datetime = Field(description="Last evaluation.")
    topic: str
    subject: str
    org: str | None
    labels: dict[str, str] = Field(description="The labels that matchers compare with.")
    sentence: str
    value: float | None
    threshold: float | None
    evidence: dict[str, Any]
    episode: int
    acknowledged_at: datetime | None
    acknowledged_by: str
    assignee: str | None
    suppressed_by: int | None = Field(
        description="The alert that causes this one, for users who may see the fleet."
    )
    silenced_by: int | None
    suggested_fix: str = Field(description="General advice of the rule.")
    runbook: str


class PlannedChangeOut(Schema):
    what: str
    before: str
    after: str


class CallOut(Schema):
    method: Literal["POST", "PUT"]
    path: str
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


class ReasonIn(Input):
    reason: Reason = Field("", description="Stored in the audit trail.")


class CommentIn(Input):
    text: Annotated[str, Field(min_length=1, max_length=2000, pattern=NO_NUL)]


class AssigneeIn(Input):
    username: Annotated[str, Field(pattern=NAME, max_length=63)] | None
    reason: Reason = ""


def show_alert(alert: Alert, active: list[Silence], principal: Principal) -> AlertOut:
    return AlertOut(**_fields(alert, active, principal))


def _fields(alert: Alert, active: list[Silence], principal: Principal) -> dict[str, Any]:
    rule, silence = alert.definition, silence_of(alert, active)
    return {
        "id": alert.pk,
        "rule": alert.rule,
        "title": alert.title,
        "severity": alert.severity,
        "state": alert.state,
        "since": alert.state_since,
        "begun_at": alert.begun_at,
        "fired_at": alert.fired_at,
        "observed_at": alert.observed_at,
        "topic": alert.topic,
        "subject": alert.subject,
        "org": alert.org.slug if alert.org else None,
        "labels": alert.all_labels,
        "sentence": alert.sentence,
        "value": alert.value,
        "threshold": alert.threshold,
        "evidence": services.evidence(principal, alert),
        "episode": alert.episode,
        "acknowledged_at": alert.acknowledged_at,
        "acknowledged_by": alert.acknowledged_by,
        "assignee": alert.assignee.username if alert.assignee else None,
        "suppressed_by": alert.suppressed_by_id if services.sees_causes(principal) else None,
        "silenced_by": silence.pk if silence else None,
        "suggested_fix": rule.suggested_fix if rule else "",
        "runbook": f"docs/runbooks/{rule.runbook}" if rule else "",
    }


def _whole(alert: Alert, principal: Principal) -> AlertWithHistory:
    transitions = alert.transitions.order_by("-number")[:100]
    comments = alert.comments.order_by("-pk")[:100]
    return AlertWithHistory(
        **_fields(alert, active_silences(timezone.now()), principal),
        transitions=[
            TransitionOut(
                number=transition.number,
                episode=transition.episode,
                at=transition.at,
                before=_state(transition.before),
                after=_state(transition.after),
                sentence=transition.sentence,
            )
            for transition in transitions
        ],
        comments=[show_comment(one) for one in comments],
    )


def show_fix(fix: SuggestedFix) -> SuggestedFixOut:
    return SuggestedFixOut(
        action=fix.action,
        text=fix.text,
        plan=[PlannedChangeOut(what=one.what, before=one.before, after=one.after) for one in fix.plan],
        refusal=fix.refusal,
        call=_show_call(fix.call) if fix.call else None,
        operation_page=fix.operation_page,
    )


def _show_call(call: Call) -> CallOut:
    return CallOut(
        method=call.method, path=f"/api/v1{call.path}", headers=dict(call.headers), body=dict(call.body)
    )


def _state(text: str) -> Any:
    return text


def show_comment(comment: Comment) -> CommentOut:
    return CommentOut(id=comment.pk, at=comment.at, author=comment.author, text=comment.text)


@router.get("/alerts", response={200: Page[AlertOut], **documented(404)}, summary="List alerts")
def list_alerts(
    request: HttpRequest,
    state: Literal["open", "all", "pending", "firing", "no_data", "resolved"] = "open",
    severity: Literal["", "page", "ticket", "notice"] = "",
    rule: SearchText = "",
    org: SearchText = "",
    topic: Annotated[str, Field(max_length=240, pattern=NO_NUL)] = "",
    q: SearchText = "",
    *,
    suppressed: bool = False,
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    """The newest first. Suppressed alerts, which have a known cause, are left out by default."""
    principal = requester(request)
    filters = Filters(
        state=state,
        severity=severity,
        rule=rule,
        org_id=get_org(principal, org).pk if org else None,
        topic=topic,
        q=q,
        suppressed=suppressed,
    )
    alerts = filters.apply(principal)
    show = partial(show_alert, active=active_silences(timezone.now()), principal=principal)
    return paginate(alerts, "-pk", cursor, limit, show)


@router.get(
    "/alerts/{alert_id}", response={200: AlertWithHistory, **documented(404)}, summary="Get an alert"
)
def get_alert(request: HttpRequest, alert_id: Number) -> AlertWithHistory:
    principal = requester(request)
    return _whole(services.get_alert(principal, alert_id), principal)


@router.get(
    "/alerts/{alert_id}/suggested-fixes",
    response={200: list[SuggestedFixOut], **documented(404)},
    summary="Suggested fixes of an alert",
)
def list_suggested_fixes(request: HttpRequest, alert_id: Number) -> list[SuggestedFixOut]:
    """Each with its plan, made at the time of the request, and the `call` that applies it."""
    principal = requester(request)
    return [
        show_fix(fix)
        for fix in suggested_fixes.suggest(principal, services.get_alert(principal, alert_id))
    ]


@router.post(
    "/alerts/{alert_id}/acknowledge",
    response={200: AlertWithHistory, **documented(404)},
    summary="Acknowledge an alert",
)
def acknowledge(request: HttpRequest, alert_id: Number, payload: ReasonIn) -> AlertWithHistory:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        return _whole(services.acknowledge(principal, alert, payload.reason), principal)


@router.post(
    "/alerts/{alert_id}/unacknowledge",
    response={200: AlertWithHistory, **documented(404)},
    summary="Take an acknowledgement back",
)
def unacknowledge(request: HttpRequest, alert_id: Number, payload: ReasonIn) -> AlertWithHistory:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        return _whole(services.unacknowledge(principal, alert, payload.reason), principal)


@router.post(
    "/alerts/{alert_id}/comments",
    response={201: CommentOut, **documented(404)},
    summary="Comment on an alert",
)
def comment(request: HttpRequest, alert_id: Number, payload: CommentIn) -> Status[CommentOut]:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        return Status(201, show_comment(services.comment(principal, alert, payload.text)))


@router.put(
    "/alerts/{alert_id}/assignee",
    response={200: AlertWithHistory, **documented(404)},
    summary="Assign an alert, or unassign it with null",
)
def assign(request: HttpRequest, alert_id: Number, payload: AssigneeIn) -> AlertWithHistory:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        try:
            alert = services.assign(principal, alert, payload.username or "", payload.reason)
            return _whole(alert, principal)
        except NoSuchUser as error:
            raise Http404(str(error)) from None
