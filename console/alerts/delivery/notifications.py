"""Notifications of channels: at least once, in order, and never in the way of evaluation.

`plan` stores a notification for every alert that a channel has not been notified of; it may run at any
time and any number of times. `deliver` sends those that are due. A worker leases a notification for a
minute; if it dies, the notification is due again, and is sent again with the same key.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from django.conf import settings
from django.contrib.postgres.expressions import ArraySubquery
from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.urls import reverse
from django.utils import timezone

from console.alerts.delivery.messages import Message
from console.alerts.delivery.senders import Outcome, send, takes_groups
from console.alerts.models import Alert, Channel, Notification, Silence, Transition
from console.alerts.rules.rule import Severity
from console.alerts.services import place_in
from console.alerts.state.lifecycle import NOTIFIED, State
from console.alerts.state.matchers import match
from console.alerts.state.silences import active_silences, silence_of

log = logging.getLogger(__name__)

Waiting = Notification.State.WAITING
What = Notification.What

# Alerts that fire within this time are sent together, and their cause may be found before they are sent.
GROUPING: Final = timedelta(seconds=10)
LEASE: Final = timedelta(seconds=60)
BACK_OFF_SECONDS: Final = (10, 30, 60, 120, 300, 600, 1200, 3600, 3600, 3600, 3600)
TRIES_MAX: Final = len(BACK_OFF_SECONDS) + 1
GROUP_MAX: Final = 50
FIRING_MAX: Final = 1000  # notifications of a channel that are planned at once
ENDED_MAX: Final = 5000  # of all channels
SEVERITIES: Final = list(Severity)  # the most urgent first


# Planning


def plan(now: datetime) -> int:
    """Store the notifications that are missing. Returns how many."""
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
        for channel, alert in _firing_and_not_planned(channels, active_silences(now))
    ]
    resolved = [
        Notification(
            channel=one.channel,
            alert=one.alert,
            episode=one.episode,
            what=What.RESOLVED,
            next_try_at=now,
        )
        for one in _resolved_and_not_planned()
    ]
    before = Notification.objects.count()
    Notification.objects.bulk_create([*firing, *resolved], ignore_conflicts=True)
    return Notification.objects.count() - before


def _firing_and_not_planned(
    channels: Sequence[Channel], silences: Sequence[Silence]
) -> Iterator[tuple[Channel, Alert]]:
    """The alerts that channels are yet to be notified of, gravest first. They are read once for all
    channels, and matched here: a channel that wants none of thousands costs next to nothing."""
    planned = Notification.objects.filter(
        alert=OuterRef("pk"), episode=OuterRef("episode"), what=What.FIRING
    )
    found = Alert.objects.filter(state__in=NOTIFIED, fired_at__isnull=False, suppressed_by=None)
    found = found.annotate(planned_for=ArraySubquery(planned.values("channel")))
    wanted = [
        (channel, SEVERITIES[: SEVERITIES.index(Severity(channel.min_severity)) + 1], channel.parsed)
        for channel in channels
    ]
    counts = Counter[int]()
    for alert in found.order_by(place_in(SEVERITIES, "severity"), "id"):
        labels = alert.all_labels
        told = [
            channel
            for channel, severities, matchers in wanted
            if channel.pk not in alert.planned_for
            and counts[channel.pk] < FIRING_MAX
            and channel.org_id in (None, alert.org_id)
            and alert.severity in severities
            and match(matchers, labels)
        ]
        if told and silence_of(alert, silences) is None:
            counts.update(channel.pk for channel in told)
            yield from ((channel, alert) for channel in told)


def _resolved_and_not_planned() -> QuerySet[Notification]:
    """Firing notifications that were sent, of episodes that have ended since."""
    found = _of_ended(Notification.objects.filter(channel__send_resolved=True, wants_end=True))
    return found.select_related("channel", "alert").order_by("id")[:ENDED_MAX]


def leave_ended(channel: Channel) -> None:
    """It is notified of ends from now on: not of all that it was ever notified of."""
    _of_ended(channel.notifications.all()).update(wants_end=False)


def _of_ended(notifications: QuerySet[Notification]) -> QuerySet[Notification]:
    planned = Notification.objects.filter(
        channel=OuterRef("channel"),
        alert=OuterRef("alert"),
        episode=OuterRef("episode"),
        what=What.RESOLVED,
    )
    ended = Q(alert__state=State.RESOLVED) | Q(alert__episode__gt=F("episode"))
    found = notifications.filter(ended, what=What.FIRING, state=Notification.State.SENT)
    return found.exclude(Exists(planned))


# Delivery


def due_channels(now: datetime) -> list[int]:
    due = Notification.objects.filter(state=Waiting, next_try_at__lte=now, channel__enabled=True)
    return list(due.values_list("channel", flat=True).order_by("channel").distinct())


def deliver(channel_id: int, groups_max: int = 4) -> int:
    """Send what is due on a channel, one group at a time. Returns the number of groups."""
    channel = Channel.objects.filter(pk=channel_id, enabled=True).first()
    if channel is None:
        return 0
    for count in range(groups_max):
        group = _lease(channel, timezone.now())
        if not group:
            return count
        settle(group, send(channel, [message_of(one) for one in group]), timezone.now())
    return groups_max


def _lease(channel: Channel, now: datetime) -> list[Notification]:
    """Take the gravest notification that is due, the oldest of those, and its group, for the length of
    the lease.

    A group that was tried is tried again as it was: with others in it, it would have another key.
    """
    with transaction.atomic():
        if not Channel.objects.select_for_update(no_key=True).filter(pk=channel.pk).exists():
            return []
        waiting = channel.notifications.filter(state=Waiting, next_try_at__lte=now)
        due = waiting.select_related("alert").select_for_update(no_key=True, of=("self",))
        due = due.order_by(place_in(SEVERITIES, "alert__severity"), "id")
        rows = list[Notification]()
        while not rows:
            if not (found := list(due[:GROUP_MAX])):
                return []
            rows = _still_wanted(found, now)
        first = rows[0]
        if first.tries:  # all of its group were due at the same moment since, and nothing else was
            rows = list(due.filter(tries=first.tries, next_try_at=first.next_try_at))
        together = (one for one in rows if one.tries == first.tries and _group(one) == _group(first))
        group = list(islice(together, GROUP_MAX if takes_groups(channel) else 1))
        leased = Notification.objects.filter(pk__in=[one.pk for one in group])
        leased.update(tries=F("tries") + 1, next_try_at=now + LEASE)
        for one in group:
            one.tries += 1
    return group


def _still_wanted(rows: list[Notification], now: datetime) -> list[Notification]:
    """Delete what was suppressed or silenced before its first try; `plan` stores it again if needed."""
    silences = active_silences(now)
    unwanted = [
        one.pk
        for one in rows
        if one.alert
        and one.what == What.FIRING
        and not one.tries
        and one.alert.is_open
        and (one.alert.suppressed_by_id or silence_of(one.alert, silences))
    ]
    Notification.objects.filter(pk__in=unwanted).delete()
    return [one for one in rows if one.pk not in unwanted]


def _group(one: Notification) -> tuple[str, str, int | None]:
    return (one.what, one.alert.rule, one.alert.org_id) if one.alert else (one.what, "", one.pk)


@transaction.atomic
def settle(group: Iterable[Notification], outcome: Outcome, now: datetime) -> None:
    """Store the outcome of a try, of all of the group or of none."""
    for one in group:
        one.answer = outcome.answer
        if outcome.sent:
            one.state, one.sent_at = Notification.State.SENT, now
        elif one.tries >= TRIES_MAX or one.what == What.TEST:
            one.state = Notification.State.GIVEN_UP
            log.error("notifying channel %s failed for good: %s", one.channel.name, outcome.answer)
        else:
            one.next_try_at = now + timedelta(seconds=BACK_OFF_SECONDS[one.tries - 1])
        one.save(update_fields=["state", "sent_at", "answer", "next_try_at"])


def message_of(one: Notification) -> Message:
    alert = one.alert
    if alert is None:
        return _test_message(one)
    rule, past = alert.definition, _past(alert, one.episode)
    address = settings.PUBLIC_URL + reverse("alert", args=[alert.pk])
    return Message(
        what=one.what,
        dedup_key=one.dedup_key,
        title=alert.title,
        subject=alert.subject,
        sentence=past[-1].sentence if past else alert.sentence,
        severity=alert.severity,
        rule=alert.rule,
        labels=alert.all_labels,
        since=past[0].at if past else alert.begun_at,
        value=None if past else alert.value,
        threshold=None if past else alert.threshold,
        suggested_fix=rule.suggested_fix if rule else "",
        address=address,
        runbook=f"{address}#runbook",
    )


def _past(alert: Alert, episode: int) -> list[Transition]:
    """The transitions of an episode that another one has followed, up to the last time that it fired.
    None of the one that the alert has now."""
    if episode == alert.episode:
        return []
    found = list(alert.transitions.filter(episode=episode).order_by("number"))
    while found and found[-1].after != State.FIRING:
        found.pop()
    return found


def _test_message(one: Notification) -> Message:
    page = settings.PUBLIC_URL + reverse("alert-channel", args=[one.channel_id])
    return Message(
        what=What.TEST,
        dedup_key=one.dedup_key,
        title="Test notification",
        subject=one.channel.name,
        sentence="This is a test from Tidegate. No action is needed.",
        severity=Severity.NOTICE,
        rule="test",
        since=one.created_at,
        address=page,
        runbook=page,
    )
