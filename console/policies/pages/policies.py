from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Final

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.roles import Role
from console.orgs.models import Org
from console.orgs.services import changing, get_org
from console.policies import documents, rollout, schedule, sentences, services
from console.policies.pages.forms import EditorForm, ModelForm
from console.policies.pages.seen import check_seen, moved_on
from console.policies.presets import PRESETS
from console.policies.preview import curves, estimates
from console.policies.preview.estimates import Foretold
from console.policies.preview.routed import routed_hits
from console.policies.services import ActivePolicy
from console.shell.pages import Refusing, Telling, check_version
from console.visibility import Sight
from swdriver_shim.cache.displacement.competition import GAIN_MIN, NOISE
from swdriver_shim.policy import OrgPolicies, Policy, Tiers


@form_page
def edit(request: SignedInRequest, slug: str) -> HttpResponse:
    """The one page of an org's policy: what holds, who has it, and for admins the form."""
    org = get_org(request.principal, slug)
    held = services.active_policy(org)
    model = _model_of(request)
    if request.method == "POST":
        return _save(request, org)
    form = _form_of(held, model, initial=_initial(request, held, model))
    return _page(request, held, model, form)


QUOTAS: Final = ("dram_bytes_max", "tier2_bytes_max")


def _save(request: SignedInRequest, org: Org) -> HttpResponse:
    with changing(request.principal, org.slug) as org:
        held = services.active_policy(org)
        model = _model_of(request)
        form = _form_of(held, model, _as_asked(request))
        if "look" not in request.POST and form.is_valid() and form.policy is not None:
            with Refusing(form, ValidationError):
                stale = f"{moved_on(held)} Compare it with your changes, then save again."
                check_version(form, held.number, stale)
                if _saved(request, form, held, _edited(held, model, form.policy)):
                    return redirect("policy", org.slug)
    return _page(request, held, model, form)


def _as_asked(request: HttpRequest) -> QueryDict:
    """What the form says, with the quota of a sweet spot in place of its own where that was chosen."""
    said = request.POST.copy()
    field, is_chosen, value = said.get("look", "").partition("=")
    if is_chosen and field in QUOTAS:
        said[field] = value
    return said


def _saved(
    request: SignedInRequest, form: EditorForm, held: ActivePolicy, wanted: OrgPolicies | None
) -> bool:
    """Whether it went through; else the form says why not."""
    values = form.cleaned_data
    if values["lasts"] is not None and not values["starts_at"]:
        form.add_error("starts_at", "Say from when.")
        return False
    with Refusing(form, ValidationError):
        if values["starts_at"]:
            lasts = values["lasts"]
            schedule.schedule(
                request.principal,
                held.org,
                wanted,
                starts_at=values["starts_at"],
                lasts=None if lasts is None else timedelta(seconds=lasts),
                reason=values["reason"],
            )
            messages.success(request, "Scheduled. It takes effect at its start time.")
            return True
        after = services.set_policy(request.principal, held.org, wanted, reason=values["reason"])
        if after.number == held.number:
            messages.info(request, "Nothing has changed, so nothing was saved.")
        else:
            messages.success(request, f"Version {after.number} saved. It is sent to the drivers now.")
        return True
    return False


def _page(request: SignedInRequest, held: ActivePolicy, model: str, form: EditorForm) -> HttpResponse:
    may_change = request.principal.holds(Role.ORG_ADMIN, held.org.pk)
    context = {
        "org": held.org,
        "held": held,
        "model": model,
        "policy": held.policies.of(model),
        "sentence": sentences.sentence(held.policies.of(model)),
        "rows": _rows(held, model),
        "models": [(name, sentences.sentence(each)) for name, each in held.policies.models.items()],
        "form": form,
        "model_form": ModelForm(),
        "may_change": may_change,
        "may_prove": request.principal.holds(Role.ON_CALL, held.org.pk),
        "templates": PRESETS,
        "waiting": schedule.open_of(held.org),
        "reach": rollout.reach(request.principal, held),
        **(_preview_context(request, held, model, form) if may_change else {}),
    }
    return render(request, "policies/policy.html", context)


@post_page
def preview(request: SignedInRequest, slug: str) -> HttpResponse:
    """What the form would do, as a part of its page. Changes nothing."""
    held = services.active_policy(get_org(request.principal, slug, Role.ORG_ADMIN))
    model = _model_of(request)
    form = _form_of(held, model, request.POST)
    return render(request, "policies/preview.html", _preview_context(request, held, model, form))


@read_page
def show_reach(request: SignedInRequest, slug: str) -> HttpResponse:
    """Who has what is in force, as a part of pages."""
    held = services.active_policy(get_org(request.principal, slug))
    context = {"org": held.org, "reach": rollout.reach(request.principal, held)}
    return render(request, "policies/reach.html", context)


def _preview_context(
    request: SignedInRequest, held: ActivePolicy, model: str, form: EditorForm
) -> dict[str, Any]:
    now = held.policies.of(model)
    if form.is_bound:
        form.is_valid()
        wrong = [
            (form.fields[name].label if name in form.fields else "", error)
            for name, errors in form.errors.items()
            if name not in ("reason", "version")
            for error in errors
        ]
        proposed = form.policy or _policy_despite(form, held)
    else:
        wrong, proposed = [], _initial_policy(request, held, model)
    context = {"org": held.org, "held": held, "model": model, "wrong": wrong, "proposed": proposed}
    if wrong or proposed is None:
        return context
    edited = _edited(held, model, proposed)
    told = estimates.foretell(held.org, held.policies, edited, model)
    default = held.cluster.policies.default
    return {
        **context,
        "proposed_sentence": sentences.sentence(proposed),
        "differences": sentences.differences(now, proposed),
        "from_default": sentences.differences(default, proposed),
        "told": told,
        "contests": told.known.contests_for(Sight(request.principal)),
        "gain_min": GAIN_MIN,
        "errors_min": NOISE,
        "curves": _curves(told, now, proposed),
        "routed": routed_hits(held.org, told, held.policies, edited, model),
        "command": _command(request, held, edited),
    }


def _policy_despite(form: EditorForm, held: ActivePolicy) -> Policy | None:
    """What the fields say while there is no reason yet."""
    if set(form.errors) - {"reason", "version"}:
        return None
    values = {name: form.cleaned_data[name] for name in documents.FIELDS}
    policy = documents.read_struct(values, Policy)
    return None if list(held.cluster.policies.limits.crossed_by(policy)) else policy


def _curves(told: Foretold, now: Policy, proposed: Policy) -> list[curves.Curve]:
    drawn = (
        curves.by_time(told.preview.by_ttl, _ttl(now), _ttl(proposed)),
        curves.by_memory(
            told.preview.by_bytes,
            now.dram_bytes_max or told.preview.now.bytes,
            proposed.dram_bytes_max or told.preview.proposed.bytes,
        ),
        curves.by_tier2(
            told.preview.by_tier2_bytes,
            now.tier2_bytes_max,
            proposed.tier2_bytes_max,
            is_used_now=now.tiers is Tiers.TIER2,
        ),
    )
    return [curve for curve in drawn if curve is not None]


def _ttl(policy: Policy) -> int | None:
    """What the curve varies: the one from the last use, if there is one."""
    return policy.ttl_last_use_seconds or policy.ttl_first_use_seconds


def _command(request: HttpRequest, held: ActivePolicy, wanted: OrgPolicies) -> str:
    """The same by API, with only what differs from the software's defaults."""
    body = {
        "policy": _short(wanted.policy),
        "models": {name: _short(policy) for name, policy in wanted.models.items()},
        "reason": "…",
    }
    if not wanted.models:
        del body["models"]
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    address = request.build_absolute_uri(f"/api/v1/orgs/{held.org.slug}/policy")
    return (
        f'curl -X PUT {address} \\\n  -H "Authorization: Bearer $TIDEGATE_TOKEN" \\\n'
        f'  -H \'If-Match: "{held.number}"\' \\\n  -H "Idempotency-Key: $(date +%s%N)" \\\n'
        f"  -H \"Content-Type: application/json\" \\\n  -d '{data}'"
    )


def _short(policy: Policy) -> dict[str, Any]:
    spelled: dict[str, Any] = documents.spelled_out(policy)
    default = Policy()
    return {name: spelled[name] for name in documents.changed_fields(default, policy)}


# Which policy is edited


def _model_of(request: HttpRequest) -> str:
    """A model that has a policy of its own or is going to; nothing for all others."""
    model = str(request.POST.get("model", "") or request.GET.get("model", "")).strip()
    if len(model) > 200 or "\x00" in model:
        raise Http404("No model has such a name.")
    return model


def _initial_policy(request: HttpRequest, held: ActivePolicy, model: str) -> Policy:
    template = PRESETS.get(request.GET.get("template", ""))
    return template.policy if template else held.said.of(model)


def _initial(request: HttpRequest, held: ActivePolicy, model: str) -> dict[str, Any]:
    policy = _initial_policy(request, held, model)
    return {**EditorForm.initial_of(policy), "version": held.number, "model": model}


def _edited(held: ActivePolicy, model: str, policy: Policy) -> OrgPolicies:
    """What the form makes of the org's policies."""
    said = held.said
    if model:
        return OrgPolicies(policy=said.policy, models={**said.models, model: policy})
    return OrgPolicies(policy=policy, models=said.models)


def _form_of(held: ActivePolicy, model: str, data: QueryDict | None = None, **more: Any) -> EditorForm:
    problem = _model_problem(held, model)
    return EditorForm(data, limits=held.cluster.policies.limits, problem=problem, **more)


def _model_problem(held: ActivePolicy, model: str) -> str:
    """Why this model can't have a policy of its own; nothing if it can, or has one."""
    models = held.said.models
    if not model or model in models or len(models) < documents.MODELS_MAX:
        return ""
    return f"At most {documents.MODELS_MAX} models can have a policy of their own. Delete one first."


def _rows(held: ActivePolicy, model: str) -> list[tuple[str, str, str]]:
    """Every field: what holds, and what the default is where it is another."""
    policy, default = held.policies.of(model), held.cluster.policies.default
    return [
        (
            sentences.LABELS[name],
            sentences.value(name, getattr(policy, name)),
            sentences.value(name, getattr(default, name))
            if getattr(policy, name) != getattr(default, name)
            else "",
        )
        for name in documents.FIELDS
    ]


@post_page
def choose_model(request: SignedInRequest, slug: str) -> HttpResponse:
    """From the name of a model to the form of its policy."""
    org = get_org(request.principal, slug, Role.ORG_ADMIN)
    form = ModelForm(request.POST)
    if not form.is_valid():
        messages.error(request, "Enter the name of a model, as drivers report it.")
        return redirect("policy", slug)
    model = form.cleaned_data["model"]
    if problem := _model_problem(services.active_policy(org), model):
        messages.error(request, problem)
        return redirect("policy", slug)
    return redirect(f"{reverse('policy', args=[slug])}?{urlencode({'model': model})}")


@post_page
def drop_model(request: SignedInRequest, slug: str) -> HttpResponse:
    """From now on the model is held as all others are."""
    with changing(request.principal, slug) as org:
        held = services.active_policy(org)
        model = _model_of(request)
        if model not in held.said.models:
            raise Http404("That model has no policy of its own.")
        models = {name: policy for name, policy in held.said.models.items() if name != model}
        wanted = OrgPolicies(policy=held.said.policy, models=models)
        with Telling(request, ValidationError):
            check_seen(request, held)
            services.set_policy(request.principal, org, wanted, reason=f"{model} is held as all others")
            messages.success(request, f"{model} now has the policy of the org.")
    return redirect("policy", slug)


@post_page
def follow_default(request: SignedInRequest, slug: str) -> HttpResponse:
    with changing(request.principal, slug) as org, Telling(request, ValidationError):
        check_seen(request, services.active_policy(org))
        services.set_policy(request.principal, org, None, reason="it follows the default")
        messages.success(request, f"{org.name} now follows the cluster's default.")
    return redirect("policy", slug)


@post_page
def unschedule(request: SignedInRequest, slug: str, number: int) -> HttpResponse:
    with changing(request.principal, slug) as org:
        schedule.take_back(request.principal, org, number)
    messages.success(request, "Cancelled.")
    return redirect("policy", slug)
