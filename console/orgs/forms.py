from __future__ import annotations

from django import forms

from console.accounts.forms import ReasonMixin
from console.accounts.roles import IN_AN_ORG, Role, choices
from console.orgs.models import SLUG


class OrgForm(ReasonMixin):
    name = forms.CharField(max_length=120)
    field_order = ["slug", "name", "reason"]


class NewOrgForm(OrgForm):
    slug = forms.RegexField(
        SLUG,
        max_length=48,
        help_text="Lower-case letters, digits and dashes. Used in URLs; can't be changed.",
    )


class DeleteOrgForm(ReasonMixin):
    typed = forms.CharField(max_length=48, label="Type the org's short name to confirm")
    field_order = ["typed", "reason"]


class MemberForm(ReasonMixin):
    username = forms.CharField(max_length=63, label="User name")
    role = forms.TypedChoiceField(
        coerce=lambda value: Role(int(value)), choices=choices(IN_AN_ORG), initial=Role.VIEWER
    )
    field_order = ["username", "role", "reason"]
