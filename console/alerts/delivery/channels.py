"""Channels: where notifications go. Only platform admins create them, since the console connects to any
address in them. Members of an org see the channels of their org."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.db.models import Count, Max, Q, QuerySet
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.alerts.delivery.notifications import leave_ended, message_of, settle
from console.alerts.delivery.senders import send
from console.alerts.models import Channel, Notification
from console.alerts.rules.rule import Severity
from console.alerts.state.matchers import BadMatcher, parse
from console.audit.services import Subject, record
from console.orgs.models import Org
from console.visibility import of_orgs
from telemetry.topics import ALERTS

RECEIVERS_MAX = 20
PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"


def visible_channels(principal: Principal) -> QuerySet[Channel]:
    return Channel.objects.filter(of_orgs(principal)).select_related("org")


def get_channel(principal: Principal, channel_id: int, at_least: Role = Role.VIEWER) -> Channel:
    """The one access function."""
    channel = Channel.objects.select_related("org").filter(pk=channel_id).first()
    return principal.checked(channel, at_least, "channel")


def for_change(principal: Principal, channel_id: int) -> Channel:
    """Locked until the end of the transaction."""
    principal.check_may_change()
    get_channel(principal, channel_id, Role.PLATFORM_ADMIN)
    return Channel.objects.select_for_update(no_key=True, of=("self",)).get(pk=channel_id)


@transaction.atomic
def create_channel(
    principal: Principal, *, org: Org | None, kind: str, reason: str = "", **values: Any
) -> Channel:
    """Raises ValidationError if the channel could not be notified. `values` are those of `_set`."""
    principal.check_may_change(Role.PLATFORM_ADMIN)
    channel = Channel(org=org, kind=kind)
    _set(channel, **values)
    channel.save()
    record(principal, "channel.create", _about(channel), after=channel.snapshot(), reason=reason)
    return channel


@transaction.atomic
def update_channel(
    principal: Principal, channel: Channel, *, reason: str = "", **values: Any
) -> Channel:
    """Change a channel from `for_change`. An empty address or secret leaves the old one in place."""
    before, old = channel.snapshot(), (channel.address, channel.secret)
    _set(channel, **values)
    if channel.snapshot() != before or (channel.address, channel.secret) != old:
        channel.version += 1
        channel.save()
        if channel.send_resolved and not before["send_resolved"]:
            leave_ended(channel)
        after = channel.snapshot()
        record(principal, "channel.update", _about(channel), before=before, after=after, reason=reason)
    return channel


@transaction.atomic
def delete_channel(principal: Principal, channel: Channel) -> None:
    """Delete a channel with its log."""
    record(principal, "channel.delete", _about(channel), before=channel.snapshot())
    channel.delete()


def send_test(principal: Principal, channel_id: int) -> Notification:
    """Send a test notification now, and return its outcome. No transaction is open while it is sent."""
    with transaction.atomic():
        channel = for_change(principal, channel_id)
        test = Notification.objects.create(
            channel=channel, what=Notification.What.TEST, tries=1, next_try_at=timezone.now()
        )
        record(principal, "channel.test", _about(channel), after=channel.snapshot())
    settle([test], send(channel, [message_of(test)]), timezone.now())
    return test


def _about(channel: Channel) -> Subject:
    return Subject.of("channel", channel.pk, channel.name, channel.org, ALERTS)


def _set(
    channel: Channel,
    *,
    name: str,
    address: str = "",
    secret: str = "",
    matchers: Sequence[str] = (),
    min_severity: str = Severity.TICKET.value,
    send_resolved: bool = True,
    enabled: bool = True,
) -> None:
    channel.name, channel.min_severity = name, min_severity
    channel.send_resolved, channel.enabled = send_resolved, enabled
    channel.address = address.strip() or channel.address or _default_address(channel)
    channel.secret = secret.strip() or channel.secret
    try:
        channel.matchers = [str(one) for one in parse(matchers)]
    except BadMatcher as error:
        raise ValidationError({"matchers": str(error)}) from None
    channel.shown = _check_address(channel)
    if channel.kind == Channel.Kind.PAGERDUTY and not channel.secret:
        raise ValidationError(
            {"secret": "PagerDuty needs the integration key of a service (Events API v2)."}
        )
    channel.full_clean()


def _default_address(channel: Channel) -> str:
    return PAGERDUTY if channel.kind == Channel.Kind.PAGERDUTY else ""


def _check_address(channel: Channel) -> str:
    """The part of the address that may be shown: whoever reads a whole webhook URL can use it."""
    if channel.kind == Channel.Kind.EMAIL:
        return _check_receivers(channel.address)
    try:
        parts = urlsplit(channel.address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in ("http", "https") or not channel.address.isprintable():
        raise ValidationError({"address": "Must be a URL that starts with https:// or http://."})
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}/…"[:200]


def _check_receivers(text: str) -> str:
    if not settings.SMTP_URL:
        raise ValidationError(
            {"kind": "No mail server is configured. Set TIDEGATE_SMTP_URL and restart."}
        )
    receivers = [one.strip() for one in text.split(",") if one.strip()]
    if not 0 < len(receivers) <= RECEIVERS_MAX:
        raise ValidationError(
            {"address": f"One to {RECEIVERS_MAX} e-mail addresses, separated by commas."}
        )
    for receiver in receivers:
        try:
            validate_email(receiver)
        except ValidationError:
            raise ValidationError({"address": f"“{receiver}” is not an e-mail address."}) from None
    more = f" and {len(receivers) - 1} more" if len(receivers) > 1 else ""
    return f"{receivers[0]}{more}"[:200]


def with_counts(channels: QuerySet[Channel]) -> QuerySet[Channel, Any]:
    """With waiting notifications, those that failed within a day, and the time of the last one sent."""
    states, today = Notification.State, timezone.now() - timedelta(days=1)
    alerts = Q(notifications__created_at__gt=today) & ~Q(notifications__what=Notification.What.TEST)
    return channels.annotate(
        waiting=Count("notifications", filter=Q(notifications__state=states.WAITING)),
        given_up=Count("notifications", filter=alerts & Q(notifications__state=states.GIVEN_UP)),
        last_sent_at=Max("notifications__sent_at"),
    )
