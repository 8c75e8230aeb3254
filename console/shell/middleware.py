from __future__ import annotations

from collections.abc import Callable
from typing import Final

from django.http import HttpRequest, HttpResponse

from console.shell import errors, request_context
from console.shell.transactions import is_deadlock

GetResponse = Callable[[HttpRequest], HttpResponse]

# No inline script or style, nothing from elsewhere. `data:` is for the small pictures inside the
# stylesheet of the API's documentation page.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
MEANWHILE: Final = "Another change was made to the same things at the same moment."
PERMISSIONS_POLICY = "camera=(), geolocation=(), microphone=(), payment=(), usb=()"


def request_id(get_response: GetResponse) -> GetResponse:
    """Every request has an id: in its answer, in each log line, in Celery and in the audit trail."""

    def middleware(request: HttpRequest) -> HttpResponse:
        context = request_context.of_request(request)
        request_context.enter(context)
        response = get_response(request)
        response["X-Request-ID"] = context.request_id
        return response

    return middleware


def security_headers(get_response: GetResponse) -> GetResponse:
    """What browsers must not do with our pages; and nothing of ours in a shared cache."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        response.setdefault("Permissions-Policy", PERMISSIONS_POLICY)
        response.setdefault("Cache-Control", "no-store")
        return response

    return middleware


class NotNowMiddleware:
    """What a view can't have at the moment is a page that says so, and when to come again."""

    def __init__(self, get_response: GetResponse) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if is_deadlock(exception):
            return errors.not_now(request, errors.NotNow(MEANWHILE, 1))
        return errors.not_now(request, exception) if isinstance(exception, errors.NotNow) else None
