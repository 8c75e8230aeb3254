from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render

from console.accounts.browser import SignedInRequest, read_page
from console.search import services
from console.shell.pages import wants_part

ON_THE_PAGE = 25  # of a kind


@read_page
def search(request: SignedInRequest) -> HttpResponse:
    """The page with all results, or a fragment with the first ones while somebody types. With `far`, the
    results of drivers, which the page loads by itself."""
    text = request.GET.get("q", "")[: services.TEXT_MAX].replace("\x00", "")
    far = "far" in request.GET
    fragment = wants_part(request)
    most = services.OF_A_KIND_MAX if fragment and not far else ON_THE_PAGE
    context: dict[str, object] = {"text": text, "far": far, "kinds": services.kinds()}
    if far:
        context["far_groups"] = services.search(request.principal, text, most, far=True)
        if fragment:
            return render(request, "search/far.html", context)
    context["groups"] = services.search(request.principal, text, most)
    return render(request, "search/found.html" if fragment else "search/search.html", context)
