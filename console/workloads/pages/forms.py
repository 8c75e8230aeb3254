from __future__ import annotations

from typing import Any

from django import forms

from console.accounts.forms import OrgsMixin, ReasonMixin, org_field
from console.sessions.pages.forms import PlannedForm
from console.shell.forms import LinesField
from console.workloads import buckets
from console.workloads.models import ENDPOINT_MAX, REGION_MAX, TOKENIZER_NAME_MAX
from console.workloads.spec import CHARACTERS_MAX, REPLICAS_MAX


class FilterForm(forms.Form):
    """The filters of the list; all of them live in the address, as in the API."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    org = forms.CharField(
        max_length=48, required=False, widget=forms.TextInput(attrs={"placeholder": "short name"})
    )
    ready = forms.NullBooleanField(
        required=False,
        label="State",
        widget=forms.Select(choices=[("", "all"), ("true", "ready"), ("false", "not ready")]),
    )


class SpecForm(PlannedForm):
    spec = LinesField(
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


def _secret_field(most: int, **options: Any) -> forms.CharField:
    """It is never sent back, also where the form is shown again."""
    widget = forms.PasswordInput(attrs={"autocomplete": "off"})
    return forms.CharField(max_length=most, widget=widget, **options)


class CredentialsForm(ReasonMixin):
    """Of a bucket, to be replaced. `may_share`: it is the platform's."""

    access_key_id = _secret_field(buckets.ACCESS_KEY_MAX, label="Access key ID")
    secret_access_key = _secret_field(buckets.SECRET_KEY_MAX, label="Secret access key")
    session_token = _secret_field(
        buckets.SESSION_TOKEN_MAX,
        required=False,
        label="Session token",
        help_text="Of temporary credentials.",
    )
    region = forms.CharField(max_length=REGION_MAX, required=False, help_text="Empty: us-east-1.")
    shared = forms.BooleanField(
        required=False,
        label="Share with all orgs",
        help_text="Workloads of all orgs may then read everything in the bucket.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)
    field_order = [*buckets.SECRETS, "region", "shared", "reason"]

    def __init__(self, *args: Any, may_share: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not may_share:
            del self.fields["shared"]

    def values(self) -> dict[str, Any]:
        said = self.cleaned_data
        return {
            "secrets": {name: said[name] for name in buckets.SECRETS},
            "region": said["region"],
            "shared": said.get("shared", False),
            "reason": said["reason"],
        }


class BucketForm(OrgsMixin, CredentialsForm):
    name = forms.CharField(max_length=63, label="Bucket", help_text="models of s3://models/chat.")
    endpoint = forms.CharField(
        max_length=ENDPOINT_MAX,
        required=False,
        help_text="The S3 server, as weights.endpoint of specs names it. Empty: Amazon's.",
    )
    org = org_field("platform", help_text="Whose workloads use the credentials.")
    field_order = ["name", "endpoint", "org", *CredentialsForm.field_order]

    def __init__(self, *args: Any, may_share: bool, **kwargs: Any) -> None:
        super().__init__(*args, may_share=may_share, **kwargs)
        if not may_share:
            del self.fields["shared"]
