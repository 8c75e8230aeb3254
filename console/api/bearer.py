"""`Authorization: Bearer tgr_…`, `tgw_…` or a JWT: whose it is. Also for pages and web sockets."""

from __future__ import annotations

from django.http import HttpRequest

from console.accounts import jwt, tokens
from console.accounts.principal import Principal
from console.api.problems import ApiError

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="tidegate"'}
INVALID = {"WWW-Authenticate": 'Bearer realm="tidegate", error="invalid_token"'}


def bearer_principal(request: HttpRequest) -> Principal | None:
    """The principal of the Authorization header, outside of the API; None where there is none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return principal_of_bearer(token.strip()) if scheme.lower() == "bearer" else None


def principal_of_bearer(token: str) -> Principal:
    """Raises ApiError for a token that is not good (any more)."""
    if not token:
        raise ApiError("Unauthenticated", "The Authorization header has no token.", headers=INVALID)
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
