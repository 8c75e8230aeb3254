from __future__ import annotations

from django import forms

from console.alerts.web.forms import OrgsMixin, org_field
from console.handover.models import TEXT_MAX


class NoteForm(OrgsMixin):
    text = forms.CharField(
        max_length=TEXT_MAX,
        label="Note",
        help_text="For the next on-call: observations, attempts, what to watch.",
        widget=forms.Textarea(attrs={"rows": 4, "data-press": "n"}),
    )
    org = org_field("all orgs and the platform", label="Org")
