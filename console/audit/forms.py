from __future__ import annotations

from typing import Any

from django import forms

from console.orgs.models import Org


class FilterForm(forms.Form):
    """The filters of the page and of the CSV; all of them live in the address."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    actor = forms.CharField(max_length=120, required=False, label="User")
    action = forms.CharField(
        max_length=48, required=False, label="Action", help_text="“org” matches all org.* actions."
    )
    org = forms.ModelChoiceField(
        Org.objects.none(), required=False, empty_label="all", to_field_name="slug"
    )
    since = forms.DateTimeField(
        required=False,
        label="From (UTC)",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )
    until = forms.DateTimeField(
        required=False,
        label="Until (UTC)",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )
    request_id = forms.CharField(max_length=64, required=False, label="Request id")

    def __init__(self, *args: Any, orgs: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["org"]
        if isinstance(field, forms.ModelChoiceField):
            field.queryset = orgs


class UndoForm(forms.Form):
    reason = forms.CharField(max_length=500, required=False, label="Why")
