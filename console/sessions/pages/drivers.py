"""Pages that change a driver: its orgs, with what a stolen driver would give away; and removing it, with
what becomes of its job."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.roles import Role
from console.authority.capabilities import STEP_SECONDS
from console.fleet import services
from console.fleet.membership.heartbeats import lost_after
from console.operations.services import Busy, StalePlan
from console.sessions import driver_orgs
from console.sessions.changes import driver_removal
from console.sessions.pages.forms import DriverOrgsForm, RemovalForm
from console.shell.pages import Refusing, Telling, check_version
from telemetry.units import counted


@form_page
def edit_orgs(request: SignedInRequest, name: str) -> HttpResponse:
    services.check_fleet(request.principal, Role.PLATFORM_ADMIN)
    driver = services.get(services.visible_drivers(request.principal), name)
    now = driver_orgs.slugs(driver_orgs.orgs_of(driver))
    shown = now if isinstance(now, str) else ", ".join(now)
    form = DriverOrgsForm(request.POST or None, initial={"orgs": shown, "version": driver.version})
    found: dict[str, Any] = {}
    if request.method == "POST" and form.is_valid():
        with Refusing(form, ValidationError), transaction.atomic():
            response = _orgs_changed(request, name, form, found)
            if response is not None:
                return response
    context = {
        "driver": driver,
        "form": form,
        "leaving": driver_orgs.leaving_of(driver),
        "orgs": now,
        "warning": driver_orgs.ALL_WARNING if now == driver_orgs.ALL else "",
        "tab": "drivers",
        **found,
    }
    return render(request, "fleet/driver_orgs.html", context)


def _orgs_changed(
    request: SignedInRequest, name: str, form: DriverOrgsForm, found: dict[str, Any]
) -> HttpResponse | None:
    """Where to go once it is changed; None for a preview, which is in `found`."""
    driver = services.for_change(request.principal, services.visible_drivers, name, Role.PLATFORM_ADMIN)
    values = form.cleaned_data
    session = driver_orgs.session_of(driver)
    orgs = driver_orgs.resolve(request.principal, session, values["orgs"])
    if "preview" in request.POST:
        found["plan"] = driver_orgs.plan_orgs(driver, orgs)
        found["warning"] = driver_orgs.ALL_WARNING if orgs is None else ""
        return None
    check_version(form, driver.version)
    changed = driver_orgs.set_orgs(request.principal, driver, orgs, reason=values["reason"])
    if not changed.plan.changes:
        messages.info(request, "Nothing has changed, so nothing was saved.")
    elif changed.operations:
        messages.success(
            request,
            f"Saved. {name} removes what it stores of {counted(len(changed.operations), 'org')}.",
        )
    else:
        messages.success(request, f"Saved. It is sent to {name} now.")
    if len(changed.operations) == 1:
        return redirect("operation", changed.operations[0].pk)
    return redirect("fleet-driver", name)


@form_page
def remove(request: SignedInRequest, name: str) -> HttpResponse:
    services.check_fleet(request.principal, Role.PLATFORM_ADMIN)
    driver = services.get(services.visible_drivers(request.principal), name)
    form = RemovalForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        if values["typed"] != name:
            form.add_error("typed", f"Type “{name}”.")
        else:
            with Telling(request, Busy, StalePlan):
                operation = driver_removal.remove(
                    request.principal, name, plan_token=values["plan_token"], reason=values["reason"]
                )
                return redirect("operation", operation.pk)
            return redirect("fleet-driver-remove", name)
    found = driver_removal.consequences(driver)
    if not form.is_bound:
        form = RemovalForm(initial={"plan_token": found.token})
    context = {
        "driver": driver,
        "found": found,
        "form": form,
        "capability_minutes": 2 * STEP_SECONDS // 60,
        "nodes": found.nodes[: driver_removal.NODES_SHOWN_MAX],
        "nodes_left": max(0, len(found.nodes) - driver_removal.NODES_SHOWN_MAX),
        "lost_after": lost_after(),
        "tab": "drivers",
    }
    return render(request, "fleet/driver_remove.html", context)
