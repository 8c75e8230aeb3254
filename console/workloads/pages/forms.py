from __future__ import annotations

from typing import Any

from django import forms

from console.accounts.forms import OrgsMixin, ReasonMixin, org_field
from console.sessions.pages.forms import PlannedForm
from console.workloads.models import TOKENIZER_NAME_MAX
from console.workloads.spec import CHARACTERS_MAX, REPLICAS_MAX


class FilterForm(forms.Form):
    """The filters of the list; all of them live in the address, as in the API."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    org = forms.CharField(max_length=48, required=False, help_text="Short name of the org.")
    ready = forms.NullBooleanField(
        required=False,
        label="State",
        widget=forms.Select(choices=[("", "all"), ("true", "ready"), ("false", "not ready")]),
    )


class SpecForm(PlannedForm):
    spec = forms.CharField(
        max_length=CHARACTERS_MAX,
        label="Spec",
        strip=False,
        widget=forms.Textarea(attrs={"class": "code", "rows": 20, "spellcheck": "false", "wrap": "off"}),
        help_text="YAML or JSON. Sizes and durations may have units: 64KiB, 10m.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)
    field_order = ["spec", "wait_minutes", "reason"]


class ScaleForm(PlannedForm):
    replicas = forms.IntegerField(min_value=1, max_value=REPLICAS_MAX)
    field_order = ["replicas", "wait_minutes", "reason"]


class DeleteForm(ReasonMixin):
    typed = forms.CharField(max_length=63, label="Type the name to confirm")
    field_order = ["typed", "reason"]


class UndoForm(ReasonMixin):
    revision = forms.IntegerField(min_value=1, max_value=2**31 - 1, required=False)


class TokenizerForm(OrgsMixin):
    name = forms.CharField(
        max_length=TOKENIZER_NAME_MAX, help_text="What people call it, e.g. the model that it is of."
    )
    org = org_field("platform: all orgs may use it", help_text="Whose workloads may use it.")
    archive = forms.FileField(
        max_length=200,
        help_text="A tar, a gzipped tar or a zip with tokenizer.json, of at most 16 MiB.",
    )
    field_order = ["name", "org", "archive"]

    def __init__(self, *args: Any, may_share: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["org"]
        if isinstance(field, forms.ModelChoiceField) and not may_share:
            field.required, field.empty_label = True, None
