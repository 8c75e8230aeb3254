"""The page that says what becomes of it if a driver is removed, and the button that removes it."""

from __future__ import annotations

from django.contrib import messages
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.roles import Role
from console.authority.capabilities import STEP_SECONDS
from console.fleet import services
from console.fleet.membership.joins import lost_after
from console.operations.plans import StalePlan
from console.operations.services import Busy
from console.sessions.changes import driver_removal
from console.sessions.pages.forms import RemovalForm


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
            try:
                with transaction.atomic():
                    operation = driver_removal.remove(
                        request.principal,
                        name,
                        plan_token=values["plan_token"],
                        reason=values["reason"],
                    )
            except (Busy, StalePlan) as error:
                messages.error(request, str(error))
                return redirect("fleet-driver-remove", name)
            return redirect("operation", operation.pk)
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
