"""REST API of channels and their notifications."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import HttpResponse
from ninja import Field, Schema, Status
from pydantic import BeforeValidator, StrictBool

from console.accounts.browser import SignedInRequest
from console.accounts.principal import Authority
from console.accounts.roles import Role
from console.alerts.delivery import channels
from console.alerts.models import Channel, Notification
from console.alerts.web.api import Number, SeverityName
from console.alerts.web.silences_api import MatcherText, OrgSlug
from console.api.etags import etag, matched, tagged
from console.api.fields import NO_NUL, IfMatch, Input, Line, Reason
from console.api.idempotency import Answer, idempotent
from console.api.pagination import Rows, listing
from console.api.routes import Router, answers
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


@listing(router, "/alert-channels", ChannelOut, by="pk")
def list_channels(request: SignedInRequest) -> Rows:
    """List channels."""
    return channels.visible_channels(request.principal)


@router.post("/alert-channels", response=answers(ChannelOut, 404, 409, status=201))
@idempotent
def create_channel(request: SignedInRequest, payload: ChannelIn) -> Answer:
    """Create a channel."""
    org = get_org(request.principal, payload.org) if payload.org else None
    channel = channels.create_channel(
        request.principal, org=org, kind=payload.kind, reason=payload.reason, **_values(payload)
    )
    headers = {"Location": f"/api/v1/alert-channels/{channel.pk}", "ETag": etag(channel.version)}
    needs = [Authority(None, Role.PLATFORM_ADMIN)]
    return Answer(201, needs, read(ChannelOut, channel, request), headers)


def _values(payload: ChannelSettings) -> dict[str, Any]:
    return payload.model_dump(include=set(ChannelSettings.model_fields) - {"reason"})


@router.get("/alert-channels/{channel_id}", response=answers(ChannelOut, 404))
def get_channel(request: SignedInRequest, response: HttpResponse, channel_id: Number) -> Channel:
    """Get a channel."""
    return tagged(response, channels.get_channel(request.principal, channel_id))


@router.put("/alert-channels/{channel_id}", response=answers(ChannelOut, 404, 412, 428))
def update_channel(
    request: SignedInRequest,
    response: HttpResponse,
    channel_id: Number,
    payload: ChannelSettings,
    if_match: IfMatch,
) -> Channel:
    """Change a channel."""
    principal = request.principal
    with transaction.atomic():
        channel = matched(channels.for_change(principal, channel_id), if_match)
        channel = channels.update_channel(principal, channel, reason=payload.reason, **_values(payload))
    return tagged(response, channel)


@router.delete("/alert-channels/{channel_id}", response=answers(None, 404, 412, 428, status=204))
def delete_channel(request: SignedInRequest, channel_id: Number, if_match: IfMatch) -> Status[None]:
    """Delete a channel and its log."""
    with transaction.atomic():
        channel = matched(channels.for_change(request.principal, channel_id), if_match)
        channels.delete_channel(request.principal, channel)
    return Status(204, None)


@router.post("/alert-channels/{channel_id}/test", response=answers(NotificationOut, 404))
def test_channel(request: SignedInRequest, channel_id: Number) -> Notification:
    """Send a test notification."""
    return channels.send_test(request.principal, channel_id)


@listing(router, "/alert-channels/{channel_id}/notifications", NotificationOut, 404, by="-pk")
def list_notifications(request: SignedInRequest, channel_id: Number) -> Rows:
    """List the notifications of a channel."""
    channel = channels.get_channel(request.principal, channel_id)
    return channel.notifications.select_related("alert")
