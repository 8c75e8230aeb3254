from __future__ import annotations

from typing import Any

from django import forms
from django.db.models import QuerySet

from console.accounts.forms import ReasonMixin
from console.accounts.models import NAME_RULE
from console.accounts.principal import Principal
from console.fleet.models import NAME, Driver
from console.orgs.models import Org
from console.orgs.services import get_org
from console.routing.models import (
    API_KEY_MAX,
    COUNT_MAX,
    FOLDER_MAX,
    MODEL_MAX,
    URL,
    Engine,
    Replica,
    ServedModel,
)
from inference_brain.desired import PER_MINUTE_MAX, SECONDS_MAX, TOKENS_MAX, Limits

ALL = "all"
ORGS_TEXT_MAX = 100_000
NAMED = "Lower-case letters, digits, dots, dashes and underscores. Can't be changed."
UNLIMITED = forms.NumberInput(attrs={"placeholder": "no limit"})


class ModelForm(ReasonMixin):
    model = forms.CharField(
        max_length=MODEL_MAX,
        label="Model",
        help_text="What clients send as “model”, e.g. meta-llama/Llama-3.1-8B-Instruct.",
    )
    tokens_max = forms.IntegerField(
        min_value=1,
        max_value=TOKENS_MAX,
        initial=131_072,
        label="Context length",
        help_text="Tokens of a prompt and its answer, at most. Longer requests get a 400.",
    )
    tokenizer = forms.CharField(
        max_length=FOLDER_MAX,
        required=False,
        help_text="Folder on the brains' machines with tokenizer.json and a chat template. Empty: "
        "prompts are sent on as text, and requests are placed by load only.",
    )
    orgs = forms.CharField(
        max_length=ORGS_TEXT_MAX,
        initial=ALL,
        help_text="Comma-separated short names, or “all” for all orgs, also those to come.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)
    field_order = ["name", "model", "tokens_max", "tokenizer", "orgs", "reason"]

    @classmethod
    def of(cls, model: ServedModel, data: Any = None) -> ModelForm:
        orgs = ALL if model.for_all_orgs else ", ".join(model.org_slugs())
        kept = ("model", "tokens_max", "tokenizer", "version")
        return cls(data, initial={**{name: getattr(model, name) for name in kept}, "orgs": orgs})

    def values(self) -> dict[str, Any]:
        return {name: self.cleaned_data[name] for name in ("model", "tokens_max", "tokenizer")}


class NewModelForm(ModelForm):
    name = forms.RegexField(
        NAME,
        max_length=63,
        label="Short name",
        help_text=f"For addresses. {NAMED}",
        error_messages={"invalid": NAME_RULE},
    )


def orgs_of(principal: Principal, text: str) -> list[Org] | None:
    """None for all. Raises Http404 for one that is not there."""
    if text.strip() == ALL:
        return None
    slugs = {slug.strip() for slug in text.split(",")} - {""}
    return [get_org(principal, slug) for slug in sorted(slugs)]


class ReplicaForm(ReasonMixin):
    url = forms.RegexField(
        URL,
        max_length=500,
        label="URL",
        help_text="Of its OpenAI API, e.g. http://10.0.0.21:8000.",
        error_messages={"invalid": "http:// or https://, a host, and no query or user."},
    )
    engine = forms.ChoiceField(
        choices=Engine.choices,
        initial=Engine.VLLM,
        help_text="“Other” is any other server with OpenAI's API.",
    )
    driver = forms.ModelChoiceField(
        Driver.objects.none(),
        to_field_name="name",
        required=False,
        empty_label="none: its cache is guessed at",
        help_text="The Tidegate driver in, or beside, this engine.",
    )
    served_as = forms.CharField(
        max_length=MODEL_MAX,
        required=False,
        label="Served as",
        help_text="What the engine calls the model, if that is another name.",
    )
    api_key = forms.CharField(
        max_length=API_KEY_MAX,
        required=False,
        label="API key of the engine",
        widget=forms.PasswordInput(attrs={"autocomplete": "off"}),
        help_text="If it wants one. Stored sealed, and never shown again. Empty: no change.",
    )
    draining = forms.BooleanField(
        required=False, label="Draining", help_text="It gets no new requests; running ones finish."
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)
    field_order = ["name", "url", "engine", "driver", "served_as", "api_key", "draining", "reason"]

    def __init__(self, *arguments: Any, drivers: QuerySet[Driver], **named: Any) -> None:
        super().__init__(*arguments, **named)
        field = self.fields["driver"]
        if isinstance(field, forms.ModelChoiceField):
            field.queryset = drivers

    @classmethod
    def of(cls, replica: Replica, drivers: QuerySet[Driver], data: Any = None) -> ReplicaForm:
        kept = ("url", "engine", "served_as", "draining", "version")
        driver = replica.driver.name if replica.driver else None
        initial = {**{name: getattr(replica, name) for name in kept}, "driver": driver}
        return cls(data, drivers=drivers, initial=initial)

    def values(self) -> dict[str, Any]:
        named = ("url", "engine", "driver", "served_as", "draining")
        said = {name: self.cleaned_data[name] for name in named}
        key = self.cleaned_data["api_key"]
        return {**said, "api_key": key} if key else said


class NewReplicaForm(ReplicaForm):
    name = forms.RegexField(NAME, max_length=63, help_text=NAMED, error_messages={"invalid": NAME_RULE})


class TypedForm(ReasonMixin):
    """For removing something that has a name."""

    typed = forms.CharField(max_length=63, label="Type the name to confirm")
    field_order = ["typed", "reason"]


class LimitsForm(ReasonMixin):
    requests_per_minute = forms.IntegerField(
        min_value=1, max_value=PER_MINUTE_MAX, required=False, widget=UNLIMITED
    )
    tokens_per_minute = forms.IntegerField(
        min_value=1,
        max_value=PER_MINUTE_MAX,
        required=False,
        widget=UNLIMITED,
        help_text="Of prompts and answers, cached ones included.",
    )
    concurrent = forms.IntegerField(
        min_value=1,
        max_value=COUNT_MAX,
        required=False,
        label="Concurrent requests",
        widget=UNLIMITED,
        help_text="In progress or waiting, over all brains; further ones get 429.",
    )
    queued = forms.IntegerField(
        min_value=0,
        max_value=COUNT_MAX,
        label="Queued requests",
        help_text="That may wait; further ones get 429 at once.",
    )
    wait_seconds = forms.FloatField(
        min_value=0.001,
        max_value=SECONDS_MAX,
        label="Wait, seconds",
        help_text="In the queue, at most; then the request gets 503.",
    )
    weight = forms.IntegerField(
        min_value=1,
        max_value=COUNT_MAX,
        help_text="Share of replicas that other orgs want as well: 200 gets twice the tokens of 100.",
    )
    priority = forms.IntegerField(
        min_value=0,
        max_value=100,
        label="Highest priority",
        help_text="That its requests may name. Higher ones are served first within the org.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput)

    field_order = [*Limits.__struct_fields__, "reason"]

    def limits(self) -> Limits:
        return Limits(**{name: self.cleaned_data[name] for name in Limits.__struct_fields__})
