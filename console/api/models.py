from __future__ import annotations

from datetime import datetime, timedelta

from django.db import models
from django.utils import timezone

from console.shell.sealed import SealedText

KEPT = timedelta(hours=24)


class StoredAnswer(models.Model):
    """The answer to a request with an Idempotency-Key, kept in the transaction of its effect.

    `needs` is what the request took: pairs of an org (none for the platform) and a role. Whoever asks
    for the answer again has to hold all of them still.
    """

    scope_sha256 = models.BinaryField(max_length=32, primary_key=True)
    body_sha256 = models.BinaryField(max_length=32)
    status = models.PositiveSmallIntegerField()
    headers = models.JSONField()
    body = models.TextField()
    secret_body = SealedText(null=True)  # instead of `body`, where the answer has a secret
    needs = models.JSONField(default=list)
    created_at = models.DateTimeField(default=timezone.now, db_index=True)

    def __str__(self) -> str:
        return f"{self.status} at {self.created_at:%Y-%m-%d %H:%M:%S}"


def drop_old_answers(now: datetime) -> int:
    """Forget the answers that were kept long enough."""
    deleted, _ = StoredAnswer.objects.filter(created_at__lt=now - KEPT).delete()
    return deleted
