from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone

from console.accounts.forms import OrgsMixin, ReasonMixin, org_field
from console.alerts.bulk import Verb
from console.alerts.conditions.condition import Values
from console.alerts.models import Channel
from console.alerts.rules.catalogue import RULES
from console.alerts.rules.rule import Rule, Severity
from console.alerts.state.lifecycle import State
from console.alerts.state.matchers import BadMatcher, parse, split
from console.shell.forms import LinesField

STATES = [("open", "open"), ("all", "all"), *((one.value, one.replace("_", " ")) for one in State)]
HOURS = [(1, "1 hour"), (4, "4 hours"), (24, "1 day"), (24 * 7, "1 week"), (24 * 30, "30 days")]
SEVERITIES = [(one.value, one.value) for one in Severity]


class MatchersField(forms.CharField):
    """Comma-separated matchers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=1000, **options)

    def prepare_value(self, value: Any) -> Any:
        return ", ".join(value) if isinstance(value, list) else value

    def clean(self, value: Any) -> list[str]:
        try:
            return [str(one) for one in parse(split(super().clean(value)))]
        except BadMatcher as error:
            raise ValidationError(str(error)) from None


class FilterForm(OrgsMixin):
    """The filters of the list. They are stored in the URL."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    state = forms.ChoiceField(choices=STATES, required=False)
    severity = forms.ChoiceField(choices=[("", "all"), *SEVERITIES], required=False)
    rule = forms.ChoiceField(
        choices=[("", "all"), *((rule.slug, rule.title) for rule in RULES)], required=False
    )
    org = org_field("all")
    topic = forms.CharField(max_length=240, required=False, help_text="node:ax-7, org:acme")
    suppressed = forms.BooleanField(required=False, label="Include suppressed")


class AcknowledgeForm(forms.Form):
    reason = forms.CharField(max_length=500, required=False, label="Reason")


class BulkForm(forms.Form):
    """A bulk change of the selected alerts."""

    verb = forms.ChoiceField(choices=[(one.value, one.value) for one in Verb])
    username = forms.CharField(max_length=63, required=False)
    hours = forms.TypedChoiceField(coerce=int, choices=HOURS, required=False, empty_value=None)
    reason = forms.CharField(max_length=500, required=False)

    @property
    def ends_at(self) -> datetime | None:
        hours = self.cleaned_data["hours"]
        return timezone.now() + timedelta(hours=hours) if hours else None


class CommentForm(forms.Form):
    text = LinesField(
        max_length=2000, label="Comment", widget=forms.Textarea(attrs={"rows": 3, "data-press": "c"})
    )


class AssignForm(forms.Form):
    username = forms.CharField(max_length=63, required=False, label="Assign to")


class SilenceForm(OrgsMixin):
    org = org_field("all orgs and the platform", label="Scope")
    matchers = MatchersField(
        label="Matchers",
        help_text="Comma-separated; all must match. Wildcard: *. Example: node=ax-7, severity!=page.",
    )
    hours = forms.TypedChoiceField(coerce=int, choices=HOURS, initial=4, label="Duration")
    reason = forms.CharField(max_length=500, label="Reason")

    @property
    def duration(self) -> timedelta:
        return timedelta(hours=self.cleaned_data["hours"])


class ThresholdsForm(ReasonMixin):
    """A field for each threshold of a rule. An empty field inherits its value."""

    enabled = forms.BooleanField(required=False, label="Enabled")
    version = forms.IntegerField(widget=forms.HiddenInput)

    def __init__(self, *args: Any, rule: Rule, inherited: Values, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rule = rule
        for one in rule.thresholds:
            self.fields[one.name] = forms.FloatField(
                required=False,
                min_value=one.low,
                max_value=one.high,
                label=one.name.replace("_", " ").capitalize(),
                help_text=one.text,
                widget=forms.NumberInput(
                    attrs={"placeholder": f"{inherited[one.name]:.12g}", "step": "any"}
                ),
            )
        self.order_fields([*(one.name for one in rule.thresholds), "enabled", "reason"])

    @property
    def values(self) -> dict[str, float]:
        given = {one.name: self.cleaned_data.get(one.name) for one in self.rule.thresholds}
        return {name: value for name, value in given.items() if value is not None}


class ChannelForm(OrgsMixin, ReasonMixin):
    name = forms.CharField(max_length=120)
    address = forms.CharField(
        max_length=2000,
        required=False,
        help_text="A URL, or comma-separated e-mail addresses. Empty for PagerDuty. Not shown again.",
    )
    secret = forms.CharField(
        max_length=500,
        required=False,
        help_text="PagerDuty's integration key, or the signing secret of a webhook. Not shown again.",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )
    min_severity = forms.ChoiceField(choices=SEVERITIES, initial="ticket", label="Minimum severity")
    matchers = MatchersField(
        required=False, label="Matchers", help_text="Same format as for silences. Empty matches all."
    )
    send_resolved = forms.BooleanField(required=False, initial=True, label="Send resolved")
    enabled = forms.BooleanField(required=False, initial=True)
    field_order = ["name", "kind", "org", "address", "secret", "min_severity", "matchers"]


class ChangedChannelForm(ChannelForm):
    version = forms.IntegerField(widget=forms.HiddenInput)


class NewChannelForm(ChannelForm):
    kind = forms.ChoiceField(choices=Channel.Kind.choices)
    org = org_field("all orgs and the platform", label="Scope")
