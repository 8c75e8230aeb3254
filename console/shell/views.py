from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.accounts.browser import SignedInRequest, principal_of, read_page
from console.api.bearer import CHALLENGE, bearer_principal
from console.api.problems import ApiError
from console.shell import health, versions


@require_safe
def live(_request: HttpRequest) -> HttpResponse:
    return JsonResponse({"live": True})


@require_safe
def ready(_request: HttpRequest) -> HttpResponse:
    report = health.report()
    return JsonResponse(report, status=200 if report["ready"] else 503)


@require_safe
def show_versions(request: HttpRequest) -> HttpResponse:
    """The versions of this console, only with a log-in or a token."""
    try:
        known = principal_of(request) or bearer_principal(request)
    except ApiError:
        known = None
    if known is None:
        return JsonResponse({"detail": "Log in or send a token."}, status=401, headers=CHALLENGE)
    return JsonResponse(versions.report())


@read_page
def design(request: SignedInRequest) -> HttpResponse:
    return render(request, "design.html", {"embedded": settings.EMBEDDED})
