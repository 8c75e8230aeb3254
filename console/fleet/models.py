from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Final

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from console.accounts.names import ACTOR_NAME_MAX
from console.placement.topology import NIC_WIO, State
from console.shell.sealed import SealedText
from telemetry.topics import of_source

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"  # what host names look like, too
DOMAINS_MAX = 4
BOX_STATES = [(one.value, one.value) for one in (State.READY, State.CORDONED, State.DRAINING)]
STATES = [(state.value, state.value) for state in State]
HELD_STATES = [state.value for state in State if state is not State.LOST]
NOT_JOINED = "It has not joined yet."
ALL_ORGS: Final = "all"
TOLD_AFTER_LOST: Final = timedelta(minutes=1)  # what was being told when it was lost has ended by then

named = RegexValidator(NAME, "Lower-case letters, digits, dots, dashes and underscores, at most 63.")


class Named(models.Model):
    """Something of the fleet that has a name of its own kind, and counts its changes."""

    name = models.CharField(max_length=63, unique=True, validators=[named])
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        abstract = True
        ordering = ("name",)
        constraints = [
            models.CheckConstraint(name="%(class)s_name", condition=Q(name__regex=NAME)),
        ]

    def __str__(self) -> str:
        return self.name


class Stamp(Named):
    """Leaves that share a spine's nearer end, and what is on them: the unit in which a fleet grows."""


class Leaf(Named):
    """A switch. What two of its ports say to one another stays in it; all else crosses the spine."""

    stamp = models.ForeignKey(Stamp, on_delete=models.PROTECT, related_name="leaves")


class SpineLink(Named):
    """A link from a leaf up to a spine switch."""

    leaf = models.ForeignKey(Leaf, on_delete=models.PROTECT, related_name="spine_links")
    spine = models.CharField(max_length=63, validators=[named])
    gbits = models.PositiveIntegerField(validators=[MinValueValidator(1)])

    class Meta(Named.Meta):
        constraints = [
            *Named.Meta.constraints,
            models.CheckConstraint(name="spinelink_gbits", condition=Q(gbits__gt=0)),
        ]


class Mover(models.TextChoices):
    """What copies payloads and checks them in a process."""

    COMPILED = "compiled", "compiled"
    PYTHON = "python", "Python"


class ProcessKind(models.TextChoices):
    """Of processes that join."""

    NODE = "node"
    DRIVER = "driver"
    BRAIN = "brain"


class Joined(models.Model):
    """What a process tells of itself when it joins, and then with each heartbeat."""

    KIND: ClassVar[ProcessKind]

    control_url = models.CharField(max_length=500, blank=True)
    control_token = SealedText(blank=True, default="", help_text="Sealed at rest.")
    heartbeat_sha256 = models.BinaryField(max_length=32, null=True)  # of what heartbeats are known by
    public_key = models.TextField(
        blank=True, default="", help_text="PEM. Bound when it joins; empty for one of an older version."
    )
    trusts = models.CharField(
        max_length=64, blank=True, default="", help_text="Digest of the authorities that it believes."
    )
    software_version = models.CharField(max_length=60, blank=True)
    mover = models.CharField(
        max_length=16,
        blank=True,
        default="",
        choices=Mover.choices,
        help_text="What moves bytes in it. Compiled code is faster; empty: it has not reported it.",
    )
    joined_at = models.DateTimeField(null=True, blank=True)
    last_heartbeat_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        abstract = True
        constraints = [
            # Whoever joined can be asked, and is known by something.
            models.CheckConstraint(
                name="%(class)s_joined",
                condition=Q(joined_at=None, heartbeat_sha256=None, control_url="")
                | Q(joined_at__isnull=False, heartbeat_sha256__isnull=False) & ~Q(control_url=""),
            ),
        ]


def topic(joined: Node | Driver | Brain) -> str:
    """Under which a process tells its numbers, and signs what it confirms."""
    return of_source(joined.KIND.value, joined.name)


def is_lost(joined: Node | Driver | Brain) -> bool:
    return joined.state == State.LOST.value if isinstance(joined, Node) else joined.lost_at is not None


class Node(Named, Joined):
    """An AX node, or the place for one that has not joined yet.

    `declared` is what people say of it, and `reported` what its agent says; `memory_bytes`, `cpus` and
    `shards_max` are what follows: what is declared, and else what is reported.
    """

    KIND = ProcessKind.NODE

    stamp = models.ForeignKey(Stamp, on_delete=models.PROTECT, related_name="nodes")
    state = models.CharField(max_length=16, choices=STATES, default=State.LOST.value)
    state_reason = models.CharField(max_length=500, blank=True, default=NOT_JOINED)
    state_since = models.DateTimeField(default=timezone.now)
    # What it was before it was lost, and is again when it comes back.
    held_state = models.CharField(max_length=16, blank=True, default=State.READY.value)
    held_reason = models.CharField(max_length=500, blank=True)
    memory_bytes = models.BigIntegerField(default=0, validators=[MinValueValidator(0)])
    cpus = models.PositiveIntegerField(default=0)
    shards_max = models.PositiveIntegerField(default=0, help_text="More shards would cost others cores.")
    # What its shards cost its processors, see `cpu_guard`.
    cores_used = models.FloatField(null=True, blank=True)
    shards_measured = models.PositiveIntegerField(null=True, blank=True)
    measured_at = models.DateTimeField(null=True, blank=True)
    declared = models.JSONField(default=dict, blank=True)
    reported = models.JSONField(default=dict, blank=True)
    labels = models.JSONField(default=dict, blank=True)
    protocol_min = models.PositiveSmallIntegerField(default=0)
    protocol_max = models.PositiveSmallIntegerField(default=0)
    data_address = models.CharField(max_length=500, blank=True, help_text="What drivers connect to.")

    class Meta(Named.Meta):
        constraints = [
            *Named.Meta.constraints,
            *Joined.Meta.constraints,
            models.CheckConstraint(
                name="node_state", condition=Q(state__in=[value for value, _ in STATES])
            ),
            models.CheckConstraint(
                name="node_held_state_while_lost",
                condition=Q(state=State.LOST.value, held_state__in=HELD_STATES)
                | ~Q(state=State.LOST.value) & Q(held_state=""),
            ),
            models.CheckConstraint(
                name="node_not_joined_is_lost",
                condition=Q(joined_at__isnull=False) | Q(state=State.LOST.value),
            ),
            models.CheckConstraint(name="node_memory", condition=Q(memory_bytes__gte=0)),
            models.CheckConstraint(
                name="node_protocol", condition=Q(protocol_min__lte=F("protocol_max"))
            ),
        ]
        indexes = [models.Index(fields=["state", "name"], name="node_of_state")]

    @property
    def has_joined(self) -> bool:
        return self.joined_at is not None


class Removed(models.Model):
    """A process that was taken out of the fleet: somebody has vouched that it runs no more, so nobody
    waits for it, nor for what was left in its memory. Or one whose name another process has taken over
    (`was_replaced`): what a driver was told is still in its state directory, and the memory of a node is
    waited for until the node is removed, which vouches for all machines that had its name."""

    kind = models.CharField(max_length=8, choices=ProcessKind)
    name = models.CharField(max_length=63)
    data_address = models.CharField(max_length=500, blank=True)  # of a node
    org_slug = models.CharField(max_length=48, blank=True)  # of the session that a driver worked for
    public_key = models.TextField(blank=True, default="")
    heartbeat_sha256 = models.BinaryField(max_length=32, null=True)  # by which it is known if it returns
    # Places of tier 2 that it shared with others, and that nobody has found empty since.
    stores = models.JSONField(default=list, blank=True)
    # Of a driver: whose keys it was told, by slug, or ALL_ORGS; null: not known, as in earlier versions.
    orgs = models.JSONField(null=True, blank=True)
    # Of a driver: tier 2 may have files of it. null: none is known, as in earlier versions.
    model = models.JSONField(null=True, blank=True)
    told_until = models.DateTimeField(null=True)  # later nobody told it anything; null: when it went
    erased_at = models.DateTimeField(null=True)  # its machine has deleted what it was told
    was_replaced = models.BooleanField(default=False, db_default=False)  # another key has its name now
    # Somebody has removed it: it may have been stolen, and what its machine says is not believed.
    by_person = models.BooleanField(default=False, db_default=False)
    removed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("-removed_at", "-id")
        verbose_name_plural = "removed"
        indexes = [models.Index(fields=["kind", "name"], name="removed_by_name")]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @classmethod
    def of(cls, joined: Node | Driver | Brain, org_slug: str = "") -> Removed:
        """What is remembered of one that has joined. It is not saved."""
        now = timezone.now()
        lost_at = joined.lost_at if isinstance(joined, Driver) else None
        return cls(
            orgs=_orgs_told(joined) if isinstance(joined, Driver) else None,
            model=joined.model if isinstance(joined, Driver) else None,
            told_until=min(now, lost_at + TOLD_AFTER_LOST) if lost_at else now,
            removed_at=now,
            kind=joined.KIND,
            name=joined.name,
            data_address=joined.data_address if isinstance(joined, Node) else "",
            org_slug=org_slug,
            public_key=joined.public_key,
            heartbeat_sha256=joined.heartbeat_sha256,
        )


def _orgs_told(driver: Driver) -> list[str] | str:
    """Whose keys it may have: also those of orgs that it has not confirmed to have dropped."""
    slugs = list(driver.orgs.values_list("org__slug", flat=True))
    return ALL_ORGS if None in slugs else sorted(slugs)


class RetiringStore(models.Model):
    """A store of tier 2 that a node had, until its agent has found nothing left there."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="retiring_stores")
    place = models.CharField(max_length=1600)  # Tier2Settings.place
    said = models.JSONField()  # as the description said it
    since = models.DateTimeField()
    is_drained = models.BooleanField(default=False)  # its files are removed, instead of waited for
    # As its agent said last.
    state = models.CharField(max_length=16, blank=True)
    reason = models.CharField(max_length=500, blank=True)
    files = models.BigIntegerField(null=True)
    bytes = models.BigIntegerField(null=True)
    seen_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("since", "id")
        constraints = [
            models.UniqueConstraint(name="retiring_store_once", fields=["node", "place"]),
        ]

    def __str__(self) -> str:
        return f"{self.place} of {self.node.name}"


class Nic(models.Model):
    """A port of a node on a leaf, made for so many WIO streams."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="nics")
    leaf = models.ForeignKey(Leaf, on_delete=models.PROTECT, related_name="nics")
    name = models.CharField(max_length=63, validators=[named])
    wio = models.PositiveSmallIntegerField(default=NIC_WIO, validators=[MinValueValidator(1)])
    gbits = models.PositiveIntegerField(default=100, validators=[MinValueValidator(1)])

    class Meta:
        ordering = ("name",)
        constraints = [
            models.UniqueConstraint(name="nic_once", fields=["node", "name"]),
            models.CheckConstraint(name="nic_name", condition=Q(name__regex=NAME)),
            models.CheckConstraint(name="nic_wio", condition=Q(wio__gt=0)),
            models.CheckConstraint(name="nic_gbits", condition=Q(gbits__gt=0)),
        ]

    def __str__(self) -> str:
        return f"{self.node.name}/{self.name}"


class Box(Named):
    """A CS-X: four domains, each with WIO streams and ports on leaves. Sessions get, and jobs start on,
    those that are ready only; one that is draining is to be left by the jobs that it has."""

    stamp = models.ForeignKey(Stamp, on_delete=models.PROTECT, related_name="boxes")
    memory_bytes = models.BigIntegerField(
        null=True, blank=True, help_text="For weights and KV; null if nobody has said."
    )
    state = models.CharField(max_length=16, choices=BOX_STATES, default=State.READY.value)
    state_reason = models.CharField(max_length=500, blank=True)

    class Meta(Named.Meta):
        verbose_name_plural = "boxes"
        constraints = [
            *Named.Meta.constraints,
            models.CheckConstraint(
                name="box_state", condition=Q(state__in=[value for value, _ in BOX_STATES])
            ),
            models.CheckConstraint(name="box_memory", condition=Q(memory_bytes__gt=0)),
        ]

    @property
    def is_usable(self) -> bool:
        return self.state == State.READY.value


class Domain(models.Model):
    box = models.ForeignKey(Box, on_delete=models.CASCADE, related_name="domains")
    index = models.PositiveSmallIntegerField(validators=[MaxValueValidator(DOMAINS_MAX - 1)])
    wio = models.PositiveSmallIntegerField(validators=[MinValueValidator(1)])

    class Meta:
        ordering = ("index",)
        constraints = [
            models.UniqueConstraint(name="domain_once", fields=["box", "index"]),
            models.CheckConstraint(name="domain_index", condition=Q(index__lt=DOMAINS_MAX)),
            models.CheckConstraint(name="domain_wio", condition=Q(wio__gt=0)),
        ]

    def __str__(self) -> str:
        return f"{self.box.name}/{self.index}"


class Port(models.Model):
    """Where a domain is plugged in."""

    domain = models.ForeignKey(Domain, on_delete=models.CASCADE, related_name="ports")
    leaf = models.ForeignKey(Leaf, on_delete=models.PROTECT, related_name="ports")

    class Meta:
        ordering = ("leaf__name",)
        constraints = [models.UniqueConstraint(name="port_once", fields=["domain", "leaf"])]

    def __str__(self) -> str:
        return f"{self.domain} on {self.leaf.name}"


class Driver(Named, Joined):
    """The SwDriver of one job: what decides what is cached. It runs wherever its engine does."""

    KIND = ProcessKind.DRIVER

    model = models.JSONField(null=True, blank=True, help_text="swdriver_shim.desired.ModelSpec")
    engine = models.CharField(
        max_length=60,
        blank=True,
        default="",
        help_text="The engine that it is part of; empty for a daemon.",
    )
    workload = models.CharField(
        max_length=63,
        blank=True,
        default="",
        db_default="",
        help_text="Whose instances it is the driver of; empty: nobody's, and anybody's jobs.",
    )
    lost_at = models.DateTimeField(null=True, blank=True)  # None while it reports

    class Meta(Named.Meta):
        constraints = [*Named.Meta.constraints, *Joined.Meta.constraints]

    @property
    def model_name(self) -> str:
        """Of its model; empty while none is known."""
        return str((self.model or {}).get("name", ""))


class Brain(Named, Joined):
    """An Inference Brain: the way in for requests. Any number of them do the same."""

    KIND = ProcessKind.BRAIN

    api_url = models.CharField(
        max_length=500, blank=True, default="", help_text="Where clients send requests, as it reports."
    )
    lost_at = models.DateTimeField(null=True, blank=True)  # None while it reports

    class Meta(Named.Meta):
        constraints = [*Named.Meta.constraints, *Joined.Meta.constraints]


MODELS: Final[dict[str, type[Node | Driver | Brain]]] = {
    one.KIND.value: one for one in (Node, Driver, Brain)
}


class Watch(models.Model):
    """Since when the console listens to heartbeats without a break. One row."""

    listening_since = models.DateTimeField()
    swept_at = models.DateTimeField()

    class Meta:
        constraints = [models.CheckConstraint(name="watch_once", condition=Q(id=1))]

    def __str__(self) -> str:
        return f"since {self.listening_since:%Y-%m-%d %H:%M:%S}"


class JoinToken(models.Model):
    """Good for so many processes of one kind to join with, until it expires. Only a hash is kept.

    `name`: only a process of this name may join. Empty: of any name. `workload`: what joins is a driver
    of its instances; empty: no workload's."""

    Kind = ProcessKind

    token: str  # its text, only of one that was just made
    public_id = models.CharField(max_length=12, unique=True)
    secret_sha256 = models.BinaryField(max_length=32)
    kind = models.CharField(max_length=8, choices=ProcessKind)
    note = models.CharField(max_length=120, blank=True)
    name = models.CharField(max_length=63, blank=True, default="", db_default="")
    workload = models.CharField(max_length=63, blank=True, default="", db_default="")
    uses_max = models.PositiveIntegerField()
    uses_left = models.PositiveIntegerField()
    created_by = models.CharField(max_length=ACTOR_NAME_MAX)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created_at", "-id")
        constraints = [
            models.CheckConstraint(name="join_token_kind", condition=Q(kind__in=ProcessKind.values)),
            models.CheckConstraint(
                name="join_token_uses", condition=Q(uses_left__lte=F("uses_max"), uses_max__gt=0)
            ),
        ]

    def __str__(self) -> str:
        return self.prefix

    @property
    def prefix(self) -> str:
        """The part of it that may be shown."""
        return f"tgj_{self.public_id}"

    @property
    def state(self) -> str:
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at <= timezone.now():
            return "expired"
        return "active" if self.uses_left else "used up"

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it."""
        return {
            "prefix": self.prefix,
            "kind": self.kind,
            "name": self.name,
            "note": self.note,
            "uses": self.uses_max,
            "expires_at": self.expires_at,
        }
