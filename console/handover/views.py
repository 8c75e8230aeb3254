from __future__ import annotations

import re
from urllib.parse import urlencode

from django import forms
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from console.accounts.browser import SignedInRequest, form_page
from console.accounts.forms import OrgsMixin, org_field
from console.accounts.roles import Role
from console.handover import services
from console.handover.models import TEXT_MAX
from console.orgs.models import SLUG
from console.orgs.services import visible_orgs
from console.shell.forms import LinesField
from console.shell.pages import wants_part


class NoteForm(OrgsMixin):
    text = LinesField(
        max_length=TEXT_MAX,
        label="Note",
        help_text="For the next on-call: observations, attempts, what to watch.",
        widget=forms.Textarea(attrs={"rows": 4, "data-press": "n"}),
    )
    org = org_field("all orgs and the platform", label="Org")


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
        "may_write": request.principal.anywhere(Role.ON_CALL),
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
