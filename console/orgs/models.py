from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.utils import timezone

from console.accounts.models import User
from console.accounts.roles import IN_AN_ORG, Role, choices

SLUG = r"^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$"
SLUG_MAX = 48
SLUG_RULE = "Lower-case letters, digits and dashes, with a letter or digit at each end."


class Org(models.Model):
    """A tenant. Its columns are never served to another one."""

    slug = models.CharField(
        max_length=SLUG_MAX,
        unique=True,
        validators=[RegexValidator(SLUG, "Lower-case letters, digits and dashes, at most 48.")],
        help_text="In addresses and in the API. Can't be changed later.",
    )
    name = models.CharField(max_length=120)
    version = models.PositiveIntegerField(default=1, help_text="Counts changes; the ETag.")
    created_at = models.DateTimeField(default=timezone.now)

    members = models.ManyToManyField(User, through="Membership", related_name="orgs")

    class Meta:
        ordering = ("slug",)

    def __str__(self) -> str:
        return self.name

    def unique_error_message(self, _model: Any, _fields: Any) -> ValidationError:
        """For people, to whom a slug is a short name."""
        return ValidationError("An org has this short name already.", code="unique")

    def snapshot(self) -> dict[str, Any]:
        """What the audit trail keeps of it."""
        return {"slug": self.slug, "name": self.name}


class Membership(models.Model):
    org = models.ForeignKey(Org, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.PositiveSmallIntegerField(choices=choices(IN_AN_ORG))
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("user__username",)
        constraints = [
            models.UniqueConstraint(name="member_once", fields=["org", "user"]),
            models.CheckConstraint(
                name="membership_role",
                condition=models.Q(role__in=[role.value for role in IN_AN_ORG]),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user.username} in {self.org.slug}"

    def snapshot(self) -> dict[str, Any]:
        return {"user": self.user.username, "role": Role(self.role).label}
