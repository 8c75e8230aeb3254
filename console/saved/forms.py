from __future__ import annotations

from typing import Any

from django import forms

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.orgs.services import visible_orgs
from console.saved.models import ADDRESS_MAX, NAME_MAX
from console.saved.services import PLATFORM

ORGS_MAX = 100  # of a picker


class SaveForm(forms.Form):
    name = forms.CharField(max_length=NAME_MAX)
    address = forms.CharField(max_length=ADDRESS_MAX, widget=forms.HiddenInput)
    share = forms.ChoiceField(required=False, label="Shared with")

    def __init__(self, principal: Principal, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fields["share"].choices = shares(principal)  # type: ignore[attr-defined]  # a choice field


def shares(principal: Principal) -> list[tuple[str, str]]:
    """With whom they may share a view."""
    found = [("", "nobody")]
    if principal.on_platform(Role.VIEWER):
        found.append((PLATFORM, "everybody with a role on the platform"))
    orgs = visible_orgs(principal)[:ORGS_MAX]
    return [*found, *((f"org:{org.slug}", f"members of {org.name}") for org in orgs)]
