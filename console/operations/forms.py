from __future__ import annotations

from django import forms


class FilterForm(forms.Form):
    target = forms.CharField(max_length=120, required=False, label="Target", help_text="session:chat")
    kind = forms.CharField(max_length=48, required=False, label="Kind")
    done = forms.NullBooleanField(
        required=False,
        label="State",
        widget=forms.Select(choices=[("", "all"), ("false", "going on"), ("true", "ended")]),
    )
