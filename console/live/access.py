"""Authentication of WebSockets, and the topics that a viewer may see: as for pages and the API.

Checked at the upgrade, for each topic, and repeatedly while the connection lasts: a session that was
logged out, a revoked token and a removed member lose access. Nothing here changes a session or a
cookie.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth import HASH_SESSION_KEY, SESSION_KEY
from django.http import Http404, HttpRequest, parse_cookie
from django.http.request import validate_host
from django.utils.crypto import constant_time_compare

from console.accounts.models import User
from console.accounts.principal import Means, Principal
from console.accounts.services import principal_for
from console.api.bearer import principal_of_bearer
from console.api.problems import ApiError
from console.live.messages import SUBPROTOCOL
from console.metrics.services import check_topic

BEARER: Final = "bearer."  # a subprotocol that begins so carries a token: browsers can send no header
Scope = dict[str, Any]
_KEY: Final = re.compile(r"[a-z0-9]{8,40}")


@dataclass(frozen=True, slots=True)
class Credential:
    """What a viewer presents: a token, or the key of a browser's session."""

    session: str = ""
    token: str = ""


def credential_of(scope: Scope) -> Credential:
    headers = _headers(scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return Credential(token=token.strip())
    offered = [one for one in scope.get("subprotocols", ()) if one.startswith(BEARER)]
    if offered:
        return Credential(token=offered[0].removeprefix(BEARER))
    cookies = parse_cookie(headers.get("cookie", ""))
    return Credential(session=cookies.get(settings.SESSION_COOKIE_NAME, ""))


def credential_of_request(request: HttpRequest) -> Credential:
    """The credential of a request over HTTP, for responses that last long, such as streams."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return Credential(token=token.strip())
    return Credential(session=request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""))


def subprotocol_of(scope: Scope) -> str | None:
    """The subprotocol to accept, if the client has offered it."""
    return SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None


def is_ours(scope: Scope) -> bool:
    """Whether the page that connects is one of this console's. Browsers send cookies from any page, and
    say from which; whoever sends a token had to know it."""
    if credential_of(scope).token:
        return True
    headers = _headers(scope)
    origin, host = headers.get("origin", ""), headers.get("host", "")
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    try:
        parts = urlsplit(origin)
        is_allowed = validate_host(parts.hostname or "", settings.ALLOWED_HOSTS)
    except ValueError:
        return False
    # Whoever can change what comes over plain HTTP makes pages of any host; cookies are not for those.
    schemes = ("https",) if settings.SESSION_COOKIE_SECURE else ("http", "https")
    return is_allowed and parts.scheme in schemes and parts.netloc.lower() == host.lower()


def principal_of(credential: Credential) -> Principal | None:
    if credential.token:
        try:
            return principal_of_bearer(credential.token)
        except ApiError:
            return None
    return _of_session(credential.session) if _KEY.fullmatch(credential.session) else None


class Standing(NamedTuple):
    """The owner of a credential, and the topics that it may not see."""

    owner: str
    refused: frozenset[str]


def standing(credential: Credential, topics: Collection[str]) -> Standing | None:
    """Access of a credential to these topics; None if it is not valid, or not any more."""
    principal = principal_of(credential)
    if principal is None:
        return None
    refused = frozenset(topic for topic in topics if not may_see(principal, topic))
    return Standing(principal.owner, refused)


def may_see(principal: Principal, topic: str) -> bool:
    try:
        check_topic(principal, topic)
    except Http404:
        return False
    return True


def _of_session(key: str) -> Principal | None:
    """The principal of a session, read without renewing it, as Django's own lookup would."""
    session = import_module(settings.SESSION_ENGINE).SessionStore(key).load()
    user = User.objects.filter(pk=session.get(SESSION_KEY) or 0, is_active=True).first()
    if user is None or user.must_change_password:
        return None
    valid = [user.get_session_auth_hash(), *user.get_session_auth_fallback_hash()]
    sealed = session.get(HASH_SESSION_KEY, "")
    if not any(constant_time_compare(sealed, one) for one in valid):
        return None
    return principal_for(user, Means.BROWSER)


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
