from __future__ import annotations

from dataclasses import fields
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact
from django.utils import timezone

from console.fleet.models import Box, Driver, Node
from console.operations.models import Operation
from console.orgs.models import SLUG, Org
from console.placement.rules import Borrow, Cause, Path, Redundancy, Rules
from console.placement.topology import Tier
from console.sessions.plans.losses import Verdict

PATHS = [(path.value, path.label) for path in Path]
BORROWS = [(borrow.value, borrow.label) for borrow in Borrow]
REDUNDANCIES = [(one.value, one.label) for one in Redundancy]
CODES = [(one.value, one.value) for one in Redundancy if one is not Redundancy.NONE]
OF_RULES = tuple(one.name for one in fields(Rules))
QUOTAS = ("boxes_quota", "replicas_quota")  # of an org; a platform admin sets them
TIERS = [(tier.value, tier.name.lower()) for tier in Tier]
VERDICTS = [(verdict.value, verdict.value) for verdict in Verdict]
named = RegexValidator(SLUG, "Lower-case letters, digits and dashes, at most 48.")
WAIT_SECONDS_MAX = 7 * 24 * 3600
BOXES_MAX = 100_000
REPLACE_LOST_AFTER_SECONDS = 20
MOVES_PERCENT = 25
REPLACE_LOST_AFTER_SECONDS_MAX = 24 * 3600


class RuleSet(models.Model):
    """What sessions may be: of the cluster, where there is no org, or of an org, which is stricter."""

    org = models.OneToOneField(
        Org, null=True, blank=True, on_delete=models.CASCADE, related_name="session_rules"
    )
    path = models.CharField(max_length=16, choices=PATHS, default=Path.PREFER_RAIL.value)
    refuse_spine = models.BooleanField(default=False)
    wait_for_rail_seconds = models.PositiveIntegerField(
        default=0, validators=[MaxValueValidator(WAIT_SECONDS_MAX)]
    )
    boxes_min = models.PositiveIntegerField(default=1, validators=[MinValueValidator(1)])
    boxes_increment = models.PositiveIntegerField(default=1, validators=[MinValueValidator(1)])
    boxes_max = models.PositiveIntegerField(null=True, blank=True)
    moves_percent = models.PositiveSmallIntegerField(
        default=MOVES_PERCENT,
        db_default=MOVES_PERCENT,
        validators=[MinValueValidator(1), MaxValueValidator(100)],
        help_text="Of a link, for the bytes of streams that move over it.",
    )
    borrow = models.CharField(
        max_length=8,
        choices=BORROWS,
        default=Borrow.LEAF.value,
        db_default=Borrow.LEAF.value,
        help_text="How far drivers may copy columns from the memory of siblings.",
    )
    redundancy = models.CharField(
        max_length=8,
        choices=REDUNDANCIES,
        default=Redundancy.NONE.value,
        db_default=Redundancy.NONE.value,
        help_text="Of columns in tier 2: fragments with data, and with parity.",
    )
    grant_percent = models.PositiveSmallIntegerField(
        default=100, validators=[MinValueValidator(1), MaxValueValidator(100)]
    )
    boxes_quota = models.PositiveIntegerField(null=True, blank=True)
    replicas_quota = models.PositiveIntegerField(
        null=True, blank=True, help_text="For all workloads of an org, those without boxes included."
    )
    replace_lost = models.BooleanField(default=True)
    replace_lost_after_seconds = models.PositiveIntegerField(
        default=REPLACE_LOST_AFTER_SECONDS,
        validators=[MaxValueValidator(REPLACE_LOST_AFTER_SECONDS_MAX)],
    )
    version = models.PositiveIntegerField(default=1)

    class Meta:
        constraints = [
            models.UniqueConstraint(Coalesce("org", Value(0)), name="rules_once_also_of_the_cluster"),
            models.CheckConstraint(
                name="rules_boxes",
                condition=Q(boxes_min__gte=1, boxes_increment__gte=1)
                & (Q(boxes_max=None) | Q(boxes_max__gte=F("boxes_min"))),
            ),
            models.CheckConstraint(
                name="rules_grant", condition=Q(grant_percent__gte=1, grant_percent__lte=100)
            ),
            models.CheckConstraint(
                name="rules_moves", condition=Q(moves_percent__gte=1, moves_percent__lte=100)
            ),
            *(
                models.CheckConstraint(
                    name=f"rules_{name}", condition=Q((f"{name}__in", [*dict(known)]))
                )
                for name, known in (("path", PATHS), ("borrow", BORROWS), ("redundancy", REDUNDANCIES))
            ),
            models.CheckConstraint(
                name="rules_quota_is_of_an_org",
                condition=Q(boxes_quota=None, replicas_quota=None) | Q(org__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"Rules of {self.org.slug if self.org else 'the cluster'}"

    def rules(self) -> Rules:
        """Raises Misconfigured where they contradict themselves."""
        values = {name: getattr(self, name) for name in OF_RULES}
        return Rules(
            **values
            | {
                "path": Path(self.path),
                "borrow": Borrow(self.borrow),
                "redundancy": Redundancy(self.redundancy),
            }
        )

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it."""
        return {name: getattr(self, name) for name in (*OF_RULES, *QUOTAS)}


class Session(models.Model):
    """Boxes that jobs share. Three sizes: desired, which people ask for; granted, the boxes that it has;
    actual, those of them that can be used. Quotas and rules go by the largest.

    It holds the limits of size that it was last held against, so that the database itself refuses a size
    that they forbid; rules can't be made stricter than the sessions that there are.
    """

    name = models.CharField(max_length=48, unique=True, validators=[named])
    org = models.ForeignKey(
        Org, null=True, blank=True, on_delete=models.PROTECT, related_name="kvss_sessions"
    )
    path = models.CharField(max_length=16, choices=PATHS, blank=True)  # stricter than the rules, or none
    boxes_desired = models.PositiveIntegerField()
    boxes_min = models.PositiveIntegerField()
    boxes_increment = models.PositiveIntegerField()
    boxes_max = models.PositiveIntegerField(null=True, blank=True)
    bytes_per_token = models.PositiveIntegerField(
        default=64 << 10,
        validators=[MinValueValidator(1)],
        help_text="Of a job over all its boxes, where none is registered yet: plans go by it.",
    )
    deleting = models.BooleanField(default=False)
    cause = models.CharField(max_length=32, blank=True)
    cause_sentence = models.CharField(max_length=500, blank=True)
    waiting_since = models.DateTimeField(null=True, blank=True)
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(name="session_name", condition=Q(name__regex=SLUG)),
            models.CheckConstraint(
                name="session_not_below_its_minimum",
                condition=Q(boxes_min__gte=1, boxes_increment__gte=1, boxes_desired__gte=F("boxes_min")),
            ),
            models.CheckConstraint(
                name="session_on_its_increment",
                condition=Exact(F("boxes_desired") % F("boxes_increment"), 0),
            ),
            models.CheckConstraint(
                name="session_not_above_its_maximum",
                condition=Q(boxes_max=None) | Q(boxes_desired__lte=F("boxes_max")),
            ),
            models.CheckConstraint(
                name="session_path", condition=Q(path__in=["", *(value for value, _ in PATHS)])
            ),
            models.CheckConstraint(
                name="session_waits_for_a_cause",
                condition=Q(cause="", waiting_since=None)
                | ~Q(cause="") & Q(waiting_since__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it."""
        return {
            "name": self.name,
            "org": self.org.slug if self.org else None,
            "boxes": self.boxes_desired,
            "path": self.path,
            "bytes_per_token": self.bytes_per_token,
        }

    @property
    def lacks_nodes(self) -> bool:
        """Whether streams of it are on nodes that are lost, and not placed on others yet."""
        return any(loss.verdict != Verdict.REPLACED.value for loss in self.losses.all())

    @property
    def is_never(self) -> bool:
        """Whether waiting can't help."""
        return bool(self.cause) and Cause(self.cause).is_never


class SessionBox(models.Model):
    """A box that a session has been granted. A box belongs to one session at most."""

    session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="boxes")
    box = models.OneToOneField(Box, on_delete=models.PROTECT, related_name="session_box")
    ready = models.BooleanField(default=False)  # its streams are where they should be
    leaving = models.BooleanField(default=False)  # a shrink has chosen it

    class Meta:
        ordering = ("box__name",)

    def __str__(self) -> str:
        return f"{self.box.name} of {self.session.name}"


class Job(models.Model):
    """One replica of one model on some boxes of a session. It has one driver."""

    session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="jobs")
    name = models.CharField(max_length=48, validators=[named])
    driver = models.OneToOneField(Driver, on_delete=models.PROTECT, related_name="job")
    running = models.BooleanField(default=False)  # its driver has been told its homes
    # It was started on boxes by name, and has the memory of just those, whoever else there is.
    keeps_to_boxes = models.BooleanField(default=False)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("name",)
        constraints = [
            models.UniqueConstraint(name="job_once", fields=["session", "name"]),
            models.CheckConstraint(name="job_name", condition=Q(name__regex=SLUG)),
        ]

    def __str__(self) -> str:
        return f"{self.session.name}/{self.name}"


class DriverOrg(models.Model):
    """An org that a driver may serve, and whose keys it is told; without an org: all orgs.

    `is_leaving`: it is not told any more. The row stays until the driver has confirmed that it has
    removed what it stored of the org, so that purges ask it.
    """

    driver = models.ForeignKey(Driver, on_delete=models.CASCADE, related_name="orgs")
    org = models.ForeignKey(Org, null=True, on_delete=models.CASCADE, related_name="drivers")
    is_leaving = models.BooleanField(default=False)
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint("driver", Coalesce("org", Value(0)), name="driver_org_once"),
            models.CheckConstraint(
                name="driver_org_that_leaves_is_one",
                condition=Q(is_leaving=False) | Q(org__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.org.slug if self.org else 'all orgs'} on {self.driver.name}"


class FormerHome(models.Model):
    """A node that a stream of a driver has left. The node lets the driver in until it has said that
    nothing of it is left there."""

    driver = models.ForeignKey(Driver, on_delete=models.CASCADE, related_name="former_homes")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="former_homes")
    # Where its driver waits for the node's agent, which is at another one; else empty.
    address = models.CharField(max_length=500, blank=True, default="", db_default="")

    class Meta:
        constraints = [models.UniqueConstraint(name="former_home_once", fields=["driver", "node"])]

    def __str__(self) -> str:
        return f"{self.driver.name} was on {self.node.name}"


class FragmentHolder(models.Model):
    """A node whose agent stores one fragment of each redundant column of a shard, see `holders`.
    Replicas of one model with the same code have the same ones, as they have the same columns in tier 2.

    The row goes with the node; the next look assigns another one.
    """

    namespace = models.CharField(max_length=32)  # of the model, in hex
    group = models.CharField(max_length=200)
    index = models.PositiveSmallIntegerField()
    place = models.PositiveSmallIntegerField()  # the number of the fragment: those with data come first
    code = models.CharField(max_length=8, choices=CODES)  # how many fragments there are
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="fragments")
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("namespace", "group", "index", "code", "place")
        constraints = [
            models.UniqueConstraint(
                name="fragment_once", fields=["namespace", "group", "index", "code", "place"]
            ),
            models.UniqueConstraint(
                name="fragments_on_different_nodes",
                fields=["namespace", "group", "index", "code", "node"],
            ),
            models.CheckConstraint(
                name="fragment_code", condition=Q(code__in=[value for value, _ in CODES])
            ),
        ]

    def __str__(self) -> str:
        return f"fragment {self.place} of {self.group}.{self.index} on {self.node.name}"


class JobBox(models.Model):
    """A box that a job runs on, which so can't leave the session."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="boxes")
    session_box = models.ForeignKey(SessionBox, on_delete=models.PROTECT, related_name="jobs")

    class Meta:
        constraints = [models.UniqueConstraint(name="job_box_once", fields=["job", "session_box"])]

    def __str__(self) -> str:
        return f"{self.job} on {self.session_box.box.name}"


class Phase(models.TextChoices):
    """How far a stream is on its way to another node or size."""

    SETTLED = "", "settled"  # documents say what it is; `next` is only reserved
    MAKING = "making", "being made"  # its next node is told to have it; the driver uses the old one
    # The driver is told to go on at the next node, and takes the bytes along.
    MOVING = "moving", "moving"
    SIZING = "sizing", "changing its size"  # in place


class Stream(models.Model):
    """What a (job, group, box, domain) stores on a node, and over which path. Agents call it a shard.

    With `next_node` it is to become something else: another size in the same place, or another place.
    The memory of both is taken until that is done, and `operation` is who does it.
    """

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="streams")
    group = models.CharField(max_length=200)
    index = models.PositiveSmallIntegerField()
    box = models.ForeignKey(Box, on_delete=models.PROTECT, related_name="streams")
    domain = models.PositiveSmallIntegerField()
    wio = models.PositiveSmallIntegerField()
    slot_bytes = models.PositiveIntegerField()

    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="streams")
    slots = models.BigIntegerField()
    count_from = models.BigIntegerField(default=0)  # where the node counts evicts from, if it makes it
    tier = models.PositiveSmallIntegerField(choices=TIERS)
    port_leaf = models.CharField(max_length=63)
    nic_leaf = models.CharField(max_length=63)
    why = models.CharField(max_length=500, blank=True)  # not on a better path

    next_node = models.ForeignKey(
        Node, null=True, on_delete=models.PROTECT, related_name="coming_streams"
    )
    next_slots = models.BigIntegerField(null=True)
    next_count_from = models.BigIntegerField(default=0)
    next_tier = models.PositiveSmallIntegerField(choices=TIERS, null=True)
    next_port_leaf = models.CharField(max_length=63, blank=True)
    next_nic_leaf = models.CharField(max_length=63, blank=True)
    next_why = models.CharField(max_length=500, blank=True)
    phase = models.CharField(max_length=8, choices=Phase, blank=True, default=Phase.SETTLED)
    operation = models.ForeignKey(Operation, null=True, on_delete=models.PROTECT, related_name="streams")
    # By which its redundant columns are divided, see `holders`; empty: none are redundant.
    code = models.CharField(max_length=8, choices=CODES, blank=True, default="", db_default="")

    class Meta:
        ordering = ("job", "group", "index")
        constraints = [
            models.UniqueConstraint(name="stream_once", fields=["job", "group", "index"]),
            models.CheckConstraint(
                name="stream_next_is_whole",
                condition=Q(next_node=None, next_slots=None, next_tier=None, operation=None, phase="")
                | Q(
                    next_node__isnull=False,
                    next_slots__isnull=False,
                    next_tier__isnull=False,
                    operation__isnull=False,
                ),
            ),
            models.CheckConstraint(
                name="stream_sizing_is_in_place",
                condition=~Q(phase=Phase.SIZING) | Q(next_node=F("node")),
            ),
            models.CheckConstraint(
                name="stream_moving_is_elsewhere",
                condition=~Q(phase__in=[Phase.MAKING, Phase.MOVING]) | ~Q(next_node=F("node")),
            ),
            models.CheckConstraint(name="stream_slots", condition=Q(slots__gte=0, slot_bytes__gt=0)),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """What agents call its shard. A driver has one job, so the name is unique."""
        return f"{self.job.driver.name}.{self.group}.{self.index}"

    @property
    def memory_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def path(self) -> str:
        return Tier(self.tier).name.lower()


class StreamRedundancy(models.Model):
    """What its agent has said last of the redundancy of a stream."""

    stream = models.OneToOneField(Stream, on_delete=models.CASCADE, related_name="redundancy")
    state = models.CharField(max_length=16)
    reason = models.CharField(max_length=500, blank=True)
    columns = models.BigIntegerField()
    incomplete = models.BigIntegerField()  # of them lack a fragment
    repaired = models.BigIntegerField()
    unreachable = models.JSONField(default=list)  # addresses of holders
    incomplete_at = models.JSONField(default=list, db_default=[])  # columns, by place of the holder
    most_lacking = models.BigIntegerField(default=0, db_default=0)  # fragments, of one column
    # When the newest of the holders came that this is about; None if the agent does not know.
    holders_since = models.DateTimeField(null=True)
    has_stored = models.BooleanField(default=False, db_default=False)  # once, at least
    seen_at = models.DateTimeField()

    class Meta:
        verbose_name_plural = "stream redundancies"

    def __str__(self) -> str:
        return f"redundancy of {self.stream.name}"


class Loss(models.Model):
    """Streams of a session on a node that is lost, and what is done about them.

    It is there for as long as the node is lost; `since` is when drivers were first seen to have lost it.
    """

    session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="losses")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="losses")
    since = models.DateTimeField()
    verdict = models.CharField(max_length=16, choices=VERDICTS)
    sentence = models.CharField(max_length=500)
    planned_at = models.DateTimeField(null=True)  # when a place was last looked for, and not found
    operation = models.ForeignKey(Operation, null=True, on_delete=models.SET_NULL, related_name="losses")

    class Meta:
        ordering = ("session", "node")
        verbose_name_plural = "losses"
        constraints = [models.UniqueConstraint(name="loss_once", fields=["session", "node"])]

    def __str__(self) -> str:
        return f"{self.node.name} of {self.session.name}"
