from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.http import HttpRequest, HttpResponse

from console.api import problems

ADDRESSES: Final = "console.api.urls"  # by its name: it loads the whole API
GetResponse = Callable[[HttpRequest], HttpResponse]


def below_api(get_response: GetResponse) -> GetResponse:
    """Requests below /api/ have addresses of their own, and whatever goes wrong with them outside of an
    operation is a problem document as well.

    Synchronous and innermost on purpose: see MIDDLEWARE in the settings.
    """

    def middleware(request: HttpRequest) -> HttpResponse:
        if not request.path.startswith("/api/"):
            return get_response(request)
        request.urlconf = ADDRESSES
        response = get_response(request)
        if response.status_code < 400 or problems.is_problem(response):
            return response
        allow = response.headers.get("Allow")
        problem = problems.for_status(response.status_code)
        return problems.response(problem, headers={"Allow": allow} if allow else {})

    return middleware
