"""Pages change a policy only in the version that they have shown."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.http import HttpRequest

from console.policies.services import ActivePolicy


def moved_on(held: ActivePolicy) -> str:
    """Who has saved what holds now."""
    version = held.version
    who = f"{version.author_name} saved version {held.number}" if version else "the policy was deleted"
    why = f": {version.reason}" if version else ""
    return f"Meanwhile {who}{why}."


def check_seen(request: HttpRequest, held: ActivePolicy) -> None:
    """For a button. Raises ValidationError where its page has shown another version."""
    if request.POST.get("version") != str(held.number):
        raise ValidationError(f"Nothing was changed. {moved_on(held)} Look at it first.")
