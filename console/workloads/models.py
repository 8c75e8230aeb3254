from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from django.core.serializers.json import DjangoJSONEncoder
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from console.accounts.names import ACTOR_NAME_MAX
from console.orgs.models import Org
from console.routing.models import ServedModel
from console.sessions.models import Session
from console.shell.sealed import SealedText
from console.workloads import spec
from console.workloads.leader.world import Cache, Goal, State
from console.workloads.spec import BOXES_MAX, MODEL_MAX, NAME_MAX, REPLICAS_MAX, WORKLOAD_NAME, Place
from telemetry.topics import of_workload
from workload_manager.weights.sources import BUCKET

NOTE_MAX: Final = 500
TOKENIZER_NAME_MAX: Final = 100
ENDPOINT_MAX: Final = 500
ENDPOINT: Final = r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?$"
REGION_MAX: Final = 40
REGION: Final = r"^[a-z0-9-]*$"  # a part of a host's name, which must lead nowhere else
SENTENCE_MAX: Final = 500
REASON_MAX: Final = 64
INSTANCE_NAME_MAX: Final = 63
HOST_MAX: Final = 253
UNIT_MAX: Final = 32
ORDINAL_MAX: Final = 100_000
SEEN_SECONDS: Final = 60  # older, it is written down that an instance was seen without other news


class Workload(models.Model):
    """A model that is served: what people want of it, and what the orchestrator has made of that.

    `revision` is what its instances are to be started with; `stable`, the last one whose rollout is
    complete. `version` counts people's changes; `generation` those that the orchestrator acts upon.
    """

    name = models.CharField(
        max_length=NAME_MAX,
        unique=True,
        validators=[
            RegexValidator(WORKLOAD_NAME, f"Lower-case letters, digits and dashes, at most {NAME_MAX}.")
        ],
    )
    org = models.ForeignKey(
        Org, null=True, blank=True, on_delete=models.PROTECT, related_name="workloads"
    )
    model = models.CharField(max_length=MODEL_MAX, help_text="What clients send as “model”.")
    boxes_per_replica = models.PositiveIntegerField(validators=[MaxValueValidator(BOXES_MAX)])
    replicas = models.PositiveIntegerField(
        validators=[MinValueValidator(1), MaxValueValidator(REPLICAS_MAX)]
    )
    settings = models.JSONField(encoder=DjangoJSONEncoder, help_text="See spec.Settings.")
    paused = models.BooleanField(default=False, help_text="No rollout proceeds.")
    deleting = models.BooleanField(default=False)
    restarts = models.PositiveIntegerField(default=0, help_text="How often people asked for one.")
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    generation = models.PositiveBigIntegerField(default=1)
    revision = models.ForeignKey(
        "Revision", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    session = models.OneToOneField(
        Session, null=True, blank=True, on_delete=models.SET_NULL, related_name="workload"
    )
    served = models.OneToOneField(
        ServedModel, null=True, blank=True, on_delete=models.SET_NULL, related_name="workload"
    )
    created_at = models.DateTimeField(default=timezone.now)
    # The orchestrator writes these.
    stable = models.ForeignKey(
        "Revision", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    observed_generation = models.PositiveBigIntegerField(default=0)
    cluster_generation = models.PositiveBigIntegerField(default=0)

    # Read with it by `services.visible_workloads`.
    conditions_read: list[dict[str, str]]
    rollout_read: dict[str, Any] | None  # the one that has not ended
    stable_number: int | None
    ready_count: int
    instance_count: int

    class Meta:
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(name="workload_name", condition=Q(name__regex=WORKLOAD_NAME)),
            models.CheckConstraint(
                name="workload_replicas", condition=Q(replicas__gte=1, replicas__lte=REPLICAS_MAX)
            ),
            models.CheckConstraint(name="workload_boxes", condition=Q(boxes_per_replica__lte=BOXES_MAX)),
            models.CheckConstraint(
                name="workload_observed", condition=Q(observed_generation__lte=F("generation"))
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def topic(self) -> str:
        return of_workload(self.name)

    @property
    def said(self) -> spec.Settings:
        return spec.read(spec.Settings, self.settings)

    @property
    def rollout(self) -> spec.RolloutSpec:
        return self.said.rollout

    @property
    def orgs_said(self) -> Literal["all"] | tuple[str, ...]:
        """Those that may use the model."""
        return self.said.orgs

    @property
    def boxes(self) -> int:
        return self.replicas * self.boxes_per_replica

    def spec(self) -> spec.WorkloadSpec:
        """The whole of it, as people wrote it."""
        if self.revision is None:
            raise ValueError(f"{self.name} has no revision")
        template, settings = self.revision.template_read(), self.said
        return spec.WorkloadSpec(
            name=self.name,
            model=self.model,
            org=self.org.slug if self.org else None,
            orgs=settings.orgs,
            replicas=self.replicas,
            boxes_per_replica=self.boxes_per_replica,
            session=settings.session,
            rollout=settings.rollout,
            **{one: getattr(template, one) for one in spec.OF_TEMPLATE},
        )

    def spec_shown(self) -> dict[str, Any]:
        """The same, for people: the outer one may be changed."""
        if self.revision is None:
            raise ValueError(f"{self.name} has no revision")
        return spec.shown_whole(
            self.name,
            self.model,
            self.org.slug if self.org else None,
            self.replicas,
            self.boxes_per_replica,
            msgspec.json.encode(self.settings),
            msgspec.json.encode(self.revision.template),
        )

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it: variables of engines by their names only."""
        found = self.spec_shown()
        if environment := found["engine"].get("environment"):
            found["engine"] = found["engine"] | {"environment": dict.fromkeys(environment, "set")}
        return {
            **found,
            "revision": self.revision.number if self.revision else None,
            "paused": self.paused,
            "restarts": self.restarts,
        }


class Tokenizer(models.Model):
    """An uploaded tokenizer, which belongs to an org, or to the platform for all. What is in it is
    stored by its hash, once for all of whom it belongs to."""

    sha256 = models.CharField(max_length=64)
    org = models.ForeignKey(Org, null=True, on_delete=models.CASCADE, related_name="tokenizers")
    name = models.CharField(max_length=TOKENIZER_NAME_MAX)
    size_bytes = models.PositiveBigIntegerField()
    author_id = models.BigIntegerField(null=True)
    author_name = models.CharField(max_length=ACTOR_NAME_MAX)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("-pk",)
        constraints = [
            models.UniqueConstraint(
                name="tokenizer_once", fields=["org", "sha256"], nulls_distinct=False
            ),
            models.CheckConstraint(
                name="tokenizer_sha256", condition=Q(sha256__regex=r"^[0-9a-f]{64}$")
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.sha256[:16]})"


class Bucket(models.Model):
    """A bucket that weights are read from, and credentials for it: of an org, for its workloads, or of
    the platform, for its own. `shared`: also for those of all orgs. Only managers and compile jobs are
    told the credentials; `author` is who set them last."""

    org = models.ForeignKey(Org, null=True, blank=True, on_delete=models.CASCADE, related_name="buckets")
    endpoint = models.CharField(
        max_length=ENDPOINT_MAX,
        blank=True,
        validators=[RegexValidator(ENDPOINT, "An address like https://s3.example.com.")],
        help_text="Empty: Amazon's.",
    )
    name = models.CharField(
        max_length=63, validators=[RegexValidator(rf"^{BUCKET}$", "A bucket's name, without s3://.")]
    )
    region = models.CharField(
        max_length=REGION_MAX,
        blank=True,
        validators=[RegexValidator(REGION, "Lower-case letters, digits and dashes.")],
    )
    shared = models.BooleanField(default=False)
    credentials = SealedText(help_text="JSON, sealed at rest.")
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    author_id = models.BigIntegerField(null=True, blank=True)
    author_name = models.CharField(max_length=ACTOR_NAME_MAX)
    created_at = models.DateTimeField(default=timezone.now)
    changed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("-pk",)
        constraints = [
            models.UniqueConstraint(
                name="bucket_once", fields=["org", "endpoint", "name"], nulls_distinct=False
            ),
            models.CheckConstraint(
                name="bucket_shared_by_platform", condition=Q(shared=False) | Q(org=None)
            ),
        ]

    def __str__(self) -> str:
        return str(self.place)

    @property
    def place(self) -> Place:
        return Place(self.endpoint, self.name)

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it: no credentials."""
        return {
            "name": self.name,
            "endpoint": self.endpoint,
            "org": self.org.slug if self.org else None,
            "region": self.region,
            "shared": self.shared,
        }


class Revision(models.Model):
    """What instances are started with, from some moment on. The database refuses to change it; only what
    its compile job found may be added, once (see the migration)."""

    workload = models.ForeignKey(Workload, on_delete=models.CASCADE, related_name="revisions")
    number = models.PositiveIntegerField()
    template = models.JSONField(encoder=DjangoJSONEncoder, help_text="See spec.Template.")
    digest = models.CharField(max_length=64)
    same_as = models.PositiveIntegerField(null=True)  # the number of the one that it restores
    author_id = models.BigIntegerField(null=True)
    author_name = models.CharField(max_length=ACTOR_NAME_MAX)
    note = models.CharField(max_length=NOTE_MAX, blank=True)
    made_at = models.DateTimeField(default=timezone.now)
    # The orchestrator writes these, when it is compiled.
    artifact = models.CharField(max_length=64, null=True)  # noqa: DJ001 - null until it is known
    layout = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    epoch = models.PositiveIntegerField(null=True)  # revisions of one epoch share their cache
    compiled_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-number",)
        constraints = [
            models.UniqueConstraint(name="revision_of_workload", fields=["workload", "number"]),
            models.CheckConstraint(name="revision_number", condition=Q(number__gte=1)),
            models.CheckConstraint(
                name="revision_same_as_earlier", condition=Q(same_as=None) | Q(same_as__lt=F("number"))
            ),
            models.CheckConstraint(name="revision_digest", condition=Q(digest__regex=r"^[0-9a-f]{64}$")),
        ]

    def __str__(self) -> str:
        return f"revision {self.number} of {self.workload.name}"

    def template_read(self) -> spec.Template:
        return spec.read(spec.Template, self.template)

    def template_shown(self) -> Mapping[str, Any]:
        """For people: don't change it."""
        return spec.shown_stored(spec.Template, msgspec.json.encode(self.template))


# As people read them.
GOALS: Final = [
    (one.value, "release its cache" if one is Goal.RELEASE_CACHE else one.value) for one in Goal
]
STATES: Final = [(one.value, one.value) for one in State]
CACHES: Final = [(one.value, one.value or "not known") for one in Cache]


class Instance(models.Model):
    """One manager and its engine, which serve a replica for a while. The orchestrator writes it; the row
    stays as history."""

    name = models.CharField(max_length=INSTANCE_NAME_MAX, unique=True)
    workload = models.ForeignKey(Workload, on_delete=models.CASCADE, related_name="instances")
    ordinal = models.PositiveIntegerField(validators=[MaxValueValidator(ORDINAL_MAX)])
    revision = models.ForeignKey(Revision, on_delete=models.CASCADE, related_name="instances")
    restart = models.PositiveIntegerField(default=0)  # of the workload's restarts, when it was made
    epoch = models.PositiveIntegerField(default=1)
    goal = models.CharField(max_length=16, choices=GOALS, default=Goal.RUN.value)
    goal_at = models.DateTimeField(default=timezone.now)
    spec = models.BinaryField(default=bytes, help_text="What its manager is told, as JSON.")
    secrets = SealedText(blank=True, default="", help_text="JSON, sealed at rest.")
    boxes = models.JSONField(default=list)
    created_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.CharField(max_length=SENTENCE_MAX, blank=True)
    failed = models.BooleanField(default=False, db_default=False, help_text="It ended by itself.")
    serving = models.BooleanField(default=False, help_text="Requests of its replica go to it.")
    # What the Cluster Server says of it.
    state = models.CharField(max_length=16, choices=STATES, default=State.PENDING.value)
    reason = models.CharField(max_length=REASON_MAX, blank=True)
    sentence = models.CharField(max_length=SENTENCE_MAX, blank=True)
    since = models.DateTimeField(default=timezone.now)
    ready_at = models.DateTimeField(null=True, blank=True)
    room_at = models.DateTimeField(null=True, blank=True)  # it has had a place to run since then
    acknowledged_goal = models.CharField(max_length=16, choices=GOALS, blank=True)
    cache = models.CharField(max_length=16, choices=CACHES, blank=True, default="")
    url = models.CharField(max_length=500, blank=True)
    progress_done = models.BigIntegerField(default=0)
    progress_total = models.BigIntegerField(default=0)
    progress_unit = models.CharField(max_length=UNIT_MAX, blank=True)
    progress_seconds = models.FloatField(default=0)
    engine_restarts = models.PositiveIntegerField(default=0)
    host = models.CharField(max_length=HOST_MAX, blank=True)
    running_requests = models.PositiveIntegerField(default=0)
    seen_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("ordinal", "pk")
        indexes = [models.Index(fields=["workload", "-id"], name="instance_of_workload")]
        constraints = [
            models.UniqueConstraint(
                name="instance_serving_once",
                fields=["workload", "ordinal"],
                condition=Q(serving=True),
            ),
            models.CheckConstraint(
                name="instance_ended_serves_nobody", condition=Q(ended_at=None) | Q(serving=False)
            ),
            models.CheckConstraint(name="instance_goal", condition=Q(goal__in=[*dict(GOALS)])),
            models.CheckConstraint(name="instance_state", condition=Q(state__in=[*dict(STATES)])),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def replica(self) -> str:
        return f"{self.workload.name}-{self.ordinal}"

    @property
    def driver(self) -> str:
        """Its driver, and job, which belong to the replica."""
        return f"{self.workload.name}-{self.epoch}-{self.ordinal}"

    @property
    def percent(self) -> int | None:
        """Of what it is doing, where there is something to count."""
        if not self.progress_total:
            return None
        return min(100, 100 * self.progress_done // self.progress_total)


class ConditionStatus(models.TextChoices):
    TRUE = "True", "yes"
    FALSE = "False", "no"
    UNKNOWN = "Unknown", "not known"


class Condition(models.Model):
    """One thing that is so, or not, about a workload. `Ready` follows from the others."""

    workload = models.ForeignKey(Workload, on_delete=models.CASCADE, related_name="conditions")
    type = models.CharField(max_length=32)
    status = models.CharField(max_length=8, choices=ConditionStatus)
    reason = models.CharField(max_length=REASON_MAX)
    message = models.CharField(max_length=SENTENCE_MAX, blank=True)
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("pk",)
        constraints = [
            models.UniqueConstraint(name="condition_once", fields=["workload", "type"]),
            models.CheckConstraint(
                name="condition_status", condition=Q(status__in=ConditionStatus.values)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.type} of {self.workload.name}: {self.status}"


class RolloutPhase(models.TextChoices):
    RUNNING = "running", "in progress"
    PAUSED = "paused", "paused"
    DONE = "done", "complete"
    FAILED = "failed", "failed"
    UNDONE = "undone", "rolled back"
    SUPERSEDED = "superseded", "superseded"


class Rollout(models.Model):
    """From one revision, or restart, to another. The orchestrator writes it; the row stays."""

    workload = models.ForeignKey(Workload, on_delete=models.CASCADE, related_name="rollouts")
    from_revision = models.ForeignKey(
        Revision, null=True, blank=True, on_delete=models.CASCADE, related_name="+"
    )
    to_revision = models.ForeignKey(Revision, on_delete=models.CASCADE, related_name="rollouts")
    restart = models.PositiveIntegerField(default=0)
    phase = models.CharField(max_length=16, choices=RolloutPhase, default=RolloutPhase.RUNNING)
    reason = models.CharField(max_length=REASON_MAX, blank=True)
    sentence = models.CharField(max_length=SENTENCE_MAX, blank=True)
    switched = models.PositiveIntegerField(default=0)  # replicas that are served by it
    total = models.PositiveIntegerField(default=0)
    traffic = models.JSONField(
        null=True,
        blank=True,
        help_text="How requests fared with both revisions, as it was judged last: see world.Traffic.",
    )
    started_at = models.DateTimeField(default=timezone.now)
    deadline_at = models.DateTimeField(null=True, blank=True)  # of instances that it starts at once
    resumed_at = models.DateTimeField(null=True, blank=True)  # last, after a pause
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-pk",)
        constraints = [
            models.UniqueConstraint(
                name="rollout_one_at_a_time", fields=["workload"], condition=Q(ended_at=None)
            ),
            models.CheckConstraint(
                name="rollout_ended",
                condition=Q(phase__in=["running", "paused"], ended_at=None)
                | Q(phase__in=["done", "failed", "undone", "superseded"], ended_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"rollout of {self.workload.name} to revision {self.to_revision.number}"

    @property
    def percent(self) -> int:
        return 100 * self.switched // self.total if self.total else 0
