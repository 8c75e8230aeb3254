"""Who is told of what, and that it reaches them: at least once, in order, in the way of nobody.

`plan` looks at what fires and writes down what channels have not been told of; it may run at any time
and any number of times. `deliver` sends what is due. Who takes a notification has a minute for it: if he
dies, it is due again, and sent again with the same key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.urls import reverse
from django.utils import timezone

from console.alerts.life import TOLD, State
from console.alerts.matching import match
from console.alerts.messages import Message
from console.alerts.models import Alert, Channel, Notification, Silence
from console.alerts.rules import Severity
from console.alerts.senders import Outcome, send, takes_groups

log = logging.getLogger(__name__)

Waiting = Notification.State.WAITING
What = Notification.What

# What fires together is told together, and its cause may turn up before anybody is told.
GROUPING: Final = timedelta(seconds=10)
LEASE: Final = timedelta(seconds=60)
BACK_OFF_SECONDS: Final = (10, 30, 60, 120, 300, 600, 1200, 3600, 3600, 3600, 3600)
TRIES_MAX: Final = len(BACK_OFF_SECONDS) + 1
GROUP_MAX: Final = 50
ALERTS_MAX: Final = 5000
GRAVITY: Final = {severity: place for place, severity in enumerate(reversed(Severity))}


# Who is to be told


def plan(now: datetime) -> int:
    """Write down what is to be told; the number of notifications that this call has made."""
    channels = list(Channel.objects.filter(enabled=True).select_related("org"))
    if not channels:
        return 0
    firing = [
        Notification(
            channel=channel,
            alert=alert,
            episode=alert.episode,
            what=What.FIRING,
            next_try_at=now + GROUPING,
        )
        for alert in unsilenced(_to_be_told(), now)
        for channel in channels
        if wants(channel, alert)
    ]
    over = [
        Notification(
            channel=one.channel,
            alert=one.alert,
            episode=one.episode,
            what=What.RESOLVED,
            next_try_at=now,
        )
        for one in _over_and_not_told()
    ]
    before = Notification.objects.count()
    Notification.objects.bulk_create([*firing, *over], ignore_conflicts=True)
    return Notification.objects.count() - before


def _to_be_told() -> QuerySet[Alert]:
    found = Alert.objects.filter(state__in=TOLD, fired_at__isnull=False, hidden_by=None)
    return found.order_by("id")[:ALERTS_MAX]


def _over_and_not_told() -> QuerySet[Notification]:
    """Whose beginning has arrived: nobody hears of an end first."""
    told = Notification.objects.filter(
        channel=OuterRef("channel"),
        alert=OuterRef("alert"),
        episode=OuterRef("episode"),
        what=What.RESOLVED,
    )
    over = Q(alert__state=State.RESOLVED) | Q(alert__episode__gt=F("episode"))
    found = Notification.objects.filter(
        over, what=What.FIRING, state=Notification.State.SENT, channel__tells_end=True
    )
    return found.exclude(Exists(told)).select_related("channel", "alert").order_by("id")[:ALERTS_MAX]


def unsilenced(alerts: Iterable[Alert], now: datetime) -> list[Alert]:
    silences = active_silences(now)
    return [alert for alert in alerts if silence_of(alert, silences) is None]


def active_silences(now: datetime) -> list[Silence]:
    return list(Silence.objects.filter(starts_at__lte=now, ends_at__gt=now))


def silence_of(alert: Alert, silences: Iterable[Silence]) -> Silence | None:
    """The first that matches it. One of an org reaches no further than the org."""
    for silence in silences:
        if silence.org_id in (None, alert.org_id) and match(silence.parsed, alert.all_labels):
            return silence
    return None


def wants(channel: Channel, alert: Alert) -> bool:
    grave_enough = GRAVITY[Severity(alert.severity)] >= GRAVITY[Severity(channel.least_severity)]
    its = channel.org_id in (None, alert.org_id)
    return grave_enough and its and match(channel.parsed, alert.all_labels)


# Telling them


def due_channels(now: datetime) -> list[int]:
    due = Notification.objects.filter(state=Waiting, next_try_at__lte=now, channel__enabled=True)
    return list(due.values_list("channel", flat=True).order_by("channel").distinct())


def deliver(channel_id: int, groups_max: int = 4) -> int:
    """Send what is due of a channel, a group at a time; the number of groups that were tried."""
    channel = Channel.objects.filter(pk=channel_id, enabled=True).first()
    if channel is None:
        return 0
    for count in range(groups_max):
        group = _take(channel, timezone.now())
        if not group:
            return count
        settle(group, send(channel, [message_of(one) for one in group]), timezone.now())
    return groups_max


def _take(channel: Channel, now: datetime) -> list[Notification]:
    """The oldest that is due, with what belongs to it; others leave it for as long as the lease."""
    with transaction.atomic():
        waiting = channel.notifications.filter(state=Waiting, next_try_at__lte=now)
        due = waiting.select_related("alert").select_for_update(of=("self",), skip_locked=True)
        rows = _still_wanted(list(due.order_by("id")[:GROUP_MAX]), now)
        if not rows:
            return []
        together = (one for one in rows if _group(one) == _group(rows[0]))
        group = list(islice(together, GROUP_MAX if takes_groups(channel) else 1))
        taken = Notification.objects.filter(pk__in=[one.pk for one in group])
        taken.update(tries=F("tries") + 1, next_try_at=now + LEASE)
        for one in group:
            one.tries += 1
    return group


def _still_wanted(rows: list[Notification], now: datetime) -> list[Notification]:
    """What was hidden or silenced before anybody was told goes; if it is not any more, `plan` makes it
    anew."""
    silences = active_silences(now)
    unwanted = [
        one.pk
        for one in rows
        if one.alert
        and one.what == What.FIRING
        and not one.tries
        and one.alert.is_open
        and (one.alert.hidden_by_id or silence_of(one.alert, silences))
    ]
    Notification.objects.filter(pk__in=unwanted).delete()
    return [one for one in rows if one.pk not in unwanted]


def _group(one: Notification) -> tuple[str, str, int | None]:
    return (one.what, one.alert.rule, one.alert.org_id) if one.alert else (one.what, "", one.pk)


def settle(group: Iterable[Notification], outcome: Outcome, now: datetime) -> None:
    """Take down what came of a try."""
    for one in group:
        one.answer = outcome.answer
        if outcome.sent:
            one.state, one.sent_at = Notification.State.SENT, now
        elif one.tries >= TRIES_MAX or one.what == What.TEST:
            one.state = Notification.State.GIVEN_UP
            log.error("gave up telling %s: %s", one.channel.name, outcome.answer)
        else:
            one.next_try_at = now + timedelta(seconds=BACK_OFF_SECONDS[one.tries - 1])
        one.save(update_fields=["state", "sent_at", "answer", "next_try_at"])


def message_of(one: Notification) -> Message:
    alert = one.alert
    if alert is None:
        return _test_message(one)
    rule = alert.definition
    return Message(
        what=one.what,
        dedup_key=one.dedup_key,
        title=alert.title,
        subject=alert.subject,
        sentence=alert.sentence,
        severity=alert.severity,
        rule=alert.rule,
        labels=alert.all_labels,
        since=alert.begun_at,
        value=alert.value,
        threshold=alert.threshold,
        remedy=rule.remedy if rule else "",
        address=settings.PUBLIC_URL + reverse("alert", args=[alert.pk]),
        runbook=settings.PUBLIC_URL + reverse("alert", args=[alert.pk]) + "#runbook",
    )


def _test_message(one: Notification) -> Message:
    page = settings.PUBLIC_URL + reverse("alert-channel", args=[one.channel_id])
    return Message(
        what=What.TEST,
        dedup_key=one.dedup_key,
        title="This is a test",
        subject=one.channel.name,
        sentence="Somebody has pressed the test button. Nothing is wrong.",
        severity=Severity.NOTICE,
        rule="test",
        labels={},
        since=one.created_at,
        value=None,
        threshold=None,
        remedy="",
        address=page,
        runbook=page,
    )
