from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from console.api import problems

GetResponse = Callable[[HttpRequest], HttpResponse]


def problems_for_the_api(get_response: GetResponse) -> GetResponse:
    """Whatever goes wrong below /api/ outside of an operation is a problem document as well.

    Synchronous and innermost on purpose: see MIDDLEWARE in the settings.
    """

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        ours = request.path.startswith("/api/")
        if not ours or response.status_code < 400 or problems.is_problem(response):
            return response
        allow = response.headers.get("Allow")
        problem = problems.for_status(response.status_code)
        return problems.response(problem, headers={"Allow": allow} if allow else {})

    return middleware
