"""Who calls the API: a personal token, a JWT of the configured issuer, or a logged-in browser."""

from __future__ import annotations

from typing import Any, cast

from django.conf import settings
from django.http import HttpRequest
from ninja.security import APIKeyCookie, HttpBearer

from console.accounts.browser import SignedInRequest, principal_of
from console.accounts.principal import Principal
from console.api.bearer import principal_of_bearer
from console.api.problems import ApiError
from console.shell.request_context import note_known


class Bearer(HttpBearer):
    """A token of a person or a process."""

    def authenticate(self, request: HttpRequest, token: str) -> Principal:
        principal = principal_of_bearer(token)
        _set(request, principal)
        return principal


class Browser(APIKeyCookie):
    """A logged-in browser, with its CSRF token on everything that changes something."""

    param_name = settings.SESSION_COOKIE_NAME

    def authenticate(self, request: HttpRequest, _key: str | None) -> Principal | None:
        principal = principal_of(request)
        if principal is not None:
            if principal.user and principal.user.must_change_password:
                raise ApiError("Forbidden", "Change your generated password in the browser first.")
            _set(request, principal)
        return principal


AUTHENTICATION: list[Any] = [Bearer(), Browser()]


def _set(request: HttpRequest, principal: Principal) -> None:
    note_known(request, principal.owner)
    cast("SignedInRequest", request).principal = principal
