from __future__ import annotations

import re

from django.http import Http404, HttpResponse

from console.accounts.browser import SignedInRequest, read_page
from console.orgs.models import SLUG
from console.overview import services
from console.shell import presence
from console.shell.pages import render_live


@read_page
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
    return render_live(request, "overview/overview", context)
