from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from console.orgs.models import Org

ADDRESS_MAX = 2000
NAME_MAX = 60
TAKEN = "You have a view of that name. Take another, or delete it first."


class SavedView(models.Model):
    """A page as somebody wants it again. Whoever opens it sees of it what that page lets them."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_views"
    )
    name = models.CharField(max_length=NAME_MAX)
    address = models.CharField(max_length=ADDRESS_MAX)  # path and query
    # Shared with the members of an org, or with who has a role on the platform; else with nobody.
    org = models.ForeignKey(Org, on_delete=models.CASCADE, null=True, blank=True)
    on_platform = models.BooleanField(default=False)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("name", "pk")
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "name"],
                name="saved_view_once",
                violation_error_message=TAKEN,
            ),
            models.CheckConstraint(
                condition=Q(org=None) | Q(on_platform=False), name="saved_view_shared_once"
            ),
            models.CheckConstraint(
                condition=Q(address__startswith="/") & ~Q(address__startswith="//"),
                name="saved_view_stays_here",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def share(self) -> str:
        """As it is told: nothing, `platform` or `org:acme`."""
        return f"org:{self.org.slug}" if self.org else "platform" if self.on_platform else ""

    def snapshot(self) -> dict[str, Any]:
        """For the audit trail."""
        return {"name": self.name, "address": self.address, "share": self.share or "nobody"}
