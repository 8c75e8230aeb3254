"""Bearer JWTs from the one issuer that the settings name. The subject is a user's name."""

from __future__ import annotations

import jwt
from django.conf import settings

from console.accounts.models import User
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
    user = User.objects.filter(username=claims["sub"], is_active=True).first()
    if user is None:
        raise BadJwt("The JWT is valid, but its subject is no active user here.")
    return principal_for(user, Means.JWT)
