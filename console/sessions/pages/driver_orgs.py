"""The page on which a driver's orgs are changed: what one stolen driver would give away."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.roles import Role
from console.fleet import services
from console.sessions import driver_orgs
from console.sessions.pages.forms import DriverOrgsForm


@form_page
def edit(request: SignedInRequest, name: str) -> HttpResponse:
    services.check_fleet(request.principal, Role.PLATFORM_ADMIN)
    driver = services.get(services.visible_drivers(request.principal), name)
    now = driver_orgs.slugs(driver_orgs.orgs_of(driver))
    shown = now if isinstance(now, str) else ", ".join(now)
    form = DriverOrgsForm(request.POST or None, initial={"orgs": shown, "version": driver.version})
    found: dict[str, Any] = {}
    if request.method == "POST" and form.is_valid():
        try:
            with transaction.atomic():
                response = _changed(request, name, form, found)
                if response is not None:
                    return response
        except ValidationError as error:
            form.add_error(None, " ".join(error.messages))
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


def _changed(
    request: SignedInRequest, name: str, form: DriverOrgsForm, found: dict[str, Any]
) -> HttpResponse | None:
    """Where to go once it is changed; None for a preview, which is in `found`."""
    visible = services.visible_drivers(request.principal)
    driver = services.for_change(request.principal, visible, name, Role.PLATFORM_ADMIN)
    values = form.cleaned_data
    session = driver_orgs.session_of(driver)
    orgs = driver_orgs.resolve(request.principal, session, values["orgs"])
    if "preview" in request.POST:
        found["plan"] = driver_orgs.plan_orgs(driver, orgs)
        found["warning"] = driver_orgs.ALL_WARNING if orgs is None else ""
        return None
    if values["version"] != driver.version:
        raise ValidationError("The driver was changed since you opened this page. Look at it again.")
    changed = driver_orgs.set_orgs(request.principal, driver, orgs, reason=values["reason"])
    if not changed.plan.changes:
        messages.info(request, "Nothing has changed.")
    elif changed.operations:
        messages.success(request, f"{name} removes what it stores of {len(changed.operations)} orgs.")
    else:
        messages.success(request, f"{name} is told.")
    if len(changed.operations) == 1:
        return redirect("operation", changed.operations[0].pk)
    return redirect("fleet-driver", name)
