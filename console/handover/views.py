from __future__ import annotations

import re
from urllib.parse import urlencode

from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.handover import services
from console.handover.forms import NoteForm
from console.orgs.models import SLUG
from console.orgs.services import visible_orgs
from console.shell.pages import wants_part


@form_page
def hand_over(request: SignedInRequest) -> HttpResponse:
    """The page; a POST leaves a note."""
    org, hours = request.GET.get("org", ""), _hours(request.GET.get("hours", ""))
    if org and not re.fullmatch(SLUG, org):
        raise Http404("There is no such org.")
    orgs = visible_orgs(request.principal)
    form = NoteForm(request.POST or None, orgs=orgs, initial={"org": org})
    query = urlencode({"org": org, "hours": hours})
    if request.method == "POST" and form.is_valid():
        services.write(request.principal, form.cleaned_data["org"], form.cleaned_data["text"])
        return redirect(f"{reverse('hand-over')}?{query}#notes")
    live = {
        "found": services.hand_over(request.principal, org, hours),
        "may_write": _may_write(request.principal),
    }
    if wants_part(request):
        return render(request, "handover/live.html", live)
    context = {
        **live,
        "form": form,
        "query": query,
        "live_topic": services.live_topic(request.principal, org),
        "orgs": orgs,
        "asked": org,
        "hours": hours,
        "spans": services.HOURS,
    }
    return render(request, "handover/hand_over.html", context)


def _hours(text: str) -> int:
    return int(text) if text in map(str, services.HOURS) else services.HOURS_DEFAULT


def _may_write(principal: Principal) -> bool:
    return bool(principal.on_platform(Role.ON_CALL) or principal.orgs_where(Role.ON_CALL))
