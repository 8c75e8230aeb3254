from __future__ import annotations

from typing import Any

from django import forms
from django.core.validators import RegexValidator
from django.db.models import QuerySet

from console.accounts.forms import OrgsMixin, ReasonMixin, org_field
from console.fleet.models import Driver, Node
from console.orgs.models import SLUG, SLUG_RULE
from console.sessions.driver_orgs import ALL, NAMED_MAX, OWN, Said
from console.sessions.models import (
    BORROWS,
    BOXES_MAX,
    PATHS,
    QUOTAS,
    REDUNDANCIES,
    REPLACE_LOST_AFTER_SECONDS_MAX,
    WAIT_SECONDS_MAX,
)

WAIT_MINUTES_MAX = WAIT_SECONDS_MAX // 60
ORGS = r"^[a-z0-9, -]*$"
AS_THE_RULES_SAY = [("", "default of the rules"), *PATHS]


class FilterForm(forms.Form):
    """The filters of the list of sessions; all of them live in the address, as in the API."""

    org = forms.CharField(
        max_length=48, required=False, widget=forms.TextInput(attrs={"placeholder": "short name"})
    )
    waiting = forms.NullBooleanField(
        required=False,
        label="State",
        widget=forms.Select(choices=[("", "all"), ("true", "waiting"), ("false", "not waiting")]),
    )


class PlannedForm(ReasonMixin):
    """Something that is planned first, and may wait for its place."""

    wait_minutes = forms.IntegerField(
        min_value=0,
        max_value=WAIT_MINUTES_MAX,
        initial=0,
        label="Wait for capacity, in minutes",
        help_text="0: reject the request if there is no capacity now.",
    )
    plan_token = forms.CharField(max_length=64, required=False, widget=forms.HiddenInput)


class ResizeForm(PlannedForm):
    boxes = forms.IntegerField(min_value=1, max_value=BOXES_MAX)
    version = forms.IntegerField(widget=forms.HiddenInput)
    field_order = ["boxes", "wait_minutes", "reason"]


class NewSessionForm(OrgsMixin, PlannedForm):
    name = forms.RegexField(
        SLUG,
        max_length=48,
        help_text="Lower-case letters, digits and dashes. Can't be changed later.",
        error_messages={"invalid": SLUG_RULE},
    )
    org = org_field("shared between orgs", help_text="Its rules and quota apply.")
    boxes = forms.IntegerField(min_value=1, max_value=BOXES_MAX, initial=2)
    path = forms.ChoiceField(
        choices=AS_THE_RULES_SAY, required=False, help_text="Can only be stricter than the rules."
    )
    kib_per_token = forms.IntegerField(
        min_value=1,
        max_value=1 << 20,
        initial=64,
        label="KiB per token",
        help_text="Estimate for one job on all boxes, used for plans until a job is registered.",
    )
    field_order = ["name", "org", "boxes", "path", "kib_per_token", "wait_minutes", "reason"]


class OrgsField(forms.CharField):
    """`all`, `session`, or short names of orgs, with commas."""

    default_validators = [RegexValidator(ORGS, "Short names with commas, “all” or “session”.")]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_length=50 * NAMED_MAX, label="Orgs", **kwargs)

    def clean(self, value: Any) -> Said | None:
        said = str(super().clean(value)).strip()
        if said in (ALL, OWN):
            return ALL if said == ALL else OWN
        names = [name.strip() for name in said.split(",") if name.strip()]
        return names or None


class DriverOrgsForm(ReasonMixin):
    orgs = OrgsField(
        help_text="Comma-separated short names; “session” for the org of its session; “all” for all "
        "orgs, also those to come."
    )
    version = forms.IntegerField(widget=forms.HiddenInput)
    field_order = ["orgs", "reason"]


class JobForm(PlannedForm):
    name = forms.RegexField(
        SLUG,
        max_length=48,
        help_text="Lower-case letters, digits and dashes.",
        error_messages={"invalid": SLUG_RULE},
    )
    driver = forms.ModelChoiceField(
        Driver.objects.none(),
        to_field_name="name",
        empty_label=None,
        help_text="A driver that has joined and has no job.",
    )
    boxes = forms.CharField(
        required=False,
        max_length=2000,
        help_text="Comma-separated names. Empty: as many as the model needs.",
    )
    orgs = OrgsField(
        required=False,
        help_text="Whose secrets the driver is told: comma-separated short names, or “all”. Empty: the "
        "session's org.",
    )
    field_order = ["name", "driver", "orgs", "boxes", "wait_minutes", "reason"]

    def __init__(self, *args: Any, drivers: QuerySet[Driver], are_named: bool, **kwargs: Any) -> None:
        """`are_named`: whether they are offered by name; else a name has to be known, and is typed."""
        super().__init__(*args, **kwargs)
        field = self.fields["driver"]
        if isinstance(field, forms.ModelChoiceField):
            if not are_named:
                field.widget = forms.TextInput(attrs={"autocomplete": "off"})
            field.queryset = drivers.filter(job=None)

    def clean_boxes(self) -> list[str]:
        return [name.strip() for name in str(self.cleaned_data["boxes"]).split(",") if name.strip()]


class MoveForm(ReasonMixin):
    stream = forms.ChoiceField(label="Stream")
    # Of a thousand nodes nobody scrolls to one: its name is typed, and the browser offers what fits.
    node = forms.ModelChoiceField(
        Node.objects.none(),
        to_field_name="name",
        label="To node",
        widget=forms.TextInput(attrs={"list": "nodes-ready", "autocomplete": "off"}),
    )
    field_order = ["stream", "node", "reason"]

    def __init__(self, *args: Any, streams: list[str], nodes: QuerySet[Node], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stream, node = self.fields["stream"], self.fields["node"]
        if isinstance(stream, forms.ChoiceField):
            stream.choices = [(name, name) for name in streams]
        if isinstance(node, forms.ModelChoiceField):
            node.queryset = nodes.filter(state="ready").order_by("name")


class DeleteForm(ReasonMixin):
    typed = forms.CharField(max_length=48, label="Type the session's name to confirm")
    end_jobs = forms.BooleanField(required=False, label="Also end its jobs")
    field_order = ["typed", "end_jobs", "reason"]


class RemovalForm(ReasonMixin):
    """For removing a driver, by who has seen what becomes of it."""

    typed = forms.CharField(max_length=63, label="Type the driver's name to confirm")
    plan_token = forms.CharField(max_length=64, widget=forms.HiddenInput)
    field_order = ["typed", "reason"]


class DrainBoxForm(ReasonMixin):
    """Why a box is drained."""


class DrainForm(ReasonMixin):
    """For draining a node."""

    ignore_redundancy = forms.BooleanField(
        required=False,
        label="Ignore redundancy",
        help_text="Go on where columns that are stored redundantly could be lost.",
    )


class UpgradeForm(DrainForm):
    """For upgrading a node, which drains it first."""

    version = forms.RegexField(
        r"^[\x21-\x7e]*$",
        max_length=60,
        required=False,
        label="Upgrade to",
        error_messages={"invalid": "A version has no blanks, and only characters of ASCII."},
        help_text="A version. Empty: any version other than the current one.",
    )
    field_order = ["reason", "version", "ignore_redundancy"]


class RulesForm(ReasonMixin):
    path = forms.ChoiceField(choices=PATHS, label="Path")
    refuse_spine = forms.BooleanField(
        required=False,
        label="Refuse the spine",
        help_text="No stream crosses the spine, whatever sessions request.",
    )
    wait_for_rail_seconds = forms.IntegerField(
        min_value=0,
        max_value=WAIT_SECONDS_MAX,
        label="Wait for a rail, in seconds",
        help_text="After that, sessions that prefer rails use the spine.",
    )
    boxes_min = forms.IntegerField(min_value=1, max_value=BOXES_MAX, label="Minimum boxes")
    boxes_increment = forms.IntegerField(min_value=1, max_value=BOXES_MAX, label="Increment, in boxes")
    boxes_max = forms.IntegerField(
        min_value=1, max_value=BOXES_MAX, required=False, label="Maximum boxes"
    )
    moves_percent = forms.IntegerField(
        min_value=1,
        max_value=100,
        label="Bytes that can wait, in percent of each link",
        help_text="Streams that move over it, fragments, and what is written to shared tier 2, "
        "together. Evicts and refills have the rest.",
    )
    borrow = forms.ChoiceField(
        choices=BORROWS,
        label="Siblings' memory",
        help_text="How far drivers copy columns from the memory of other drivers of their model.",
    )
    redundancy = forms.ChoiceField(
        choices=REDUNDANCIES,
        label="Redundancy of tier 2",
        help_text="Columns are divided into fragments with data + with parity. Each is stored by "
        "another agent, on a disk of its own.",
    )
    grant_percent = forms.IntegerField(
        min_value=1,
        max_value=100,
        label="Memory grant, in percent of the fair share",
        help_text="A lower grant leaves room, so that more streams find a rail.",
    )
    boxes_quota = forms.IntegerField(
        min_value=0,
        max_value=BOXES_MAX,
        required=False,
        label="Box quota",
        help_text="For all sessions of the org. Set by a platform admin.",
    )
    replicas_quota = forms.IntegerField(
        min_value=0,
        max_value=BOXES_MAX,
        required=False,
        label="Replica quota",
        help_text="For all workloads of the org. Set by a platform admin.",
    )
    replace_lost = forms.BooleanField(
        required=False,
        label="Replace lost nodes",
        help_text="Streams of a node that is lost are placed on other nodes.",
    )
    replace_lost_after_seconds = forms.IntegerField(
        min_value=0,
        max_value=REPLACE_LOST_AFTER_SECONDS_MAX,
        label="Replace lost nodes after, in seconds",
        help_text="A node that returns earlier keeps its streams and their memory.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput)
    field_order = [
        *("path", "refuse_spine", "wait_for_rail_seconds", "boxes_min", "boxes_increment"),
        *("boxes_max", "grant_percent", *QUOTAS, "moves_percent", "borrow", "redundancy"),
        *("replace_lost", "replace_lost_after_seconds"),
        "reason",
    ]

    def __init__(self, *args: Any, has_quota: bool, may_set_quota: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for quota in QUOTAS:
            if not has_quota:
                del self.fields[quota]
            elif not may_set_quota:
                self.fields[quota].disabled = True
