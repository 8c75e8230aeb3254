from __future__ import annotations

import secrets
import time
import uuid

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models import Q
from django.utils import timezone

from console.accounts.names import ACTOR_NAME_MAX
from console.accounts.roles import Role, choices
from console.operations.core import ENDED, MOVING, State

PART = "#"  # in a target, session:chat#ax-7: parts are worked on beside the whole
STATES = [(state.value, state.value) for state in State]


def new_id() -> uuid.UUID:
    """A UUID of version 7: by time, and so in the order of lists and of the index."""
    milliseconds = time.time_ns() // 1_000_000
    number = (milliseconds << 80) | (7 << 76) | (secrets.randbits(12) << 64) | (2 << 62)
    return uuid.UUID(int=number | secrets.randbits(62))


class Operation(models.Model):
    """Work that takes longer than a request: where it is, where it goes, and how it would go back.

    What it does to the world stands in the machine of its kind. `plan` is what is to become, `before`
    how to return: both are written down before the first step. `notes` is what steps tell later ones.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    kind = models.CharField(max_length=48)
    target = models.CharField(max_length=120, help_text="What it works on, as its topic: session:chat.")
    org_id = models.BigIntegerField(null=True, help_text="Whose it is; without one, the platform's.")
    role = models.PositiveSmallIntegerField(
        choices=choices(tuple(Role)), help_text="What it takes to cancel it."
    )
    sentence = models.CharField(max_length=300)
    state = models.CharField(max_length=12, choices=STATES, default=State.RUNNING)
    done = models.BooleanField(default=False)

    step = models.PositiveSmallIntegerField(default=0, help_text="To be done next, or taken back next.")
    total = models.PositiveSmallIntegerField()
    percent = models.PositiveSmallIntegerField(default=0)
    message = models.CharField(max_length=300, blank=True)
    attempts = models.PositiveSmallIntegerField(default=0, help_text="Of this step, without an outcome.")
    step_since = models.DateTimeField(default=timezone.now)
    wake_at = models.DateTimeField(default=timezone.now, help_text="When to look at it again.")
    awaits = models.JSONField(default=list, help_text="Topics whose news wake it before that.")
    cancel_requested = models.BooleanField(default=False)

    plan = models.JSONField(encoder=DjangoJSONEncoder, default=dict)
    before = models.JSONField(encoder=DjangoJSONEncoder, default=dict)
    notes = models.JSONField(encoder=DjangoJSONEncoder, default=dict)
    response = models.JSONField(encoder=DjangoJSONEncoder, null=True)
    error = models.JSONField(null=True)

    actor_id = models.BigIntegerField(null=True)
    actor_name = models.CharField(max_length=ACTOR_NAME_MAX)
    request_id = models.CharField(max_length=64, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    updated_at = models.DateTimeField(default=timezone.now)
    done_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-id",)
        constraints = [
            models.UniqueConstraint(
                name="one_operation_per_target", fields=["target"], condition=Q(done=False)
            ),
            models.CheckConstraint(
                name="operation_done_is_ended",
                condition=Q(done=True, state__in=ENDED, done_at__isnull=False)
                | Q(done=False, state__in=[*MOVING, State.STUCK], done_at__isnull=True),
            ),
            models.CheckConstraint(
                name="operation_error_or_response",
                condition=Q(state=State.SUCCEEDED, response__isnull=False, error__isnull=True)
                | Q(
                    state__in=[State.FAILED, State.CANCELLED], response__isnull=True, error__isnull=False
                )
                | Q(done=False, response__isnull=True),
            ),
        ]
        indexes = [
            models.Index(fields=["target", "-id"], name="operation_of_target"),
            models.Index(fields=["wake_at"], condition=Q(done=False), name="operation_to_wake"),
        ]

    def __str__(self) -> str:
        return self.sentence

    @property
    def topic(self) -> str:
        """Of what it works on."""
        return self.target.partition(PART)[0]
