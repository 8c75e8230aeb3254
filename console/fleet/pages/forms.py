from __future__ import annotations

from typing import Any

from django import forms
from django.db.models import QuerySet

from console.accounts.forms import ReasonMixin
from console.fleet.labels import NotALabel, check_labels
from console.fleet.membership import tokens
from console.fleet.models import STATES, named
from console.fleet.services import NOT_JOINED
from console.orgs.models import Org
from console.placement.topology import State
from console.shell.forms import LinesField
from swdriver_shim.adapters.claims import SECONDS_MAX

UPLOAD_BYTES_MAX = 1 << 20
TO_BE = {
    State.READY: "ready: takes new streams",
    State.CORDONED: "cordoned: keeps its streams, takes no new ones",
    State.MAINTENANCE: "maintenance: has no streams, and may be silent",
}


class NodeFilterForm(forms.Form):
    """The filters of the list of nodes; all of them live in the address, as in the API."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    state = forms.ChoiceField(choices=[("", "any"), *STATES, (NOT_JOINED, NOT_JOINED)], required=False)
    stamp = forms.CharField(max_length=63, required=False)
    leaf = forms.CharField(max_length=63, required=False)
    label = forms.CharField(max_length=120, required=False, help_text="“rack” or “rack=7”")


class SearchForm(forms.Form):
    q = forms.CharField(max_length=120, required=False, label="Search")


class StateForm(ReasonMixin):
    state = forms.TypedChoiceField(
        choices=[(state.value, said) for state, said in TO_BE.items()],
        coerce=State,
        label="State",
    )
    field_order = ["state", "reason"]


class BoxStateForm(ReasonMixin):
    state = forms.TypedChoiceField(
        choices=[
            (State.READY.value, "ready: takes new jobs"),
            (State.CORDONED.value, "cordoned: keeps its jobs, takes no new ones"),
        ],
        coerce=State,
        label="State",
    )
    field_order = ["state", "reason"]


class LabelsForm(ReasonMixin):
    labels = LinesField(
        max_length=5000,
        required=False,
        widget=forms.Textarea(attrs={"rows": 4, "spellcheck": "false"}),
        help_text="One per line, as name=value.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput)
    field_order = ["labels", "reason"]

    def clean_labels(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in str(self.cleaned_data["labels"]).split("\n"):
            name, _, value = (part.strip() for part in line.partition("="))
            if name in found:
                raise forms.ValidationError(f"“{name}” is listed twice.")
            if name or value:
                found[name] = value
        try:
            check_labels(found)
        except NotALabel as error:
            raise forms.ValidationError(str(error)) from None
        return found


class JoinForm(forms.Form):
    kind = forms.ChoiceField(
        choices=[("node", "an agent, as a node"), ("driver", "a driver"), ("brain", "a brain")],
        label="Process",
    )
    name = forms.CharField(
        max_length=63,
        required=False,
        validators=[named],
        label="Name",
        help_text="Only a process of this name may join. Needed to replace a lost driver that has a "
        "job or orgs; without it, any name.",
    )
    note = forms.CharField(max_length=120, required=False, help_text="What it is for, e.g. “rack 7”.")
    uses = forms.IntegerField(
        min_value=1, max_value=tokens.USES_MAX, initial=1, label="Uses", help_text="One per process."
    )
    hours = forms.TypedChoiceField(
        coerce=int,
        choices=[(1, "an hour"), (24, "a day"), (24 * 7, "a week"), (24 * 30, "30 days")],
        initial=24,
        label="Valid for",
    )


class ClaimForm(ReasonMixin):
    org = forms.ChoiceField(label="Org")
    seconds = forms.TypedChoiceField(
        coerce=int,
        choices=[(60, "a minute"), (3600, "an hour"), (SECONDS_MAX, "a day")],
        initial=3600,
        label="Valid for",
    )
    field_order = ["org", "seconds", "reason"]

    def __init__(self, *arguments: Any, orgs: QuerySet[Org], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.fields["org"].choices = [(org.slug, org.name) for org in orgs]  # type: ignore[attr-defined]


class DescriptionForm(ReasonMixin):
    yaml = LinesField(
        max_length=4 << 20,
        strip=False,
        label="Description",
        widget=forms.Textarea(attrs={"rows": 24, "spellcheck": "false", "class": "code"}),
    )
    file = forms.FileField(
        required=False, max_length=200, label="Upload a file", help_text="Replaces the text above."
    )
    seen = forms.CharField(max_length=16, required=False, widget=forms.HiddenInput)
    field_order = ["yaml", "file", "reason"]

    def clean(self) -> None:
        file: Any = self.cleaned_data.get("file")
        if file is None:
            return
        self.errors.pop("yaml", None)
        if file.size > UPLOAD_BYTES_MAX:
            self.add_error("file", "A file has at most 1 MiB.")
            return
        try:
            self.cleaned_data["yaml"] = file.read().decode()
        except UnicodeDecodeError:
            self.add_error("file", "The file is not text in UTF-8.")
