from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from django.db import Error as DatabaseError
from django.db import connection
from django.http import HttpRequest, HttpResponse

from console.shell import errors, request_context
from console.shell.transactions import is_away, is_connection_lost, is_deadlock

GetResponse = Callable[[HttpRequest], HttpResponse]
View = Callable[..., HttpResponse]
READING: Final = ("GET", "HEAD")

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

    def process_view(
        self, request: HttpRequest, view: View, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        request._tidegate_again = partial(view, request, *args, **kwargs)  # type: ignore[attr-defined]  # noqa: SLF001

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if is_deadlock(exception):
            return errors.not_now(request, errors.NotNow(MEANWHILE, 1))
        if is_connection_lost(exception) and request.method in READING:
            return self._again(request)
        if is_connection_lost(exception) or is_away(exception):
            return errors.away(request)
        return errors.not_now(request, exception) if isinstance(exception, errors.NotNow) else None

    def _again(self, request: HttpRequest) -> HttpResponse:
        """What changes nothing is done once more on another connection: PostgreSQL may have a new
        primary by now."""
        connection.close()
        try:
            answer: HttpResponse = request._tidegate_again()  # type: ignore[attr-defined]  # noqa: SLF001
        except DatabaseError as error:
            if is_connection_lost(error) or is_away(error):
                return errors.away(request)
            raise
        return answer
