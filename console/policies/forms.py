from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from console.policies import documents, quantities, words
from console.policies.documents import Limits, Malformed
from console.policies.models import REASON_MAX
from swdriver_shim.policy import PRIORITY_MAX, Policy, Tiers

EVICTIONS = [
    ("default", "the default: what is learned to come back last"),
    ("lru", "lru: what was used longest ago"),
    ("lfu", "lfu: what was used least often"),
    ("slru", "slru: what was used once, before what was used twice"),
    ("s3fifo", "s3fifo: what was not used again, in order of arrival"),
    ("cost", "cost: what is cheapest to compute again"),
]


class QuantityField(forms.CharField):
    """A time or a size as people write it; None where nothing is written."""

    def __init__(
        self, read: Callable[[str], int], show: Callable[[int], str], none: str, **more: Any
    ) -> None:
        super().__init__(
            max_length=40,
            required=False,
            widget=forms.TextInput(attrs={"placeholder": none, "autocomplete": "off"}),
            **more,
        )
        self._read, self._show = read, show

    def prepare_value(self, value: Any) -> Any:
        return self._show(value) if isinstance(value, int) else value

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        if not text:
            return None
        try:
            return self._read(text)
        except quantities.NotOne as error:
            raise ValidationError(str(error)) from None


def time_field(label: str, help_text: str) -> QuantityField:
    none = "as long as there is room"
    return QuantityField(
        quantities.seconds_of, quantities.as_time, none, label=label, help_text=help_text
    )


def size_field(label: str, help_text: str) -> QuantityField:
    none = "no limit"
    return QuantityField(quantities.bytes_of, quantities.as_size, none, label=label, help_text=help_text)


class PolicyForm(forms.Form):
    """The fields of one policy, which the definition and the limits have the last word on."""

    ttl_last_use_seconds = time_field("Gone after its last use", "10 min, say. Each use starts it anew.")
    ttl_first_use_seconds = time_field("Gone after it was stored", "However often it is used.")
    tiers = forms.ChoiceField(
        label=words.LABELS["tiers"], choices=[(tier.value, words.TIERS[tier]) for tier in Tiers]
    )
    dram_bytes_max = size_field("Memory at most", "64 GiB, say, on each driver. Never exceeded.")
    tier2_bytes_max = size_field("Tier 2 at most", "Of files, at each agent.")
    share = forms.IntegerField(
        min_value=1,
        max_value=1_000_000,
        label=words.LABELS["share"],
        help_text="A weight against other orgs' shares. Who is furthest above theirs pays first.",
    )
    priority = forms.IntegerField(
        min_value=0,
        max_value=PRIORITY_MAX,
        label=words.LABELS["priority"],
        help_text="0 to 100. Lower ones go first.",
    )
    eviction = forms.ChoiceField(label=words.LABELS["eviction"], choices=EVICTIONS)
    encrypt_tier2 = forms.BooleanField(
        required=False,
        label="Encrypt what lies in tier 2",
        help_text="With the org's own key. Destroying that empties its files.",
    )
    scrub = forms.BooleanField(
        required=False, label="Overwrite what goes", help_text="With zeros, in memory."
    )

    def __init__(self, *args: Any, limits: Limits | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.policy: Policy | None = None  # what was said, if it may be said

    def clean(self) -> None:
        if self.errors:
            return
        raw = {name: self.cleaned_data[name] for name in documents.FIELDS}
        try:
            policy = documents.read_struct(raw, Policy)
        except Malformed as error:
            self.add_error(error.at if error.at in self.fields else None, str(error))
            return
        for field, sentence in self.limits.crossed_by(policy) if self.limits else ():
            self.add_error(field, sentence)
        self.policy = None if self.errors else policy

    @staticmethod
    def initial_of(policy: Policy) -> Mapping[str, Any]:
        return {**documents.spelled_out(policy)}


class EditorForm(PolicyForm):
    """An org's policy, or that of one of its models, and why."""

    reason = forms.CharField(
        max_length=REASON_MAX, label="Why", help_text="Stands in the history, beside your name."
    )
    version = forms.IntegerField(min_value=0, max_value=2**31 - 1, widget=forms.HiddenInput)
    model = forms.CharField(max_length=200, required=False, widget=forms.HiddenInput)
    starts_at = forms.DateTimeField(
        required=False,
        label="From",
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
        help_text="UTC. Empty: at once.",
    )
    lasts = time_field("For", "48 h, say; then it is as it was before. Empty: until it is changed.")


class ModelForm(forms.Form):
    model = forms.CharField(
        max_length=200, label="Model", help_text="As drivers name it: llama-70b, say."
    )
