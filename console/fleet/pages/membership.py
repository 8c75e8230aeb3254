"""Pages to join with, and to see an engine's claims: the key that gateways sign with, and a claim to try
the engine out."""

from __future__ import annotations

import base64
from datetime import timedelta

from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.fleet import claims, services
from console.fleet.membership import tokens
from console.fleet.nodes import Impossible
from console.fleet.pages.forms import ClaimForm, JoinForm
from console.orgs.services import visible_orgs
from kvss_agent.process.membership import Console

SHOWN_MAX = 100


@form_page
def join(request: SignedInRequest) -> HttpResponse:
    """Join tokens, and the command to join with. A new one is shown in the answer that made it, and
    never again."""
    found = tokens.visible_tokens(request.principal)
    form = JoinForm(request.POST or None)
    made = None
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        _, made = tokens.issue(
            request.principal,
            kind=values["kind"],
            name=values["name"],
            note=values["note"],
            uses=values["uses"],
            expires_at=timezone.now() + timedelta(hours=values["hours"]),
        )
    origin = f"{request.scheme}://{request.get_host()}"
    leaf = services.visible_leaves(request.principal).first()
    context = {
        "form": form,
        "made": made,
        "kind": form.cleaned_data.get("kind", "node") if made else "node",
        "name": form.cleaned_data.get("name", "") if made else "",
        "tokens": found[:SHOWN_MAX],
        "origin": origin,
        "is_in_the_open": Console(origin).is_in_the_open,
        "leaf": leaf,
        "telemetry_url": settings.OWN_TELEMETRY_URL,
        "tab": "join",
    }
    return render(request, "fleet/join.html", context)


@post_page
def revoke(request: SignedInRequest, public_id: str) -> HttpResponse:
    token = tokens.revoke(request.principal, public_id)
    messages.success(request, f"{token.prefix} revoked. No further process can join with it.")
    return redirect("fleet-join")


@form_page
def show_claims(request: SignedInRequest, name: str) -> HttpResponse:
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
