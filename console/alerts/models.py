from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from console.accounts.models import User
from console.accounts.names import ACTOR_NAME_MAX
from console.alerts.conditions.condition import name_of
from console.alerts.rules.catalogue import BY_SLUG
from console.alerts.rules.rule import Rule, Severity
from console.alerts.state.lifecycle import OPEN, Lifecycle, State
from console.alerts.state.matchers import Matcher, parse
from console.orgs.models import Org
from console.shell.sealed import SealedText

TEXT_CHARACTERS_MAX: Final = 300


def _one_of(field: str, values: Any) -> Q:
    return Q(**{f"{field}__in": [str(value) for value in values]})


class Alert(models.Model):
    """One instance of a rule: one node, org, shard or stream. The row stays after it resolves.

    An episode runs from a breach to its resolution. `observed_at` is the moment of the last evaluation:
    a transition is an UPDATE that names the `observed_at` it was decided from.
    """

    silenced_by: Silence | None  # by which it is silenced now, where it is shown
    rule = models.CharField(max_length=40)
    topic = models.CharField(max_length=240)
    labels = models.JSONField(default=dict)
    fingerprint = models.CharField(max_length=64, unique=True)
    org = models.ForeignKey(Org, null=True, on_delete=models.CASCADE, related_name="alerts")
    severity = models.CharField(max_length=8)
    state = models.CharField(max_length=8)
    episode = models.PositiveIntegerField(default=1)
    transition_count = models.PositiveIntegerField(default=0)
    begun_at = models.DateTimeField()
    state_since = models.DateTimeField()
    fired_at = models.DateTimeField(null=True)
    fine_since = models.DateTimeField(null=True)
    observed_at = models.DateTimeField()
    value = models.FloatField(null=True)
    threshold = models.FloatField(null=True)
    sentence = models.CharField(max_length=TEXT_CHARACTERS_MAX)
    evidence = models.JSONField(default=dict, encoder=DjangoJSONEncoder)
    # The alert that causes this one, while it fires.
    suppressed_by = models.ForeignKey(
        "self", null=True, on_delete=models.SET_NULL, related_name="suppresses"
    )
    # Of this episode, independent of its state.
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=ACTOR_NAME_MAX, blank=True)
    assignee = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="alerts")

    class Meta:
        ordering = ("-id",)
        constraints = [
            models.CheckConstraint(name="alert_state", condition=_one_of("state", State)),
            models.CheckConstraint(name="alert_severity", condition=_one_of("severity", Severity)),
            models.CheckConstraint(
                name="alert_fires_since_it_fired",
                condition=~_one_of("state", [State.FIRING, State.RESOLVED]) | Q(fired_at__isnull=False),
            ),
            models.CheckConstraint(name="alert_time", condition=Q(state_since__lte=F("observed_at"))),
        ]
        indexes = [
            models.Index(fields=["state", "-state_since"], name="alert_of_state"),
            models.Index(fields=["org", "state"], name="alert_of_org"),
            models.Index(fields=["rule", "state"], name="alert_of_rule"),
        ]

    def __str__(self) -> str:
        return f"{self.rule} of {self.subject}"

    @property
    def lifecycle(self) -> Lifecycle:
        return Lifecycle(State(self.state), self.begun_at, self.fired_at, self.fine_since)

    @property
    def definition(self) -> Rule | None:
        """None if the rule no longer exists."""
        return BY_SLUG.get(self.rule)

    @property
    def title(self) -> str:
        return self.definition.title if self.definition else self.rule

    @property
    def unit(self) -> str:
        """The unit of value and threshold."""
        return self.definition.unit if self.definition else ""

    @property
    def subject(self) -> str:
        """The object it is about: `ax-7`, or `ax-7, shard job7.full.2`."""
        labels = [f"{name} {text}" for name, text in sorted(self.labels.items())]
        return ", ".join([name_of(self.topic), *labels])

    @property
    def all_labels(self) -> dict[str, str]:
        """The labels that matchers compare with."""
        kind, _, name = self.topic.partition(":")
        own = {str(label): str(text) for label, text in self.labels.items()}
        about = {"rule": self.rule, "severity": self.severity, "topic": self.topic}
        return {**own, **about, **({kind: name} if name else {})}

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def dedup_key(self) -> str:
        """Shared by all notifications of this episode."""
        return self.dedup_key_of(self.episode)

    def dedup_key_of(self, episode: int) -> str:
        return f"tidegate-{self.fingerprint[:16]}-{episode}"


class Transition(models.Model):
    """A change of state. Each number occurs once per alert."""

    alert = models.ForeignKey(Alert, on_delete=models.CASCADE, related_name="transitions")
    number = models.PositiveIntegerField()
    episode = models.PositiveIntegerField()
    at = models.DateTimeField()
    before = models.CharField(max_length=8)
    after = models.CharField(max_length=8)
    sentence = models.CharField(max_length=TEXT_CHARACTERS_MAX)

    class Meta:
        ordering = ("alert", "number")
        constraints = [
            models.UniqueConstraint(name="flip_once", fields=["alert", "number"]),
            models.CheckConstraint(name="flip_is_a_change", condition=~Q(before=F("after"))),
        ]
        indexes = [models.Index(fields=["at"], name="flip_by_time")]

    def __str__(self) -> str:
        return f"{self.before} → {self.after}"


class Comment(models.Model):
    alert = models.ForeignKey(Alert, on_delete=models.CASCADE, related_name="comments")
    at = models.DateTimeField(default=timezone.now)
    author = models.CharField(max_length=ACTOR_NAME_MAX)
    text = models.CharField(max_length=2000)

    class Meta:
        ordering = ("id",)
        constraints = [models.CheckConstraint(name="comment_says_something", condition=~Q(text=""))]

    def __str__(self) -> str:
        return self.text[:80]


class WithMatchers(models.Model):
    """Selects alerts of one org or of all."""

    org = models.ForeignKey(Org, null=True, blank=True, on_delete=models.CASCADE)
    matchers = models.JSONField(default=list, blank=True)
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        abstract = True

    @property
    def parsed(self) -> tuple[Matcher, ...]:
        return parse(self.matchers)


class Silence(WithMatchers):
    """For a time, alerts that match it send no notifications. They are evaluated and shown as usual."""

    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    author = models.CharField(max_length=ACTOR_NAME_MAX)
    reason = models.CharField(max_length=500)

    class Meta:
        ordering = ("-ends_at", "-id")
        constraints = [
            models.CheckConstraint(name="silence_ends", condition=Q(ends_at__gte=F("starts_at"))),
            models.CheckConstraint(name="silence_has_a_reason", condition=~Q(reason="")),
            models.CheckConstraint(name="silence_matches", condition=~Q(matchers=[])),
        ]

    def __str__(self) -> str:
        return ", ".join(self.matchers)

    @property
    def state(self) -> str:
        now = timezone.now()
        if self.ends_at <= now:
            return "expired"
        return "active" if self.starts_at <= now else "pending"

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail stores."""
        return {
            "matchers": self.matchers,
            "starts_at": self.starts_at,
            "ends_at": self.ends_at,
            "reason": self.reason,
        }


class Thresholds(models.Model):
    """Values of a rule's thresholds that were set for all (no org) or for an org."""

    rule = models.CharField(max_length=40)
    org = models.ForeignKey(Org, null=True, on_delete=models.CASCADE, related_name="thresholds")
    values = models.JSONField(default=dict)
    enabled = models.BooleanField(default=True)
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")

    class Meta:
        ordering = ("rule", "org")
        constraints = [
            models.UniqueConstraint(name="thresholds_once", fields=["rule", "org"], nulls_distinct=False)
        ]

    def __str__(self) -> str:
        return f"{self.rule} for {self.org or 'all'}"

    def snapshot(self) -> dict[str, Any]:
        return {"values": self.values, "enabled": self.enabled}


class Evaluation(models.Model):
    """The last evaluation of a rule, and its problem if it failed."""

    rule = models.CharField(max_length=40, primary_key=True)
    at = models.DateTimeField()
    took_ms = models.FloatField()
    problem = models.CharField(max_length=TEXT_CHARACTERS_MAX, blank=True)

    def __str__(self) -> str:
        return self.rule


class Channel(WithMatchers):
    """Where notifications go, and for which alerts."""

    class Kind(models.TextChoices):
        WEBHOOK = "webhook", "webhook"
        EMAIL = "email", "e-mail"
        SLACK = "slack", "Slack or compatible"
        PAGERDUTY = "pagerduty", "PagerDuty"

    name = models.CharField(max_length=120, unique=True)
    kind = models.CharField(max_length=10, choices=Kind)
    address = SealedText(help_text="A URL or e-mail addresses. Encrypted at rest, never shown again.")
    secret = SealedText(blank=True, default="", help_text="A signing or routing key. Encrypted at rest.")
    shown = models.CharField(max_length=200, help_text="The part of the address that may be shown.")
    min_severity = models.CharField(max_length=8, default=Severity.TICKET.value)
    send_resolved = models.BooleanField(default=True)
    enabled = models.BooleanField(default=True)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(name="channel_severity", condition=_one_of("min_severity", Severity)),
        ]

    def __str__(self) -> str:
        return self.name

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail stores: no secrets."""
        return {
            "name": self.name,
            "kind": self.kind,
            "address": self.shown,
            "has_secret": bool(self.secret),
            "matchers": self.matchers,
            "min_severity": self.min_severity,
            "send_resolved": self.send_resolved,
            "enabled": self.enabled,
        }


class Notification(models.Model):
    """A notification of a channel, and its outcome. It is tried until the receiver accepts it.

    There is one per channel, episode and event; all tries carry the same key.
    """

    class State(models.TextChoices):
        WAITING = "waiting"
        SENT = "sent"
        GIVEN_UP = "given_up", "given up"

    class What(models.TextChoices):
        FIRING = "firing"
        RESOLVED = "resolved"
        TEST = "test"

    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="notifications")
    alert = models.ForeignKey(Alert, null=True, on_delete=models.CASCADE, related_name="notifications")
    episode = models.PositiveIntegerField(default=0)
    what = models.CharField(max_length=8, choices=What)
    state = models.CharField(max_length=8, choices=State, default=State.WAITING)
    tries = models.PositiveSmallIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now)
    next_try_at = models.DateTimeField(default=timezone.now)
    sent_at = models.DateTimeField(null=True)
    answer = models.CharField(max_length=TEXT_CHARACTERS_MAX, blank=True)
    # False: its episode had ended before the channel was to be notified of ends.
    wants_end = models.BooleanField(default=True, db_default=True)

    class Meta:
        ordering = ("-id",)
        constraints = [
            models.UniqueConstraint(name="told_once", fields=["channel", "alert", "episode", "what"]),
            models.CheckConstraint(
                name="sent_is_when", condition=Q(state="sent") ^ Q(sent_at__isnull=True)
            ),
        ]
        indexes = [
            models.Index(fields=["next_try_at"], name="told_next", condition=Q(state="waiting")),
            models.Index(fields=["channel", "-id"], name="told_by_channel"),
        ]

    def __str__(self) -> str:
        return f"{self.what} to {self.channel.name}: {self.state}"

    @property
    def dedup_key(self) -> str:
        """Of its own episode, whichever its alert has by now."""
        return self.alert.dedup_key_of(self.episode) if self.alert else f"tidegate-test-{self.pk}"


SILENCE_MAX: Final = timedelta(days=90)
