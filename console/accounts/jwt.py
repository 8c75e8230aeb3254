"""Bearer JWTs from the one issuer that the settings name. The subject is a user's name."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from django.conf import settings

from console.accounts.models import NAME, User
from console.accounts.principal import Means, Principal
from console.accounts.services import principal_for

LEEWAY_SECONDS = 30
REQUIRED_CLAIMS = ["exp", "iat", "aud", "iss", "sub"]


class BadJwt(Exception):
    """Why the token is not accepted."""


def authenticate(text: str) -> Principal:
    """The principal of a JWT. Raises BadJwt, whose text may be shown to the caller."""
    environment = settings.ENVIRONMENT
    if environment.jwt_algorithm is None or environment.jwt_key is None:
        raise BadJwt("This console accepts no JWTs, only personal API tokens.")
    import jwt  # with cryptography, which a console that accepts none does without

    try:
        claims = jwt.decode(
            text,
            environment.jwt_key,
            algorithms=[environment.jwt_algorithm.value],
            issuer=environment.jwt_issuer,
            audience=environment.jwt_audience,
            leeway=LEEWAY_SECONDS,
            options={"require": REQUIRED_CLAIMS},
        )
    except jwt.InvalidTokenError as error:
        raise BadJwt(f"The JWT is not valid: {error}.") from None
    known = User.objects.filter(username=claims["sub"], is_active=True)
    user = known.first() if re.fullmatch(NAME, claims["sub"]) else None
    if user is None:
        raise BadJwt("The JWT is valid, but its subject is no active user here.")
    issued_at, expires_at = _moment(claims["iat"]), _moment(claims["exp"])
    if user.credentials_since is not None and issued_at < user.credentials_since:
        raise BadJwt("The JWT was issued before its user's credentials were revoked: get a new one.")
    return principal_for(user, Means.JWT, expires_at=expires_at)


def _moment(seconds: float | str) -> datetime:
    """The moment of a claim that PyJWT has seen to be a number. No calendar has those far away."""
    try:
        return datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        raise BadJwt("The JWT is not valid: its times are not of this age.") from None
