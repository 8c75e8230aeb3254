"""By what numbers are told. They themselves are in partitions, which `storage` reads and writes."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models


class Source(models.Model):
    """A process that tells of itself: what it last said, and which of its records are missing.

    Its column `received`, the ranges of sequences that have arrived, is for `ingest` only.
    """

    name = models.CharField(max_length=120, primary_key=True)
    kind = models.CharField(max_length=32)
    topic = models.CharField(max_length=240)
    version = models.CharField(max_length=40)
    host = models.CharField(max_length=120)
    process_id = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    sequence = models.PositiveBigIntegerField()
    missing = models.PositiveBigIntegerField(default=0)
    seen_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)  # as it should: it said that this is its last record

    class Meta:
        ordering = ("kind", "name")

    def __str__(self) -> str:
        return self.name


class Topic(models.Model):
    """Of whom numbers are told, as a number in their rows."""

    id = models.AutoField(primary_key=True)
    name = models.CharField(max_length=240, unique=True)
    seen_on = models.DateField()

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class FormerTopic(models.Model):
    """A topic whose name somebody else has by now: what records tell of before is not of that one."""

    name = models.CharField(max_length=240, primary_key=True)
    ended_at = models.DateTimeField()

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class StoredShape(models.Model):
    """Which series a row has, as a number in it."""

    id = models.AutoField(primary_key=True)
    digest = models.BinaryField(max_length=16, unique=True)
    encoded = models.BinaryField()
    seen_on = models.DateField(db_index=True)

    def __str__(self) -> str:
        return self.digest.hex()


class SlowTransfer(models.Model):
    """One of the slowest transfers that a driver told of, as `transfers.Transfer` has it."""

    at = models.DateTimeField(db_index=True)
    driver = models.CharField(max_length=200)
    direction = models.CharField(max_length=3)
    seconds = models.FloatField()
    org = models.CharField(max_length=200)
    request = models.CharField(max_length=200)
    stream = models.CharField(max_length=200)
    slot_first = models.PositiveBigIntegerField()
    slot_last = models.PositiveBigIntegerField()
    columns = models.PositiveBigIntegerField()
    bytes = models.PositiveBigIntegerField()
    session = models.CharField(max_length=200)
    node = models.CharField(max_length=200)
    tier = models.CharField(max_length=200)
    nic_leaf = models.CharField(max_length=200)
    link = models.CharField(max_length=200)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(direction__in=("out", "in")), name="slow_transfer_goes_out_or_in"
            ),
            models.CheckConstraint(condition=models.Q(seconds__gte=0), name="slow_transfer_takes_time"),
        ]

    def __str__(self) -> str:
        return f"{self.driver} {self.stream}"


class Event(models.Model):
    """Something that happened, in the order of its number. Written by `events.note` only."""

    at = models.DateTimeField(db_index=True)
    kind = models.CharField(max_length=48)
    topics = ArrayField(models.CharField(max_length=240))
    sentence = models.CharField(max_length=300)
    data = models.JSONField(default=dict, encoder=DjangoJSONEncoder)

    class Meta:
        ordering = ("-id",)
        indexes = [
            GinIndex(fields=["topics"], name="event_of_topics"),
            models.Index(fields=["kind", "-id"], name="event_of_kind"),
        ]

    def __str__(self) -> str:
        return self.sentence


class DeadLetter(models.Model):
    """Something that could not be stored, to be looked at: the newest of each source. Written by
    `dead_letters` only."""

    at = models.DateTimeField(db_index=True)
    cause = models.CharField(max_length=32)
    source = models.CharField(max_length=240, db_index=True)
    reason = models.CharField(max_length=300)
    size = models.PositiveIntegerField()  # bytes
    excerpt = models.CharField(max_length=1000)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"{self.cause} {self.source}"


class DeadLetterCount(models.Model):
    """How much of a source could not be stored on a day, by cause."""

    day = models.DateField()
    cause = models.CharField(max_length=32)
    source = models.CharField(max_length=240)
    count = models.PositiveBigIntegerField()
    last_at = models.DateTimeField()

    class Meta:
        ordering = ("-day", "cause", "source")
        constraints = [
            models.UniqueConstraint(fields=["day", "cause", "source"], name="dead_letters_counted_once")
        ]

    def __str__(self) -> str:
        return f"{self.day} {self.cause} {self.source}: {self.count}"
