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
    """A page; or while somebody types, what they would find on it first."""
    text = request.GET.get("q", "")[: services.TEXT_MAX].replace("\x00", "")
    fragment = request.headers.get("HX-Request") == "true"
    most = services.OF_A_KIND_MAX if fragment else ON_THE_PAGE
    context = {
        "text": text,
        "groups": services.search(request.principal, text, most),
        "kinds": services.kinds(),
    }
    return render(request, "search/found.html" if fragment else "search/search.html", context)
