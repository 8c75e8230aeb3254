"""Brains as pages, and the limits of an org."""

from __future__ import annotations

from typing import Any

import msgspec
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.principal import Refused
from console.accounts.roles import Role
from console.control.models import Kind, Target
from console.fleet.insight import activity
from console.fleet.membership.heartbeats import lost_after
from console.fleet.membership.versions import skew
from console.fleet.models import topic
from console.fleet.pages.fleet import look_of_process, searched
from console.orgs import services as orgs
from console.routing import brains, limits, rollout, services
from console.routing.pages.forms import LimitsForm, TypedForm
from console.shell.pages import Refusing, check_version, render_live
from telemetry.events import events_of

RECENT = 12


@read_page
def list_brains(request: SignedInRequest) -> HttpResponse:
    context = searched(request, brains.visible_brains(request.principal), "brains")
    shown: Any = list(context["page"])
    names = [brain.name for brain in shown]
    rows = Target.objects.filter(kind=Kind.BRAIN, name__in=names, generation__gt=0)
    targets = {target.name: target for target in rows.defer("secret", "claims_key")}
    for brain in shown:
        brain.look, brain.said = look_of_process(brain)
        brain.skew = skew(settings.VERSION, brain.software_version)
        brain.target = targets.get(brain.name)
    context["brains"] = shown
    return render_live(request, "routing/brains", context)


@read_page
def show_brain(request: SignedInRequest, name: str) -> HttpResponse:
    brain = brains.get_brain(request.principal, name)
    look, said = look_of_process(brain)
    context = {
        "brain": brain,
        "topic": topic(brain),
        "look": look,
        "said": said,
        "skew": skew(settings.VERSION, brain.software_version),
        "target": activity.target_of("brain", brain.name),
        "events": events_of(topic(brain)).order_by("-at", "-id")[:RECENT],
        "waiting": brains.waiting_for(brain),
        "lost_after": lost_after(),
        "may_change": request.principal.on_platform(Role.PLATFORM_ADMIN),
        "remove_form": TypedForm(auto_id="remove_%s"),
        "tab": "brains",
    }
    return render_live(request, "routing/brain", context)


@post_page
def remove_brain(request: SignedInRequest, name: str) -> HttpResponse:
    form = TypedForm(request.POST)
    with transaction.atomic():
        brain = brains.for_change(request.principal, name)
        if not form.is_valid() or form.cleaned_data["typed"] != name:
            messages.error(request, f"Not removed: type “{name}” to confirm.")
            return redirect("routing-brain", name)
        brains.remove_brain(request.principal, brain, reason=form.cleaned_data["reason"])
    messages.success(request, f"{name} was removed. To return, it needs a new join token.")
    return redirect("routing-brains")


@form_page
def org_limits(request: SignedInRequest, slug: str) -> HttpResponse:
    """What an org may ask of brains: read by its people, set by the platform."""
    principal = request.principal
    org = orgs.get_org(principal, slug)
    may_change = principal.on_platform(Role.PLATFORM_ADMIN) and not principal.read_only
    held = limits.active_limits(org)
    now = {**msgspec.structs.asdict(held.limits), "version": held.version}
    form = LimitsForm(request.POST or None, initial=now) if may_change else None
    if request.method == "POST":
        if form is None:
            raise Refused("Only a platform admin may set limits: they protect orgs from each other.")
        if form.is_valid() and _limits_set(request, slug, form):
            return redirect("org-limits", slug)
    reach = rollout.reach_of_limits(org)
    context = {
        "org": org,
        "held": held,
        "reach": reach,
        "form": form,
        "models": services.models_for(org),
        "lagging": reach.lagging if principal.on_platform(Role.VIEWER) else (),
        "may_ask": principal.holds(Role.ORG_ADMIN, org.pk),
    }
    return render(request, "routing/limits.html", context)


def _limits_set(request: SignedInRequest, slug: str, form: LimitsForm) -> bool:
    values = form.cleaned_data
    with Refusing(form, ValidationError), transaction.atomic():
        org = orgs.for_change(request.principal, slug, Role.VIEWER)
        check_version(form, limits.active_limits(org).version)
        limits.set_limits(request.principal, org, form.limits(), reason=values["reason"])
        messages.success(request, "Saved. Brains apply the limits within two seconds.")
        return True
    return False
