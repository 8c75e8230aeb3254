from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from console.accounts.models import User
from console.accounts.names import ACTOR_NAME_MAX
from console.alerts.catalogue import BY_SLUG
from console.alerts.life import OPEN, Life, State
from console.alerts.matching import Matcher, parse
from console.alerts.rules import Rule, Severity, name_of
from console.orgs.models import Org
from console.shell.sealed import SealedText

SENTENCE_CHARACTERS_MAX: Final = 300


def _one_of(field: str, values: Any) -> Q:
    return Q(**{f"{field}__in": [str(value) for value in values]})


class Alert(models.Model):
    """One instance of a rule: one node, org, shard or stream, for as long as it is known.

    An episode goes from a breach to its end; the next one counts further. `observed_at` is of which
    moment all this is known: a flip happens by an UPDATE that names the one it was decided from.
    """

    rule = models.CharField(max_length=40)
    topic = models.CharField(max_length=240)
    labels = models.JSONField(default=dict)
    fingerprint = models.CharField(max_length=64, unique=True)
    org = models.ForeignKey(Org, null=True, on_delete=models.CASCADE, related_name="alerts")
    severity = models.CharField(max_length=8)
    state = models.CharField(max_length=8)
    episode = models.PositiveIntegerField(default=1)
    flips_made = models.PositiveIntegerField(default=0)
    begun_at = models.DateTimeField()
    state_since = models.DateTimeField()
    fired_at = models.DateTimeField(null=True)
    fine_since = models.DateTimeField(null=True)
    observed_at = models.DateTimeField()
    value = models.FloatField(null=True)
    threshold = models.FloatField(null=True)
    sentence = models.CharField(max_length=SENTENCE_CHARACTERS_MAX)
    evidence = models.JSONField(default=dict, encoder=DjangoJSONEncoder)
    # Of the alert that explains it, while that fires.
    hidden_by = models.ForeignKey("self", null=True, on_delete=models.SET_NULL, related_name="hides")
    # Facts of this episode, apart from its state.
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
    def life(self) -> Life:
        return Life(State(self.state), self.begun_at, self.fired_at, self.fine_since)

    @property
    def definition(self) -> Rule | None:
        """None for an alert of a rule that was taken out since."""
        return BY_SLUG.get(self.rule)

    @property
    def title(self) -> str:
        return self.definition.title if self.definition else self.rule

    @property
    def subject(self) -> str:
        """What it is about, short: `ax-7`, or `ax-7, shard job7.full.2`."""
        apart = [f"{name} {text}" for name, text in sorted(self.labels.items())]
        return ", ".join([name_of(self.topic), *apart])

    @property
    def all_labels(self) -> dict[str, str]:
        """What matchers are held against."""
        kind, _, name = self.topic.partition(":")
        own = {str(label): str(text) for label, text in self.labels.items()}
        about = {"rule": self.rule, "severity": self.severity, "topic": self.topic}
        return {**own, **about, **({kind: name} if name else {})}

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def dedup_key(self) -> str:
        """The same for all that is ever said of this episode."""
        return f"tidegate-{self.fingerprint[:16]}-{self.episode}"


class Flip(models.Model):
    """A change of state, in the order of its number. Each number is there once."""

    alert = models.ForeignKey(Alert, on_delete=models.CASCADE, related_name="flips")
    number = models.PositiveIntegerField()
    episode = models.PositiveIntegerField()
    at = models.DateTimeField()
    before = models.CharField(max_length=8)
    after = models.CharField(max_length=8)
    sentence = models.CharField(max_length=SENTENCE_CHARACTERS_MAX)

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
    """Something that chooses alerts, of one org or of all."""

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
    """For a time nobody is told of the alerts that it matches. They are evaluated and shown as ever."""

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
            return "over"
        return "active" if self.starts_at <= now else "to come"

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it."""
        return {
            "matchers": self.matchers,
            "starts_at": self.starts_at,
            "ends_at": self.ends_at,
            "reason": self.reason,
        }


class Thresholds(models.Model):
    """What people have set of a rule's limits, for all (no org) or for an org. All else is as it was."""

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
    """When a rule was last evaluated, and what stopped it. Its age tells of evaluators that are dead."""

    rule = models.CharField(max_length=40, primary_key=True)
    at = models.DateTimeField()
    took_ms = models.FloatField()
    problem = models.CharField(max_length=SENTENCE_CHARACTERS_MAX, blank=True)

    def __str__(self) -> str:
        return self.rule


class Channel(WithMatchers):
    """Where people are told: what of, and how it is reached."""

    class Kind(models.TextChoices):
        WEBHOOK = "webhook", "webhook"
        EMAIL = "email", "e-mail"
        SLACK = "slack", "Slack, or what takes its messages"
        PAGERDUTY = "pagerduty", "PagerDuty"

    name = models.CharField(max_length=120, unique=True)
    kind = models.CharField(max_length=10, choices=Kind)
    address = SealedText(help_text="A URL, or e-mail addresses. Sealed at rest, and never shown again.")
    secret = SealedText(blank=True, default="", help_text="A signing or routing key. Sealed at rest.")
    shown = models.CharField(max_length=200, help_text="What of the address may be shown.")
    least_severity = models.CharField(max_length=8, default=Severity.TICKET.value)
    tells_end = models.BooleanField(default=True)
    enabled = models.BooleanField(default=True)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(
                name="channel_severity", condition=_one_of("least_severity", Severity)
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it: nothing that opens anything."""
        return {
            "name": self.name,
            "kind": self.kind,
            "address": self.shown,
            "has_secret": bool(self.secret),
            "matchers": self.matchers,
            "least_severity": self.least_severity,
            "tells_end": self.tells_end,
            "enabled": self.enabled,
        }


class Notification(models.Model):
    """Something that a channel is to be told, and what came of it. It is tried until it is answered.

    Of an episode each channel is told each thing once; the tries of it all carry the same key.
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
    answer = models.CharField(max_length=SENTENCE_CHARACTERS_MAX, blank=True)

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
        return self.alert.dedup_key if self.alert else f"tidegate-test-{self.pk}"


SILENCE_MAX: Final = timedelta(days=90)
