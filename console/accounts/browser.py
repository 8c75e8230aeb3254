"""From a browser's request to the principal behind it, and pages that insist on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, cast
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe
from django_htmx.http import HttpResponseClientRedirect

from console.accounts.models import User
from console.accounts.principal import Means, Principal
from console.accounts.services import principal_for
from console.shell.errors import not_a_page
from console.shell.request_context import note_known

P = ParamSpec("P")
_FOUND = "_browser_principal"
_NOT_ASKED_YET = object()


class SignedInRequest(HttpRequest):
    """A request of somebody known, to a page behind `signed_in` or to the API. Only a type."""

    principal: Principal


View = Callable[Concatenate[SignedInRequest, P], HttpResponseBase]


def principal_of(request: HttpRequest) -> Principal | None:
    """Whom the browser's session belongs to; found once per request, and only when asked for."""
    known = getattr(request, _FOUND, _NOT_ASKED_YET)
    if known is _NOT_ASKED_YET:
        user = getattr(request, "user", None)
        is_known = user is not None and user.is_authenticated
        known = principal_for(cast("User", user), Means.BROWSER) if is_known else None
        if known is not None:
            note_known(request, known.owner)
        setattr(request, _FOUND, known)
    return cast("Principal | None", known)


def signed_in(view: View[P]) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
    """A page for those who are logged in; others are sent to the log-in page and then back.

    Whoever still has a password that somebody else generated has to change it first.
    """

    @wraps(view)
    def wrapper(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        principal = principal_of(request)
        if principal is None:
            return _to_log_in(request)
        if principal.user and principal.user.must_change_password and not _is_password_page(request):
            return redirect("password")
        signed = cast("SignedInRequest", request)
        signed.principal = principal
        return view(signed, *args, **kwargs)

    return wrapper


def read_page(view: View[P]) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
    """A page for those who are logged in that changes nothing."""
    return require_safe(signed_in(view))


def form_page(view: View[P]) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
    """A page for those who are logged in, with a form that it also takes."""
    return require_http_methods(["GET", "HEAD", "POST"])(signed_in(view))


def post_page(view: View[P]) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
    """What a form of another page is sent to, by those who are logged in."""
    page = signed_in(view)

    @wraps(view)
    def wrapper(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if request.method != "POST":
            return not_a_page(request, "POST")
        return page(request, *args, **kwargs)

    return wrapper


def _is_password_page(request: HttpRequest) -> bool:
    return request.path in (reverse("password"), reverse("logout"))


def _to_log_in(request: HttpRequest) -> HttpResponse:
    target = request.get_full_path() if request.method == "GET" else reverse("home")
    if getattr(request, "htmx", False):
        # A fragment on a page left open: log in, then come back to that page.
        current = getattr(request.htmx, "current_url_abs_path", None)  # type: ignore[attr-defined]
        address = f"{reverse('login')}?{urlencode({'next': current or reverse('home')})}"
        return HttpResponseClientRedirect(address)
    return HttpResponseRedirect(f"{reverse('login')}?{urlencode({'next': target})}")
