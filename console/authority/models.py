from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from console.shell.sealed import SealedText


class State(models.TextChoices):
    """Of an authority. There is one that signs, and while it is replaced one before or after it."""

    NEXT = "next"  # known to processes, signs nothing yet
    SIGNING = "signing"
    SUPERSEDED = "superseded"  # what it has signed is still believed
    REMOVED = "removed"  # nobody believes it any more


class Authority(models.Model):
    """A root that processes believe, and the key that signs their certificates."""

    fingerprint = models.CharField(max_length=64, unique=True)  # SHA-256 of the certificate
    certificate = models.TextField()  # PEM
    key = SealedText(help_text="Sealed at rest.")  # PEM; empty once it is removed
    state = models.CharField(max_length=12, choices=State)
    state_since = models.DateTimeField(default=timezone.now)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()

    class Meta:
        ordering = ("pk",)
        verbose_name_plural = "authorities"
        constraints = [
            models.CheckConstraint(name="authority_state", condition=Q(state__in=State.values)),
            models.UniqueConstraint(
                name="authority_one_of_each",
                fields=["state"],
                condition=Q(state__in=[State.NEXT, State.SIGNING]),
            ),
        ]

    def __str__(self) -> str:
        return self.fingerprint[:16]
