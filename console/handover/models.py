from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from console.accounts.names import ACTOR_NAME_MAX
from console.orgs.models import Org

TEXT_MAX = 4000


class Note(models.Model):
    """What one who was on call leaves to the next. Who knows better writes another."""

    org = models.ForeignKey(Org, null=True, blank=True, on_delete=models.CASCADE, related_name="notes")
    at = models.DateTimeField(default=timezone.now)
    author = models.CharField(max_length=ACTOR_NAME_MAX)
    text = models.CharField(max_length=TEXT_MAX)

    class Meta:
        ordering = ("-id",)
        constraints = [models.CheckConstraint(name="note_says_something", condition=~Q(text=""))]
        indexes = [models.Index(fields=["at"], name="note_by_time")]

    def __str__(self) -> str:
        return self.text[:80]
