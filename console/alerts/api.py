"""Alerts over REST, one by one. Beside it: `api_many`, `api_silences`, `api_settings`."""

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
from console.alerts import fixing, services
from console.alerts.delivering import active_silences, silence_of
from console.alerts.fixes import Call, Fix
from console.alerts.models import Alert, Comment, Silence
from console.alerts.services import Filters
from console.api.fields import NO_NUL, Input, Reason, SearchText
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.orgs.services import NoSuchUser, get_org

router = Router(tags=["alerts"])

Number = Annotated[int, Path(ge=1, le=2**63 - 1)]
AlertState = Literal["quiet", "pending", "firing", "no_data", "resolved"]
SeverityName = Literal["page", "ticket", "notice"]


class FlipOut(Schema):
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
    state: AlertState = Field(description="`no_data`: nobody knows, which is not well.")
    since: datetime = Field(description="Of this state.")
    begun_at: datetime = Field(description="Of this episode: its first breach.")
    fired_at: datetime | None
    observed_at: datetime = Field(description="Of which moment all this is known.")
    topic: str
    subject: str
    org: str | None
    labels: dict[str, str] = Field(description="What matchers are held against.")
    sentence: str
    value: float | None
    threshold: float | None
    evidence: dict[str, Any]
    episode: int
    acknowledged_at: datetime | None
    acknowledged_by: str
    assignee: str | None
    hidden_by: int | None = Field(description="The alert that explains it, for who sees the fleet.")
    silenced_by: int | None
    remedy: str
    runbook: str


class FixStepOut(Schema):
    what: str
    before: str
    after: str


class CallOut(Schema):
    method: Literal["POST", "PUT"]
    path: str
    headers: dict[str, str] = Field(description="Beside those of every call.")
    body: dict[str, Any]


class FixOut(Schema):
    kind: str = Field(description="Empty for what is only advice.")
    text: str
    plan: list[FixStepOut]
    refusal: str = Field(description="Why you can't do it; empty where you can.")
    call: CallOut | None = Field(description="Of this API, that does it.")
    followed_at: str = Field(description="The page of the operation that may end it already.")


class AlertWithHistory(AlertOut):
    flips: list[FlipOut]
    comments: list[CommentOut]


class ReasonIn(Input):
    reason: Reason = Field("", description="Why; it stands in the audit trail.")


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
        "hidden_by": alert.hidden_by_id if services.sees_causes(principal) else None,
        "silenced_by": silence.pk if silence else None,
        "remedy": rule.remedy if rule else "",
        "runbook": f"docs/runbooks/{rule.runbook}" if rule else "",
    }


def _whole(alert: Alert, principal: Principal) -> AlertWithHistory:
    flips = alert.flips.order_by("-number")[:100]
    comments = alert.comments.order_by("-pk")[:100]
    return AlertWithHistory(
        **_fields(alert, active_silences(timezone.now()), principal),
        flips=[
            FlipOut(
                number=flip.number,
                episode=flip.episode,
                at=flip.at,
                before=_state(flip.before),
                after=_state(flip.after),
                sentence=flip.sentence,
            )
            for flip in flips
        ],
        comments=[show_comment(one) for one in comments],
    )


def show_fix(fix: Fix) -> FixOut:
    return FixOut(
        kind=fix.kind,
        text=fix.text,
        plan=[FixStepOut(what=one.what, before=one.before, after=one.after) for one in fix.plan],
        refusal=fix.refusal,
        call=_show_call(fix.call) if fix.call else None,
        followed_at=fix.followed_at,
    )


def _show_call(call: Call) -> CallOut:
    return CallOut(method=call.method, path=call.path, headers=dict(call.headers), body=dict(call.body))


def _state(text: str) -> Any:
    return text


def show_comment(comment: Comment) -> CommentOut:
    return CommentOut(id=comment.pk, at=comment.at, author=comment.author, text=comment.text)


@router.get("/alerts", response={200: Page[AlertOut], **documented(404)}, summary="Alerts")
def list_alerts(
    request: HttpRequest,
    state: Literal["open", "all", "pending", "firing", "no_data", "resolved"] = "open",
    severity: Literal["", "page", "ticket", "notice"] = "",
    rule: SearchText = "",
    org: SearchText = "",
    topic: Annotated[str, Field(max_length=240, pattern=NO_NUL)] = "",
    q: SearchText = "",
    *,
    hidden: bool = False,
    cursor: Cursor = None,
    limit: Limit = LIMIT_DEFAULT,
) -> dict[str, object]:
    """The newest first. `hidden` also tells those that another one explains."""
    principal = requester(request)
    filters = Filters(
        state=state,
        severity=severity,
        rule=rule,
        org_id=get_org(principal, org).pk if org else None,
        topic=topic,
        q=q,
        hidden=hidden,
    )
    alerts = filters.apply(principal)
    show = partial(show_alert, active=active_silences(timezone.now()), principal=principal)
    return paginate(alerts, "-pk", cursor, limit, show)


@router.get(
    "/alerts/{alert_id}", response={200: AlertWithHistory, **documented(404)}, summary="One alert"
)
def get_alert(request: HttpRequest, alert_id: Number) -> AlertWithHistory:
    principal = requester(request)
    return _whole(services.get_alert(principal, alert_id), principal)


@router.get(
    "/alerts/{alert_id}/fixes",
    response={200: list[FixOut], **documented(404)},
    summary="What would end it, with plans",
)
def list_fixes(request: HttpRequest, alert_id: Number) -> list[FixOut]:
    """Planned anew each time; `call` does it."""
    principal = requester(request)
    return [show_fix(fix) for fix in fixing.of(principal, services.get_alert(principal, alert_id))]


@router.post(
    "/alerts/{alert_id}/acknowledge",
    response={200: AlertWithHistory, **documented(404)},
    summary="Say that you have it in hand",
)
def acknowledge(request: HttpRequest, alert_id: Number, payload: ReasonIn) -> AlertWithHistory:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        return _whole(services.acknowledge(principal, alert, payload.reason), principal)


@router.post(
    "/alerts/{alert_id}/unacknowledge",
    response={200: AlertWithHistory, **documented(404)},
    summary="Say that nobody has it in hand",
)
def unacknowledge(request: HttpRequest, alert_id: Number, payload: ReasonIn) -> AlertWithHistory:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        return _whole(services.unacknowledge(principal, alert, payload.reason), principal)


@router.post(
    "/alerts/{alert_id}/comments",
    response={201: CommentOut, **documented(404)},
    summary="Say something of it",
)
def comment(request: HttpRequest, alert_id: Number, payload: CommentIn) -> Status[CommentOut]:
    principal = requester(request)
    with transaction.atomic():
        alert = services.for_change(principal, alert_id)
        return Status(201, show_comment(services.comment(principal, alert, payload.text)))


@router.put(
    "/alerts/{alert_id}/assignee",
    response={200: AlertWithHistory, **documented(404)},
    summary="Assign it to somebody, or with null to nobody",
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
