from __future__ import annotations

import secrets

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from console.fleet.models import ProcessKind
from console.shell.sealed import SealedBytes

SECRET_BYTES = 32
Kind = ProcessKind


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class Change(models.Model):
    """A change of intent that processes have to hear of. Visible in the order of its numbers.

    So who has heard of one has heard of all before it.
    """

    at = models.DateTimeField(default=timezone.now)
    why = models.CharField(max_length=200)
    targets = models.JSONField(default=list)  # [kind, name], where a name of * is all of them
    topic = models.CharField(max_length=80, blank=True)  # whose viewers see who has heard of it
    applied_at = models.DateTimeField(null=True)  # by all of them

    class Meta:
        ordering = ("-id",)
        indexes = [models.Index(fields=["-id"], name="change_open", condition=Q(applied_at=None))]

    def __str__(self) -> str:
        return f"{self.pk}: {self.why}"

    def concerns(self, kind: str, name: str) -> bool:
        return [kind, name] in self.targets or [kind, "*"] in self.targets


class Target(models.Model):
    """An agent, a driver or a brain: what it should be by now, and what it said it is.

    The document itself is not kept: it is made from intent whenever it is told. `digest` says whether
    that is still what `generation` stands for.
    """

    kind = models.CharField(max_length=8, choices=Kind)
    name = models.CharField(max_length=63)
    secret = SealedBytes(default=new_secret)  # as which a driver is known to agents
    claims_key = SealedBytes(default=new_secret)  # what gateways sign claims for an engine with
    generation = models.PositiveBigIntegerField(default=0)
    digest = models.BinaryField(max_length=32, default=b"")
    compiled_at = models.DateTimeField(null=True)
    change = models.PositiveBigIntegerField(default=0)  # the last one that the generation takes in
    told_at = models.DateTimeField(null=True)
    observed_generation = models.PositiveBigIntegerField(default=0)
    observed_change = models.PositiveBigIntegerField(default=0)
    observed_at = models.DateTimeField(null=True)
    problem = models.CharField(max_length=500, blank=True)
    is_idle = models.BooleanField(
        default=False, db_default=False
    )  # it serves nobody, and is told before it does
    failures = models.PositiveIntegerField(default=0)  # in a row
    retry_at = models.DateTimeField(null=True)
    fault = models.CharField(max_length=16, blank=True)  # in what way its last answer was none
    bad_since = models.DateTimeField(null=True)  # since when its answers are none
    asked_until = models.DateTimeField(null=True)  # somebody is at it: one at a time asks a target

    class Meta:
        ordering = ("kind", "name")
        constraints = [
            models.UniqueConstraint(name="target_once", fields=["kind", "name"]),
            models.CheckConstraint(name="target_kind", condition=Q(kind__in=Kind.values)),
            models.CheckConstraint(
                name="target_change_in_order", condition=Q(observed_change__lte=F("change"))
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def is_up_to_date(self) -> bool:
        return self.generation > 0 and self.observed_generation == self.generation


class BadAnswers(models.Model):
    """How many answers of targets were none, by the way in which."""

    fault = models.CharField(max_length=16, primary_key=True)
    count = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.count} {self.fault}"
