from __future__ import annotations

import re

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.orgs.models import SLUG
from console.overview import services
from console.shell import presence


@require_safe
@signed_in
def home(request: SignedInRequest) -> HttpResponse:
    org = request.GET.get("org", "")
    if org and not re.fullmatch(SLUG, org):
        raise Http404("There is no such org.")
    overview = services.overview(request.principal, org)
    context = {
        "overview": overview,
        "asked": org,
        "orgs": services.scopes(request.principal, overview.org),
        "presence": presence.presence(),
    }
    fragment = request.headers.get("HX-Request") == "true"
    return render(request, "overview/live.html" if fragment else "overview/overview.html", context)
