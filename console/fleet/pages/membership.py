from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from console.accounts.browser import SignedInRequest, form_page, post_page
from console.fleet import services
from console.fleet.membership import tokens
from console.fleet.pages.forms import JoinForm
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
    messages.success(request, f"{token.prefix} is revoked: it lets nobody in any more.")
    return redirect("fleet-join")
