from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.accounts.browser import SignedInRequest, signed_in
from console.search import services

ON_THE_PAGE = 25  # of a kind


@require_safe
@signed_in
def search(request: SignedInRequest) -> HttpResponse:
    """The page with all results, or a fragment with the first ones while somebody types. With `far`, the
    results of drivers, which the page loads by itself."""
    text = request.GET.get("q", "")[: services.TEXT_MAX].replace("\x00", "")
    far = "far" in request.GET
    fragment = request.headers.get("HX-Request") == "true"
    most = services.OF_A_KIND_MAX if fragment and not far else ON_THE_PAGE
    context: dict[str, object] = {"text": text, "far": far, "kinds": services.kinds()}
    if far:
        context["far_groups"] = services.search(request.principal, text, most, far=True)
        if fragment:
            return render(request, "search/far.html", context)
    context["groups"] = services.search(request.principal, text, most)
    return render(request, "search/found.html" if fragment else "search/search.html", context)
