from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone

from console.accounts.forms import ReasonMixin
from console.alerts.bulk import Verb
from console.alerts.catalogue import RULES
from console.alerts.life import State
from console.alerts.matching import BadMatcher, parse, split
from console.alerts.models import Channel
from console.alerts.rules import Rule, Severity, Values
from console.orgs.models import Org

STATES = [("open", "open"), ("all", "all"), *((one.value, one.replace("_", " ")) for one in State)]
HOURS = [(1, "1 hour"), (4, "4 hours"), (24, "a day"), (24 * 7, "a week"), (24 * 30, "30 days")]
SEVERITIES = [(one.value, one.value) for one in Severity]


class MatchersField(forms.CharField):
    """Matchers on one line, apart by commas."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=1000, **options)

    def prepare_value(self, value: Any) -> Any:
        return ", ".join(value) if isinstance(value, list) else value

    def clean(self, value: Any) -> list[str]:
        try:
            return [str(one) for one in parse(split(super().clean(value)))]
        except BadMatcher as error:
            raise ValidationError(str(error)) from None


class OrgsMixin(forms.Form):
    """The orgs to choose from are those that somebody may see."""

    def __init__(self, *args: Any, orgs: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields.get("org")
        if isinstance(field, forms.ModelChoiceField):
            field.queryset = orgs


def org_field(empty: str, **options: Any) -> Any:
    return forms.ModelChoiceField(
        Org.objects.none(), required=False, empty_label=empty, to_field_name="slug", **options
    )


class FilterForm(OrgsMixin):
    """The filters of the list; all of them live in the address."""

    q = forms.CharField(max_length=120, required=False, label="Search")
    state = forms.ChoiceField(choices=STATES, required=False)
    severity = forms.ChoiceField(choices=[("", "all"), *SEVERITIES], required=False)
    rule = forms.ChoiceField(
        choices=[("", "all"), *((rule.slug, rule.slug) for rule in RULES)], required=False
    )
    org = org_field("all")
    topic = forms.CharField(max_length=240, required=False, help_text="node:ax-7, org:acme")
    hidden = forms.BooleanField(required=False, label="Explained ones, too")


class AcknowledgeForm(forms.Form):
    reason = forms.CharField(max_length=500, required=False, label="What you are doing about it")


class BulkForm(forms.Form):
    """What becomes of the alerts that are chosen in the list."""

    verb = forms.ChoiceField(choices=[(one.value, one.value) for one in Verb])
    username = forms.CharField(max_length=63, required=False)
    hours = forms.TypedChoiceField(coerce=int, choices=HOURS, required=False, empty_value=None)
    reason = forms.CharField(max_length=500, required=False)

    @property
    def ends_at(self) -> datetime | None:
        hours = self.cleaned_data["hours"]
        return timezone.now() + timedelta(hours=hours) if hours else None


class CommentForm(forms.Form):
    text = forms.CharField(
        max_length=2000, label="Comment", widget=forms.Textarea(attrs={"rows": 3, "data-press": "c"})
    )


class AssignForm(forms.Form):
    username = forms.CharField(max_length=63, required=False, label="Assign to")


class SilenceForm(OrgsMixin):
    org = org_field("all orgs, and the platform", label="Alerts of")
    matchers = MatchersField(
        label="That match",
        help_text="All of them, with commas; * is anything: node=ax-7, rule=tier2-*, severity!=page.",
    )
    hours = forms.TypedChoiceField(coerce=int, choices=HOURS, initial=4, label="For")
    reason = forms.CharField(max_length=500, label="Why", help_text="Others will wonder.")

    @property
    def length(self) -> timedelta:
        return timedelta(hours=self.cleaned_data["hours"])


class ThresholdsForm(ReasonMixin):
    """A field for each limit of a rule. What is empty is as it is without it."""

    enabled = forms.BooleanField(required=False, label="Evaluated")

    def __init__(self, *args: Any, rule: Rule, inherited: Values, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rule = rule
        for limit in rule.limits:
            self.fields[limit.name] = forms.FloatField(
                required=False,
                min_value=limit.low,
                max_value=limit.high,
                label=limit.name.replace("_", " ").capitalize(),
                help_text=limit.text,
                widget=forms.NumberInput(
                    attrs={"placeholder": f"{inherited[limit.name]:g}", "step": "any"}
                ),
            )
        self.order_fields([*(limit.name for limit in rule.limits), "enabled", "reason"])

    @property
    def values(self) -> dict[str, float]:
        given = {limit.name: self.cleaned_data.get(limit.name) for limit in self.rule.limits}
        return {name: value for name, value in given.items() if value is not None}


class ChannelForm(OrgsMixin, ReasonMixin):
    name = forms.CharField(max_length=120)
    address = forms.CharField(
        max_length=2000,
        required=False,
        help_text="A URL, or e-mail addresses. PagerDuty has its own. Never shown again.",
    )
    secret = forms.CharField(
        max_length=500,
        required=False,
        help_text="PagerDuty's integration key, or what a webhook is signed with. Never shown again.",
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )
    least_severity = forms.ChoiceField(
        choices=SEVERITIES, initial="ticket", label="From this severity on"
    )
    matchers = MatchersField(
        required=False, label="Only what matches", help_text="Empty for all; else as for silences."
    )
    tells_end = forms.BooleanField(required=False, initial=True, label="Also told when it is over")
    enabled = forms.BooleanField(required=False, initial=True)
    field_order = ["name", "kind", "org", "address", "secret", "least_severity", "matchers"]


class NewChannelForm(ChannelForm):
    kind = forms.ChoiceField(choices=Channel.Kind.choices)
    org = org_field("all orgs, and the platform", label="Alerts of")
