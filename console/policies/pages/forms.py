from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from console.accounts.forms import utc_field
from console.policies import documents, sentences
from console.policies.documents import Limits, Malformed
from console.policies.models import REASON_MAX
from swdriver_shim.policy import PRIORITY_MAX, STORE_TOKENS_MAX, TTL_SECONDS_MAX, Policy, Tiers
from telemetry import units

DISPLACEMENTS = [
    ("default", "default: the best one for the traffic"),
    ("lru", "lru: least recently used first"),
    ("lfu", "lfu: least frequently used first"),
    ("slru", "slru: used once before used twice"),
    ("s3fifo", "s3fifo: oldest without a second use first"),
    ("arc", "arc: used once or used more often, adaptively"),
    ("cost", "cost: least expected savings first"),
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
        except units.Unreadable as error:
            raise ValidationError(str(error)) from None


# A time to live, within the bounds of its definition.
read_ttl = partial(units.parse_seconds, low=1, high=TTL_SECONDS_MAX)


def ttl_field(label: str, help_text: str) -> QuantityField:
    return QuantityField(read_ttl, units.exact_duration, "never", label=label, help_text=help_text)


def size_field(label: str, help_text: str) -> QuantityField:
    none = "no limit"
    return QuantityField(units.parse_size, units.exact_size, none, label=label, help_text=help_text)


class PolicyForm(forms.Form):
    """The fields of one policy, which the definition and the limits have the last word on."""

    ttl_last_use_seconds = ttl_field(
        sentences.LABELS["ttl_last_use_seconds"], "For example 10 min. Each use restarts it."
    )
    ttl_first_use_seconds = ttl_field(sentences.LABELS["ttl_first_use_seconds"], "Regardless of use.")
    tiers = forms.ChoiceField(
        label=sentences.LABELS["tiers"], choices=[(tier.value, sentences.TIERS[tier]) for tier in Tiers]
    )
    dram_bytes_max = size_field(
        sentences.LABELS["dram_bytes_max"], "For example 64 GiB, on each driver."
    )
    tier2_bytes_max = size_field(sentences.LABELS["tier2_bytes_max"], "Files at each agent.")
    share = forms.IntegerField(
        min_value=1,
        max_value=1_000_000,
        label=sentences.LABELS["share"],
        help_text="Relative to other orgs. Orgs furthest above their share are displaced first.",
    )
    priority = forms.IntegerField(
        min_value=0,
        max_value=PRIORITY_MAX,
        label=sentences.LABELS["priority"],
        help_text="0 to 100. Lower priorities are displaced first.",
    )
    displacement = forms.ChoiceField(label=sentences.LABELS["displacement"], choices=DISPLACEMENTS)
    encrypt_tier2 = forms.BooleanField(
        required=False,
        label="Encrypt tier 2",
        help_text="With the org's own key. Destroying the key makes the files unreadable.",
    )
    scrub = forms.BooleanField(
        required=False,
        label="Scrub on delete",
        help_text="Overwrite memory with zeros when columns are deleted.",
    )

    store_tokens_max = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=STORE_TOKENS_MAX,
        label=sentences.LABELS["store_tokens_max"],
        widget=forms.NumberInput(attrs={"placeholder": "no limit"}),
        help_text="From its start, such as the system prefix that prompts share. Empty: all.",
    )
    redundant_from_priority = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=PRIORITY_MAX,
        label=sentences.LABELS["redundant_from_priority"],
        widget=forms.NumberInput(attrs={"placeholder": "none"}),
        help_text="0 to 100; 0: all columns. Where the session's rules have redundancy, such columns "
        "survive the loss of an agent.",
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
        max_length=REASON_MAX, label="Reason", help_text="Shown in the history with your name."
    )
    version = forms.IntegerField(min_value=0, max_value=2**31 - 1, widget=forms.HiddenInput)
    model = forms.CharField(max_length=200, required=False, widget=forms.HiddenInput)
    starts_at = utc_field("Starts at", "UTC. Empty: immediately.")
    lasts = QuantityField(
        partial(units.parse_seconds, low=1),
        units.exact_duration,
        none="permanent",
        label="Duration",
        help_text="For example 48 h, then the previous policy returns. Empty: permanent.",
    )

    def __init__(self, *args: Any, problem: str = "", **kwargs: Any) -> None:
        """`problem`: why this policy can't be saved, whatever its fields are."""
        super().__init__(*args, **kwargs)
        self._problem = problem

    def clean(self) -> None:
        if self._problem:
            self.add_error(None, self._problem)
        super().clean()


class ModelForm(forms.Form):
    model = forms.CharField(
        max_length=200, label="Model", help_text="As drivers name it, e.g. llama-70b."
    )


UNCHANGED = ("", "unchanged")
YES_OR_NO = [UNCHANGED, ("yes", "yes"), ("no", "no")]
NONE = "none"


class ChangedQuantityField(QuantityField):
    """Nothing written: unchanged. `none`: no limit."""

    def __init__(self, read: Callable[[str], int], show: Callable[[int], str], **more: Any) -> None:
        super().__init__(read, show, UNCHANGED[1], **more)

    def clean(self, value: Any) -> Any:
        return NONE if str(value or "").strip().lower() == NONE else super().clean(value)


def _tokens(text: str) -> int:
    return _number(text, STORE_TOKENS_MAX, "A number of tokens, up to")


def _priority(text: str) -> int:
    return _number(text, PRIORITY_MAX, "A priority, up to")


def _number(text: str, most: int, what: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > most:
        raise units.Unreadable(f"{what} {most:,}.")
    return int(text)


def _changed_time(name: str) -> ChangedQuantityField:
    return ChangedQuantityField(read_ttl, units.exact_duration, label=sentences.LABELS[name])


def _changed_size(name: str) -> ChangedQuantityField:
    return ChangedQuantityField(units.parse_size, units.exact_size, label=sentences.LABELS[name])


class BulkForm(forms.Form):
    """Only what is written changes, for all of the chosen orgs."""

    ttl_last_use_seconds = _changed_time("ttl_last_use_seconds")
    ttl_first_use_seconds = _changed_time("ttl_first_use_seconds")
    tiers = forms.ChoiceField(
        required=False,
        label=sentences.LABELS["tiers"],
        choices=[UNCHANGED, *((tier.value, sentences.TIERS[tier]) for tier in Tiers)],
    )
    dram_bytes_max = _changed_size("dram_bytes_max")
    tier2_bytes_max = _changed_size("tier2_bytes_max")
    share = forms.IntegerField(
        required=False, min_value=1, max_value=1_000_000, label=sentences.LABELS["share"]
    )
    priority = forms.IntegerField(
        required=False, min_value=0, max_value=PRIORITY_MAX, label=sentences.LABELS["priority"]
    )
    displacement = forms.ChoiceField(
        required=False, label=sentences.LABELS["displacement"], choices=[UNCHANGED, *DISPLACEMENTS]
    )
    encrypt_tier2 = forms.ChoiceField(
        required=False, label=sentences.LABELS["encrypt_tier2"], choices=YES_OR_NO
    )
    scrub = forms.ChoiceField(required=False, label=sentences.LABELS["scrub"], choices=YES_OR_NO)
    store_tokens_max = ChangedQuantityField(_tokens, str, label=sentences.LABELS["store_tokens_max"])
    redundant_from_priority = ChangedQuantityField(
        _priority, str, label=sentences.LABELS["redundant_from_priority"]
    )
    reason = forms.CharField(
        max_length=REASON_MAX,
        required=False,
        label="Reason",
        help_text="Required to save. Shown in each org's history with your name.",
    )
    token = forms.CharField(required=False, max_length=64, widget=forms.HiddenInput)

    def changes(self) -> dict[str, Any]:
        """Of a valid form: the fields that are to have another value."""
        read = {"yes": True, "no": False, NONE: None}
        told = {name: self.cleaned_data[name] for name in documents.FIELDS}
        return {
            name: read.get(value, value) if isinstance(value, str) else value
            for name, value in told.items()
            if value not in (None, "")
        }


class ClusterForm(forms.Form):
    """The limits, beside the fields of the default."""

    ttl_last_use_seconds_max = ttl_field("Expire after last use, at most", "Empty: no limit.")
    ttl_first_use_seconds_max = ttl_field("Expire after first store, at most", "Empty: no limit.")
    tiers_max = forms.ChoiceField(
        label="Storage tiers, at most", choices=[(tier.value, sentences.TIERS[tier]) for tier in Tiers]
    )
    dram_bytes_max = size_field("Memory per org, at most", "On each driver.")
    tier2_bytes_max = size_field("Tier 2 per org, at most", "At each agent.")
    share_max = forms.IntegerField(min_value=1, max_value=1_000_000, label="Share, at most")
    priority_max = forms.IntegerField(min_value=0, max_value=PRIORITY_MAX, label="Priority, at most")

    def limits(self) -> Limits:
        """Of a valid form."""
        return documents.read_struct(dict(self.cleaned_data), Limits)


class ClusterReasonForm(forms.Form):
    reason = forms.CharField(
        max_length=REASON_MAX, label="Reason", help_text="Recorded in the audit trail with your name."
    )
    version = forms.IntegerField(min_value=0, max_value=2**31 - 1, widget=forms.HiddenInput)


class CallerForm(forms.Form):
    name = forms.CharField(max_length=120, help_text="What it is for, e.g. “chat app”.")


class PurgeForm(forms.Form):
    model = forms.CharField(
        max_length=200, required=False, label="Model", help_text="Empty: all models."
    )
    reason = forms.CharField(max_length=REASON_MAX, label="Reason", help_text="Recorded on the receipt.")
    typed = forms.CharField(max_length=48, label="Type the org's short name to confirm")
