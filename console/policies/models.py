from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from console.accounts.names import ACTOR_NAME_MAX
from console.control.models import Change
from console.orgs.models import Org
from console.shell.sealed import SealedBytes, SealedText
from kvss_agent.data_plane.constants import DATA_KEY_BYTES

SECRET_BYTES = 32
REASON_MAX = 500


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def new_data_key() -> bytes:
    return secrets.token_bytes(DATA_KEY_BYTES)


class PolicyVersion(models.Model):
    """What was wanted from some moment on: of an org, or without one, of the cluster.

    It is never changed, and the database refuses to (see the migration). `document` is the text that
    an undo restores byte for byte.
    """

    org = models.ForeignKey(Org, null=True, on_delete=models.CASCADE, related_name="policy_versions")
    number = models.PositiveIntegerField()
    document = models.TextField()
    author_id = models.BigIntegerField(null=True)
    author_name = models.CharField(max_length=ACTOR_NAME_MAX)
    reason = models.CharField(max_length=REASON_MAX)
    made_at = models.DateTimeField(default=timezone.now)
    same_as = models.PositiveIntegerField(null=True)  # the number of the version that it restores
    # As which drivers hear of it. Changes are forgotten after a while, versions are not.
    change = models.ForeignKey(
        Change, null=True, on_delete=models.DO_NOTHING, db_constraint=False, related_name="+"
    )

    class Meta:
        ordering = ("-number",)
        constraints = [
            models.UniqueConstraint(name="policy_version_of_org", fields=["org", "number"]),
            models.UniqueConstraint(
                name="policy_version_of_cluster", fields=["number"], condition=Q(org=None)
            ),
            models.CheckConstraint(name="policy_version_number", condition=Q(number__gt=0)),
            models.CheckConstraint(
                name="policy_version_same_as_earlier",
                condition=Q(same_as=None) | Q(same_as__lt=F("number")),
            ),
            models.CheckConstraint(name="policy_version_reason", condition=~Q(reason="")),
        ]

    def __str__(self) -> str:
        return f"version {self.number} of {self.org.slug if self.org else 'the cluster'}"


class PolicyInForce(models.Model):
    """Which version holds now. Whose row is absent has never said anything, and has version 0."""

    org = models.OneToOneField(Org, null=True, on_delete=models.CASCADE, related_name="policy_in_force")
    version = models.OneToOneField(PolicyVersion, on_delete=models.CASCADE, related_name="+")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                models.Value(1), name="policy_in_force_of_cluster", condition=Q(org=None)
            ),
        ]

    def __str__(self) -> str:
        return str(self.version)


class OrgKeys(models.Model):
    """What an org's columns are named and encrypted with. Without its data key, files are noise."""

    org = models.OneToOneField(Org, on_delete=models.CASCADE, related_name="cache_keys")
    secret = SealedBytes(default=new_secret)
    data_key = SealedBytes(default=new_data_key)
    epoch = models.PositiveIntegerField(default=1)  # counts purges, see `epochs`
    model_secrets = SealedText(default="{}")  # in place of `secret`, by model: base64 in JSON
    retired = models.JSONField(default=list)  # tags of earlier epochs, with a namespace or null
    made_at = models.DateTimeField(default=timezone.now)
    data_key_at = models.DateTimeField(null=True)  # when a purge made this data key; null: none has

    class Meta:
        verbose_name_plural = "org keys"

    def __str__(self) -> str:
        return f"keys of {self.org.slug}"

    @property
    def data_key_since(self) -> datetime:
        """From when on somebody may have been told it."""
        return self.data_key_at or self.made_at


class Caller(models.Model):
    """An engine, or a gateway before it, that may ask drivers in the name of an org. Of its token only
    the hash is kept, which is all that drivers are told."""

    token: str  # its text, only of one that was just made
    org = models.ForeignKey(Org, on_delete=models.CASCADE, related_name="callers")
    name = models.CharField(max_length=120)
    public_id = models.CharField(max_length=12, unique=True)
    token_sha256 = models.CharField(max_length=64, unique=True)
    created_by = models.CharField(max_length=ACTOR_NAME_MAX)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("name", "id")
        constraints = [models.UniqueConstraint(name="caller_once", fields=["org", "name"])]

    def __str__(self) -> str:
        return f"{self.name} of {self.org.slug}"

    @property
    def prefix(self) -> str:
        """The part of its token that may be shown."""
        return f"tgc_{self.public_id}"

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name, "prefix": self.prefix}


class ScheduledPolicy(models.Model):
    """A policy that takes over at a moment, and for how long. Conditional updates take it from state to
    state, so that any number of clocks start it once."""

    class State(models.TextChoices):
        WAITING = "waiting"
        IN_FORCE = "in force"  # until `ends_at`
        DONE = "done"
        CANCELLED = "cancelled"
        OVERTAKEN = "overtaken"  # somebody saved another policy meanwhile, which stays
        REFUSED = "refused"  # by limits that were set meanwhile

    org = models.ForeignKey(Org, on_delete=models.CASCADE, related_name="scheduled_policies")
    document = models.TextField()
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField(null=True)
    reason = models.CharField(max_length=REASON_MAX)
    author_id = models.BigIntegerField(null=True)
    author_name = models.CharField(max_length=ACTOR_NAME_MAX)
    made_at = models.DateTimeField(default=timezone.now)
    state = models.CharField(max_length=12, choices=State, default=State.WAITING)
    note = models.CharField(max_length=500, blank=True)  # why it is as it is
    number = models.PositiveIntegerField(null=True)  # of the version that it made,
    back_to = models.PositiveIntegerField(null=True)  # and of the one before

    class Meta:
        ordering = ("starts_at", "id")
        constraints = [
            models.CheckConstraint(
                name="scheduled_ends_after_it_starts",
                condition=Q(ends_at=None) | Q(ends_at__gt=F("starts_at")),
            ),
            models.CheckConstraint(name="scheduled_reason", condition=~Q(reason="")),
        ]
        indexes = [
            models.Index(
                fields=["starts_at"],
                name="scheduled_open",
                condition=Q(state__in=["waiting", "in force"]),
            )
        ]

    def __str__(self) -> str:
        return f"policy of {self.org.slug} from {self.starts_at:%Y-%m-%d %H:%M}"


class PurgeReceipt(models.Model):
    """What a purge has removed, by driver and agent; or, with a driver, what was removed there when the
    org was taken off it. It outlives the org, and is never changed."""

    org_slug = models.CharField(max_length=48)
    model = models.CharField(max_length=200, blank=True)  # nothing: all of them
    driver = models.CharField(max_length=63, blank=True)  # that may not serve the org any more
    operation_id = models.UUIDField(unique=True)
    asked_by = models.CharField(max_length=ACTOR_NAME_MAX)
    reason = models.CharField(max_length=REASON_MAX)
    asked_at = models.DateTimeField()
    at = models.DateTimeField(default=timezone.now)
    data_key_destroyed_at = models.DateTimeField(null=True)  # that files of before were encrypted with
    columns = models.BigIntegerField()
    bytes = models.BigIntegerField()
    files = models.BigIntegerField()
    file_bytes = models.BigIntegerField()
    epoch = models.PositiveIntegerField(null=True)  # which it began; null: before there were any
    places = models.JSONField(default=dict)  # by driver and node: what each has confirmed

    class Meta:
        ordering = ("-at",)
        indexes = [models.Index(fields=["org_slug", "-at"], name="purge_receipt_of_org")]

    def __str__(self) -> str:
        return f"purge of {self.org_slug}, {self.at:%Y-%m-%d %H:%M}"

    @property
    def key_may_exist(self) -> bool:
        """Whether a driver that nobody can ask may still have the data key that it was to destroy."""
        ended = {one["kind"] for one in self.places.get("removed", ())}
        return not self.model and not self.driver and "driver" in ended

    def statement(self) -> dict[str, Any]:
        """In plain values, as it is signed."""
        destroyed = self.data_key_destroyed_at
        return {
            "org": self.org_slug,
            "model": self.model or None,
            **({"driver": self.driver} if self.driver else {}),
            "operation": str(self.operation_id),
            "asked_by": self.asked_by,
            "asked_at": self.asked_at.isoformat(),
            "done_at": self.at.isoformat(),
            "data_key_destroyed_at": destroyed.isoformat() if destroyed else None,
            "epoch": self.epoch,
            "reason": self.reason,
            "columns": self.columns,
            "bytes": self.bytes,
            "tier2_files": self.files,
            "tier2_bytes": self.file_bytes,
            "places": self.places,
        }


class PurgeConfirmation(models.Model):
    """What a driver or an agent has signed of a purge, as it was sent, so that anyone can verify it
    again. It names shards of others, so it is for whoever has a role on the platform."""

    operation_id = models.UUIDField()
    identity = models.CharField(max_length=80)  # node:ax-1, driver:job7
    payload = models.BinaryField()
    signature = models.BinaryField()
    public_key = models.TextField()
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("identity",)
        constraints = [
            models.UniqueConstraint(name="purge_confirmed_once", fields=["operation_id", "identity"]),
        ]

    def __str__(self) -> str:
        return f"{self.identity}, {self.at:%Y-%m-%d %H:%M}"
