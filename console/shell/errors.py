"""Error pages: what happened, whose fault it was, and what to do next."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string

from console.shell import request_context

AWAY_SECONDS: Final = 5  # after which somebody may try again


class NotNow(Exception):
    """The console is overloaded; a retry after so many seconds may work. The message is a sentence."""

    def __init__(self, sentence: str, retry_seconds: int) -> None:
        super().__init__(sentence)
        self.retry_seconds = retry_seconds


def _page(request: HttpRequest, status: int, title: str, sentence: str, advice: str) -> HttpResponse:
    context = {
        "status": status,
        "title": title,
        "sentence": sentence,
        "advice": advice,
        "request_id": request_context.current_id(),
    }
    return render(request, "errors/error.html", context, status=status)


def _said(exception: object) -> str:
    """The message of the error, if it has one."""
    text = str(exception) if isinstance(exception, Exception) else ""
    return text if text.endswith(".") else ""


def bad_request(request: HttpRequest, exception: object = None) -> HttpResponse:
    return _page(
        request,
        400,
        "Bad request",
        _said(exception) or "The address or the form is malformed.",
        "Go back, reload the page and try again.",
    )


def forbidden(request: HttpRequest, exception: object = None) -> HttpResponse:
    return _page(
        request,
        403,
        "Not allowed",
        _said(exception) or "Your role does not allow it.",
        "Your roles are on your account page. A platform admin or the admin of the org can change them.",
    )


def not_found(request: HttpRequest, exception: object = None) -> HttpResponse:
    return _page(
        request,
        404,
        "Not found",
        _said(exception) or "There is no page at this address.",
        "It may have been removed, or it may belong to an org that you are not a member of.",
    )


def not_a_page(request: HttpRequest, allowed: str) -> HttpResponse:
    """For the address of a form that is opened as a page, as by a refused form in a new tab."""
    response = _page(
        request,
        405,
        "Not a page",
        "Forms are sent to this address. There is nothing to read at it.",
        "Nothing was changed. Go back to the page with the form, or to the overview.",
    )
    response["Allow"] = allowed
    return response


def server_error(request: HttpRequest) -> HttpResponse:
    return _page(
        request,
        500,
        "Internal error",
        "The console failed while answering. No change was half saved: it is made whole or not at all.",
        "Try again. If it happens again, search the logs for the request id below.",
    )


def not_now(request: HttpRequest, error: NotNow) -> HttpResponse:
    response = _page(
        request,
        503,
        "Try again later",
        str(error),
        f"Nothing was changed. Try again in {error.retry_seconds} seconds.",
    )
    response["Retry-After"] = str(error.retry_seconds)
    return response


def away(_request: HttpRequest) -> HttpResponse:
    """PostgreSQL is away or has just got a new primary: a page that needs nothing of it."""
    context = {"request_id": request_context.current_id(), "retry_seconds": AWAY_SECONDS}
    response = HttpResponse(render_to_string("errors/away.html", context), status=503)
    response["Retry-After"] = str(AWAY_SECONDS)
    return response


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return _page(
        request,
        403,
        "This form has expired",
        "It was opened before you logged in or out, or in a browser that keeps no cookies.",
        f"Go back, reload the page and send it again. ({reason})",
    )
