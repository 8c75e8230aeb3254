"""The page of an engine's claims: the key that gateways sign with, and a claim to try the engine out."""

from __future__ import annotations

import base64

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render

from console.accounts.browser import SignedInRequest, form_page
from console.fleet import claims
from console.fleet.nodes import Impossible
from console.fleet.pages.forms import ClaimForm
from console.orgs.services import visible_orgs


@form_page
def show(request: SignedInRequest, name: str) -> HttpResponse:
    """Key and claim are shown in the answer to the form that asked for them, and never again."""
    principal = request.principal
    try:
        driver = claims.engine(principal, name)
    except Impossible as why:
        messages.error(request, str(why))
        return redirect("fleet-driver", name)
    wants_key = request.POST.get("key", "")  # "show" or "rotate"
    form = ClaimForm(
        None if wants_key else request.POST or None, orgs=visible_orgs(principal).order_by("slug")
    )
    key, claim = "", None
    if wants_key:
        made = claims.rotate_key if wants_key == "rotate" else claims.read_key
        key = base64.b64encode(made(principal, name)).decode()
    elif form.is_valid():
        values = form.cleaned_data
        claim = claims.sign(
            principal, name, values["org"], seconds=values["seconds"], reason=values["reason"]
        )
    context = {"driver": driver, "form": form, "key": key, "claim": claim, "tab": "drivers"}
    return render(request, "fleet/driver_claims.html", context)
