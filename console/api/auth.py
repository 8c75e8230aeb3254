"""Who calls the API: a personal token, a JWT of the configured issuer, or a logged-in browser."""

from __future__ import annotations

from typing import Any, cast

from django.conf import settings
from django.http import HttpRequest
from ninja.security import APIKeyCookie, HttpBearer

from console.accounts import jwt, tokens
from console.accounts.browser import SignedInRequest, principal_of
from console.accounts.principal import Principal
from console.api.problems import ApiError
from console.shell.request_context import note_known

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="tidegate"'}
INVALID = {"WWW-Authenticate": 'Bearer realm="tidegate", error="invalid_token"'}


class Bearer(HttpBearer):
    """`Authorization: Bearer tgr_…`, `tgw_…` or a JWT."""

    def authenticate(self, request: HttpRequest, token: str) -> Principal:
        principal = principal_of_bearer(token)
        _set(request, principal)
        return principal


def bearer_principal(request: HttpRequest) -> Principal | None:
    """The principal of the Authorization header, outside of the API; None where there is none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return principal_of_bearer(token.strip()) if scheme.lower() == "bearer" else None


def principal_of_bearer(token: str) -> Principal:
    """Raises ApiError for a token that is not good (any more)."""
    if token.startswith(("tgr_", "tgw_")):
        principal = tokens.authenticate(token)
        if principal is None:
            raise ApiError(
                "Unauthenticated",
                "This token is unknown, expired or revoked.",
                headers=INVALID,
            )
        return principal
    try:
        return jwt.authenticate(token)
    except jwt.BadJwt as error:
        raise ApiError("Unauthenticated", str(error), headers=INVALID) from None


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
