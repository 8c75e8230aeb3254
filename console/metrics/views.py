from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from console.accounts.browser import principal_of
from console.accounts.roles import Role
from console.api import problems
from console.api.bearer import CHALLENGE, bearer_principal
from console.api.problems import ApiError
from console.metrics import prometheus
from telemetry.emit.exposition import CONTENT_TYPE


@require_safe
def show(request: HttpRequest) -> HttpResponse:
    """The page for Prometheus, which sends a token with a role on the platform."""
    try:
        known = principal_of(request) or bearer_principal(request)
    except ApiError as error:
        return problems.response(error.problem, error.headers)
    if known is None:
        return problems.response(problems.problem("Unauthenticated", "Send a token."), CHALLENGE)
    if not known.on_platform(Role.VIEWER):
        sentence = "This page needs a role on the platform."
        return problems.response(problems.problem("Forbidden", sentence))
    return HttpResponse(prometheus.page(), content_type=CONTENT_TYPE)
