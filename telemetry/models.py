from __future__ import annotations

from django.db import models


class Source(models.Model):
    """A process that tells of itself. What it last said, and up to which of its records we are."""

    name = models.CharField(max_length=120, primary_key=True)
    kind = models.CharField(max_length=32)
    version = models.CharField(max_length=40)
    host = models.CharField(max_length=120)
    process_id = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    sequence = models.PositiveBigIntegerField()
    seen_at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ("kind", "name")

    def __str__(self) -> str:
        return self.name
