"""Rules, their thresholds, and channels over REST."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Field, Query, Router, Schema, Status
from pydantic import StrictBool

from console.accounts.browser import requester
from console.accounts.principal import Authority, Principal
from console.accounts.roles import Role
from console.alerts import channels, limits
from console.alerts.api import Number, SeverityName
from console.alerts.api_silences import MatcherText, OrgSlug
from console.alerts.catalogue import RULES
from console.alerts.models import Channel, Notification, Thresholds
from console.alerts.rules import Rule
from console.api.etags import IfMatch, check_match, etag
from console.api.fields import NO_NUL, Input, Line, Reason
from console.api.idempotency import Answer, idempotent
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.orgs.models import SLUG
from console.orgs.services import get_org

router = Router(tags=["alerts"])

LimitName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
RuleSlug = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
Whose = Annotated[
    str, Query(pattern=rf"^$|{SLUG}", max_length=48, description="An org; those of all without it.")
]


class LimitOut(Schema):
    name: str
    value: float
    source: Literal["rule", "all", "org"] = Field(description="Where that comes from.")
    text: str


class RuleOut(Schema):
    slug: str
    title: str
    severity: SeverityName
    scope: str = Field(description="What an instance is about: the beginning of its topic.")
    per_org: bool = Field(description="Whether an org may have thresholds of its own.")
    means: str
    remedy: str
    runbook: str
    metrics: list[str]
    enabled: bool
    limits: list[LimitOut]
    version: int = Field(description="Of the thresholds; it is the ETag.")


class ThresholdsIn(Input):
    values: dict[LimitName, Annotated[float, Field(strict=True)]] = Field(
        max_length=20, description="By name of the limit. What is not named is as it is without it."
    )
    enabled: StrictBool = True
    reason: Reason = Field("", description="Why; it stands in the audit trail.")


def show_rule(rule: Rule, current: Thresholds, for_all: Thresholds) -> RuleOut:
    severity: Any = rule.severity.value
    shown: list[Any] = [
        {"name": one.name, "value": one.value, "source": one.source, "text": one.text}
        for one in limits.told(rule, current, for_all)
    ]
    return RuleOut(
        slug=rule.slug,
        title=rule.title,
        severity=severity,
        scope=rule.scope,
        per_org=rule.per_org,
        means=rule.means,
        remedy=rule.remedy,
        runbook=f"docs/runbooks/{rule.runbook}",
        metrics=rule.metrics,
        enabled=current.enabled,
        limits=shown,
        version=current.version,
    )


@router.get("/alert-rules", response={200: list[RuleOut], **documented()}, summary="What is watched")
def list_rules(request: HttpRequest) -> list[RuleOut]:
    requester(request)
    current = limits.for_all()
    return [show_rule(rule, current[rule.slug], current[rule.slug]) for rule in RULES]


@router.get("/alert-rules/{rule_slug}", response={200: RuleOut, **documented(404)}, summary="One rule")
def get_rule(
    request: HttpRequest, response: HttpResponse, rule_slug: RuleSlug, org: Whose = ""
) -> RuleOut:
    rule = limits.get_rule(rule_slug)
    current = limits.get(rule, limits.org_of(requester(request), rule, org))
    response["ETag"] = etag(current.version)
    return show_rule(rule, current, limits.get(rule, None))


@router.put(
    "/alert-rules/{rule_slug}/thresholds",
    response={200: RuleOut, **documented(404, 412, 428)},
    summary="Set what a rule judges by, for all or for an org",
)
def set_thresholds(
    request: HttpRequest,
    response: HttpResponse,
    rule_slug: RuleSlug,
    payload: ThresholdsIn,
    if_match: IfMatch,
    org: Whose = "",
) -> RuleOut:
    principal, rule = requester(request), limits.get_rule(rule_slug)
    with transaction.atomic():
        current = limits.thresholds_for_change(principal, rule, org)
        check_match(if_match, current.version)
        current = limits.set_thresholds(
            principal, current, values=payload.values, enabled=payload.enabled, reason=payload.reason
        )
    response["ETag"] = etag(current.version)
    return show_rule(rule, current, limits.get(rule, None))


# Channels


class ChannelOut(Schema):
    id: int
    name: str
    kind: Literal["webhook", "email", "slack", "pagerduty"]
    org: str | None
    address: str = Field(description="What of it may be shown.")
    has_secret: bool
    matchers: list[str]
    least_severity: SeverityName
    tells_end: bool
    enabled: bool
    version: int = Field(description="Counts changes; it is the ETag.")


class ChannelSettings(Input):
    name: Line
    address: Annotated[str, Field(max_length=2000, pattern=NO_NUL)] = Field(
        "", description="A URL, or e-mail addresses apart by commas. Empty: as it was; PagerDuty's own."
    )
    secret: Annotated[str, Field(max_length=500, pattern=NO_NUL)] = Field(
        "", description="PagerDuty's integration key; what a webhook is signed with. Empty: as it was."
    )
    matchers: list[MatcherText] = Field([], max_length=8)
    least_severity: SeverityName = "ticket"
    tells_end: StrictBool = True
    enabled: StrictBool = True
    reason: Reason = ""


class ChannelIn(ChannelSettings):
    kind: Literal["webhook", "email", "slack", "pagerduty"]
    org: OrgSlug | None = Field(None, description="Only alerts of this org; null for all.")


class NotificationOut(Schema):
    id: int
    what: Literal["firing", "resolved", "test"]
    state: Literal["waiting", "sent", "given_up"]
    alert: int | None
    dedup_key: str
    tries: int
    created_at: datetime
    next_try_at: datetime | None
    sent_at: datetime | None
    answer: str = Field(description="What the receiver said to the last try.")


def show_channel(channel: Channel) -> ChannelOut:
    kind: Any = channel.kind
    severity: Any = channel.least_severity
    return ChannelOut(
        id=channel.pk,
        name=channel.name,
        kind=kind,
        org=channel.org.slug if channel.org else None,
        address=channel.shown,
        has_secret=bool(channel.secret),
        matchers=channel.matchers,
        least_severity=severity,
        tells_end=channel.tells_end,
        enabled=channel.enabled,
        version=channel.version,
    )


def show_notification(one: Notification) -> NotificationOut:
    what: Any = one.what
    state: Any = one.state
    return NotificationOut(
        id=one.pk,
        what=what,
        state=state,
        alert=one.alert_id,
        dedup_key=one.dedup_key,
        tries=one.tries,
        created_at=one.created_at,
        next_try_at=one.next_try_at if one.state == one.State.WAITING else None,
        sent_at=one.sent_at,
        answer=one.answer,
    )


@router.get(
    "/alert-channels", response={200: Page[ChannelOut], **documented()}, summary="Where people are told"
)
def list_channels(
    request: HttpRequest, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    found = channels.visible_channels(requester(request))
    return paginate(found, "pk", cursor, limit, show_channel)


@router.post(
    "/alert-channels", response={201: ChannelOut, **documented(404, 409)}, summary="Add a channel"
)
@idempotent
def create_channel(request: HttpRequest, payload: ChannelIn) -> Answer:
    principal = requester(request)
    org = get_org(principal, payload.org) if payload.org else None
    channel = channels.create_channel(
        principal, org=org, kind=payload.kind, reason=payload.reason, **_values(payload)
    )
    headers = {"Location": f"/api/v1/alert-channels/{channel.pk}", "ETag": etag(channel.version)}
    needs = [Authority(None, Role.PLATFORM_ADMIN)]
    return Answer(201, needs, show_channel(channel), headers)


def _values(payload: ChannelSettings) -> dict[str, Any]:
    return payload.model_dump(include=set(ChannelSettings.model_fields) - {"reason"})


@router.get(
    "/alert-channels/{channel_id}", response={200: ChannelOut, **documented(404)}, summary="One channel"
)
def get_channel(request: HttpRequest, response: HttpResponse, channel_id: Number) -> ChannelOut:
    channel = channels.get_channel(requester(request), channel_id)
    response["ETag"] = etag(channel.version)
    return show_channel(channel)


@router.put(
    "/alert-channels/{channel_id}",
    response={200: ChannelOut, **documented(404, 412, 428)},
    summary="Change a channel",
)
def update_channel(
    request: HttpRequest,
    response: HttpResponse,
    channel_id: Number,
    payload: ChannelSettings,
    if_match: IfMatch,
) -> ChannelOut:
    principal = requester(request)
    with transaction.atomic():
        channel = _for_change(principal, channel_id, if_match)
        channel = channels.update_channel(principal, channel, reason=payload.reason, **_values(payload))
    response["ETag"] = etag(channel.version)
    return show_channel(channel)


@router.delete(
    "/alert-channels/{channel_id}",
    response={204: None, **documented(404, 412, 428)},
    summary="Delete a channel, with its log",
)
def delete_channel(request: HttpRequest, channel_id: Number, if_match: IfMatch) -> Status[None]:
    principal = requester(request)
    with transaction.atomic():
        channels.delete_channel(principal, _for_change(principal, channel_id, if_match))
    return Status(204, None)


def _for_change(principal: Principal, channel_id: int, if_match: str) -> Channel:
    channel = channels.for_change(principal, channel_id)
    check_match(if_match, channel.version)
    return channel


@router.post(
    "/alert-channels/{channel_id}/test",
    response={200: NotificationOut, **documented(404)},
    summary="Tell it something now",
)
def test_channel(request: HttpRequest, channel_id: Number) -> NotificationOut:
    return show_notification(channels.send_test(requester(request), channel_id))


@router.get(
    "/alert-channels/{channel_id}/notifications",
    response={200: Page[NotificationOut], **documented(404)},
    summary="What it was told, and what it answered",
)
def list_notifications(
    request: HttpRequest, channel_id: Number, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    channel = channels.get_channel(requester(request), channel_id)
    found = channel.notifications.select_related("alert")
    return paginate(found, "-pk", cursor, limit, show_notification)
