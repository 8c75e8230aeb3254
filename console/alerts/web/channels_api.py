"""REST API of channels and their notifications."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Field, Router, Schema, Status
from pydantic import BeforeValidator, StrictBool

from console.accounts.browser import requester
from console.accounts.principal import Authority, Principal
from console.accounts.roles import Role
from console.alerts.delivery import channels
from console.alerts.models import Channel, Notification
from console.alerts.web.api import Number, SeverityName
from console.alerts.web.silences_api import MatcherText, OrgSlug
from console.api.etags import IfMatch, check_match, etag, tagged
from console.api.fields import NO_NUL, Input, Line, Reason
from console.api.idempotency import Answer, idempotent
from console.api.pagination import Rows, listing
from console.api.problems import documented
from console.api.shown import KeyOf, SlugOf, read
from console.orgs.services import get_org

router = Router(tags=["alerts"])


class ChannelOut(Schema):
    id: int
    name: str
    kind: Literal["webhook", "email", "slack", "pagerduty"]
    org: SlugOf | None
    address: str = Field(validation_alias="shown", description="The part that may be shown.")
    has_secret: Annotated[bool, BeforeValidator(bool)] = Field(validation_alias="secret")
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
    alert: KeyOf | None
    dedup_key: str
    tries: int
    created_at: datetime
    next_try_at: datetime | None
    sent_at: datetime | None
    answer: str = Field(description="The receiver's answer to the last try.")

    @staticmethod
    def resolve_next_try_at(one: Notification) -> datetime | None:
        return one.next_try_at if one.state == one.State.WAITING else None


@listing(router, "/alert-channels", ChannelOut, by="pk", summary="List channels")
def list_channels(request: HttpRequest) -> Rows:
    return channels.visible_channels(requester(request))


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
    return Answer(201, needs, read(ChannelOut, channel, request), headers)


def _values(payload: ChannelSettings) -> dict[str, Any]:
    return payload.model_dump(include=set(ChannelSettings.model_fields) - {"reason"})


@router.get(
    "/alert-channels/{channel_id}",
    response={200: ChannelOut, **documented(404)},
    summary="Get a channel",
)
def get_channel(request: HttpRequest, response: HttpResponse, channel_id: Number) -> Channel:
    return tagged(response, channels.get_channel(requester(request), channel_id))


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
) -> Channel:
    principal = requester(request)
    with transaction.atomic():
        channel = _for_change(principal, channel_id, if_match)
        channel = channels.update_channel(principal, channel, reason=payload.reason, **_values(payload))
    return tagged(response, channel)


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
def test_channel(request: HttpRequest, channel_id: Number) -> Notification:
    return channels.send_test(requester(request), channel_id)


@listing(
    router,
    "/alert-channels/{channel_id}/notifications",
    NotificationOut,
    404,
    by="-pk",
    summary="List the notifications of a channel",
)
def list_notifications(request: HttpRequest, channel_id: Number) -> Rows:
    channel = channels.get_channel(requester(request), channel_id)
    return channel.notifications.select_related("alert")
