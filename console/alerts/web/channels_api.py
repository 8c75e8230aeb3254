"""REST API of channels and their notifications."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Field, Router, Schema, Status
from pydantic import StrictBool

from console.accounts.browser import requester
from console.accounts.principal import Authority, Principal
from console.accounts.roles import Role
from console.alerts.delivery import channels
from console.alerts.models import Channel, Notification
from console.alerts.web.api import Number, SeverityName
from console.alerts.web.silences_api import MatcherText, OrgSlug
from console.api.etags import IfMatch, check_match, etag
from console.api.fields import NO_NUL, Input, Line, Reason
from console.api.idempotency import Answer, idempotent
from console.api.pagination import LIMIT_DEFAULT, Cursor, Limit, Page, paginate
from console.api.problems import documented
from console.orgs.services import get_org

router = Router(tags=["alerts"])


class ChannelOut(Schema):
    id: int
    name: str
    kind: Literal["webhook", "email", "slack", "pagerduty"]
    org: str | None
    address: str = Field(description="The part that may be shown.")
    has_secret: bool
    matchers: list[str]
    min_severity: SeverityName
    send_resolved: bool
    enabled: bool
    version: int = Field(description="Also the ETag.")


class ChannelSettings(Input):
    name: Line
    address: Annotated[str, Field(max_length=2000, pattern=NO_NUL)] = Field(
        "",
        description="A URL, or comma-separated e-mail addresses. Empty: unchanged, or PagerDuty's.",
    )
    secret: Annotated[str, Field(max_length=500, pattern=NO_NUL)] = Field(
        "",
        description="PagerDuty's integration key, or the signing secret of a webhook. Empty: unchanged.",
    )
    matchers: list[MatcherText] = Field([], max_length=8)
    min_severity: SeverityName = "ticket"
    send_resolved: StrictBool = True
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
    answer: str = Field(description="The receiver's answer to the last try.")


def show_channel(channel: Channel) -> ChannelOut:
    kind: Any = channel.kind
    severity: Any = channel.min_severity
    return ChannelOut(
        id=channel.pk,
        name=channel.name,
        kind=kind,
        org=channel.org.slug if channel.org else None,
        address=channel.shown,
        has_secret=bool(channel.secret),
        matchers=channel.matchers,
        min_severity=severity,
        send_resolved=channel.send_resolved,
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


@router.get("/alert-channels", response={200: Page[ChannelOut], **documented()}, summary="List channels")
def list_channels(
    request: HttpRequest, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    found = channels.visible_channels(requester(request))
    return paginate(found, "pk", cursor, limit, show_channel)


@router.post(
    "/alert-channels", response={201: ChannelOut, **documented(404, 409)}, summary="Create a channel"
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
    "/alert-channels/{channel_id}",
    response={200: ChannelOut, **documented(404)},
    summary="Get a channel",
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
    summary="Delete a channel and its log",
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
    summary="Send a test notification",
)
def test_channel(request: HttpRequest, channel_id: Number) -> NotificationOut:
    return show_notification(channels.send_test(requester(request), channel_id))


@router.get(
    "/alert-channels/{channel_id}/notifications",
    response={200: Page[NotificationOut], **documented(404)},
    summary="List the notifications of a channel",
)
def list_notifications(
    request: HttpRequest, channel_id: Number, cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT
) -> dict[str, object]:
    channel = channels.get_channel(requester(request), channel_id)
    found = channel.notifications.select_related("alert")
    return paginate(found, "-pk", cursor, limit, show_notification)
