from __future__ import annotations

from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils import timezone

from console.accounts.names import ACTOR_NAME_MAX, USERNAME_MAX
from console.audit.sentences import words_of
from console.orgs.models import SLUG_MAX

# The longest is a membership's: `acme/vic`.
OBJECT_ID_MAX: Final = SLUG_MAX + 1 + USERNAME_MAX
# Names of things have 120 characters at most; sentences that stand for one are cut.
OBJECT_NAME_MAX: Final = 160
REASON_MAX: Final = 500


class AuditEntry(models.Model):
    """One change of intent. The database refuses to update or delete it (see the migration).

    It refers to others by plain ids and frozen names, so that no deletion elsewhere can reach it.
    """

    at = models.DateTimeField(default=timezone.now)
    actor_id = models.BigIntegerField(null=True)
    actor_name = models.CharField(max_length=ACTOR_NAME_MAX)
    means = models.CharField(max_length=16)
    address = models.GenericIPAddressField(null=True)
    request_id = models.CharField(max_length=64, blank=True)
    action = models.CharField(max_length=48)
    object_type = models.CharField(max_length=32)
    object_id = models.CharField(max_length=OBJECT_ID_MAX)
    object_name = models.CharField(max_length=OBJECT_NAME_MAX)
    org_id = models.BigIntegerField(null=True)
    reason = models.CharField(max_length=REASON_MAX, blank=True)
    before = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    after = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    undoes = models.OneToOneField(
        "self", null=True, on_delete=models.DO_NOTHING, related_name="undone_by"
    )

    class Meta:
        verbose_name_plural = "audit entries"
        ordering = ("-id",)
        indexes = [
            models.Index(fields=["org_id", "-id"], name="audit_of_org"),
            models.Index(fields=["actor_id", "-id"], name="audit_of_actor"),
            models.Index(fields=["object_type", "object_id", "-id"], name="audit_of_object"),
            models.Index(fields=["action", "-id"], name="audit_of_action"),
            models.Index(fields=["at"], name="audit_by_time"),
            models.Index(
                fields=["request_id"], name="audit_of_request", condition=~models.Q(request_id="")
            ),
        ]

    def __str__(self) -> str:
        return f"{self.actor_name}: {self.action} {self.object_name}"

    @property
    def action_words(self) -> str:
        return words_of(self.action)

    @property
    def changes(self) -> list[tuple[str, Any, Any]]:
        from console.audit.diff import changes

        return changes(self.before, self.after)
