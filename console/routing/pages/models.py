"""Served models and their replicas, as pages."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, form_page, post_page, read_page
from console.accounts.roles import Role
from console.fleet.models import Driver
from console.fleet.nodes import Impossible
from console.fleet.pages.fleet import searched
from console.routing import services, traffic
from console.routing.models import Replica, ServedModel
from console.routing.pages.forms import (
    ModelForm,
    NewModelForm,
    NewReplicaForm,
    ReplicaForm,
    TypedForm,
    orgs_of,
)
from console.sessions.driver_orgs import orgs_of as orgs_of_driver
from console.shell.pages import Refusing, Telling, check_version, show_faults
from telemetry.queries import Unanswerable


@read_page
def list_models(request: SignedInRequest) -> HttpResponse:
    context = searched(request, services.visible_models(request.principal), "models")
    context["may_change"] = request.principal.on_platform(Role.PLATFORM_ADMIN)
    return render(request, "routing/models.html", context)


@form_page
def new_model(request: SignedInRequest) -> HttpResponse:
    services.check_may_add(request.principal)
    form = NewModelForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        with Refusing(form, ValidationError, Http404):
            model = services.add_model(
                request.principal,
                name=values["name"],
                values=form.values(),
                orgs=orgs_of(request.principal, values["orgs"]),
                reason=values["reason"],
            )
            messages.success(request, f"{model.model} is known to brains. Now add its replicas.")
            return redirect("routing-model", model.name)
    return render(request, "routing/model_edit.html", {"form": form, "tab": "models"})


@read_page
def show_model(request: SignedInRequest, name: str) -> HttpResponse:
    model = services.get_model(request.principal, name)
    workload = services.workload_of(model)
    read_at, states, problem = timezone.now(), dict[traffic.Key, list[traffic.State]](), ""
    try:
        states = traffic.states_by_replica()
    except Unanswerable as error:
        problem = str(error)
    context = {
        "model": model,
        "replicas": [
            (replica, states.get((model.model, replica.name)), _without_cache(model, replica))
            for replica in model.replicas.all()
        ],
        "problem": problem,
        "read_at": read_at,
        "workload": workload,
        "may_change": not workload and request.principal.on_platform(Role.PLATFORM_ADMIN),
        "remove_form": TypedForm(auto_id="remove_%s"),
        "tab": "models",
    }
    return render(request, "routing/model.html", context)


def _without_cache(model: ServedModel, replica: Replica) -> str:
    """Which orgs may use the model and have no cache there, since the driver does not serve them."""
    served = orgs_of_driver(replica.driver) if replica.driver else None
    if served is None:
        return ""
    if model.for_all_orgs:
        return "orgs that its driver does not serve"
    missing = sorted(set(model.org_slugs()) - {org.slug for org in served})
    return ", ".join(missing[:20])


@form_page
def edit_model(request: SignedInRequest, name: str) -> HttpResponse:
    services.check_may_add(request.principal)
    model = services.get_model(request.principal, name)
    form = ModelForm.of(model, request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        with Refusing(form, ValidationError, Http404, Impossible), transaction.atomic():
            found = services.for_change(request.principal, name)
            check_version(form, found.version)
            orgs = orgs_of(request.principal, values["orgs"])
            services.update_model(
                request.principal, found, values=form.values(), orgs=orgs, reason=values["reason"]
            )
            messages.success(request, "Saved. Brains follow within seconds.")
            return redirect("routing-model", name)
    return render(request, "routing/model_edit.html", {"form": form, "model": model, "tab": "models"})


@post_page
def remove_model(request: SignedInRequest, name: str) -> HttpResponse:
    form = TypedForm(request.POST)
    with Telling(request, Impossible), transaction.atomic():
        model = services.for_change(request.principal, name)
        if not form.is_valid() or form.cleaned_data["typed"] != name:
            messages.error(request, f"Not removed: type “{name}” to confirm.")
            return redirect("routing-model", name)
        services.remove_model(request.principal, model, reason=form.cleaned_data["reason"])
        messages.success(request, f"{model.model} is not served any more.")
        return redirect("routing-models")
    return redirect("routing-model", name)


# Replicas


def _drivers() -> Any:
    return Driver.objects.order_by("name")


@form_page
def new_replica(request: SignedInRequest, name: str) -> HttpResponse:
    services.check_may_add(request.principal)
    model = services.get_model(request.principal, name)
    form = NewReplicaForm(request.POST or None, drivers=_drivers())
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        with Refusing(form, ValidationError, Impossible), transaction.atomic():
            found = services.for_change(request.principal, name)
            replica = services.add_replica(
                request.principal,
                found,
                name=values["name"],
                values=form.values(),
                reason=values["reason"],
            )
            messages.success(request, f"{replica.name} gets requests as soon as brains follow.")
            return redirect("routing-model", name)
    context = {"form": form, "model": model, "tab": "models"}
    return render(request, "routing/replica_edit.html", context)


@form_page
def edit_replica(request: SignedInRequest, name: str, replica: str) -> HttpResponse:
    services.check_may_add(request.principal)
    model = services.get_model(request.principal, name)
    shown = services.get_replica(model, replica)
    form = ReplicaForm.of(shown, _drivers(), request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        with Refusing(form, ValidationError, Impossible), transaction.atomic():
            found = services.get_replica(services.for_change(request.principal, name), replica)
            check_version(form, found.version)
            services.update_replica(
                request.principal, found, values=form.values(), reason=values["reason"]
            )
            messages.success(request, "Saved. Brains follow within seconds.")
            return redirect("routing-model", name)
    context = {
        "form": form,
        "model": model,
        "replica": shown,
        "remove_form": TypedForm(auto_id="remove_%s"),
        "tab": "models",
    }
    return render(request, "routing/replica_edit.html", context)


@post_page
def drain_replica(request: SignedInRequest, name: str, replica: str) -> HttpResponse:
    """Drain it, or have it take requests again."""
    with Telling(request, Impossible), transaction.atomic():
        found = services.get_replica(services.for_change(request.principal, name), replica)
        draining = not found.draining
        services.update_replica(request.principal, found, values={"draining": draining})
        said = "gets no new requests" if draining else "gets requests again"
        messages.success(request, f"{replica} {said}.")
    return redirect("routing-model", name)


@post_page
def remove_replica(request: SignedInRequest, name: str, replica: str) -> HttpResponse:
    form = TypedForm(request.POST)
    with Telling(request, Impossible), transaction.atomic():
        found = services.get_replica(services.for_change(request.principal, name), replica)
        if not form.is_valid():
            show_faults(request, form)
            return redirect("routing-replica", name, replica)
        if form.cleaned_data["typed"] != replica:
            messages.error(request, f"Not removed: type “{replica}” to confirm.")
            return redirect("routing-replica", name, replica)
        services.remove_replica(request.principal, found, reason=form.cleaned_data["reason"])
        messages.success(request, f"{replica} is removed.")
    return redirect("routing-model", name)
