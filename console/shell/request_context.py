"""What is known of the request being served, for logs, the audit trail and Celery."""

from __future__ import annotations

import ipaddress
import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.http import HttpRequest

from kvss_agent.http.extension import EXTENSION

if TYPE_CHECKING:
    from kvss_agent.http.server import HttpConnection

KNOWN = "tidegate.known"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WITH_PORT = re.compile(r"^(?:\[([^\]]*)\](?::\d+)?|([0-9.]+):\d+)$")


@dataclass(frozen=True)
class RequestContext:
    request_id: str
    address: str | None = None  # of the client; None where no request came over the network


_current: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current() -> RequestContext | None:
    return _current.get()


def current_id() -> str:
    context = _current.get()
    return context.request_id if context else ""


def enter(context: RequestContext | None) -> None:
    """From here on, in this task or thread, `current` is this."""
    _current.set(context)


def of_request(request: HttpRequest) -> RequestContext:
    """The caller's X-Request-ID where it is well formed, otherwise one of our own."""
    given = request.headers.get("X-Request-ID", "")
    request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return RequestContext(request_id, client_address(request))


def client_address(request: HttpRequest) -> str | None:
    """The client's address: what the outermost of our own proxies saw, or the peer itself."""
    peer = request.META.get("REMOTE_ADDR") or None
    return address_behind(request.headers.get("X-Forwarded-For", ""), peer)


def address_behind(forwarded: str, peer: str | None) -> str | None:
    """The same of a header X-Forwarded-For and a peer. Entries of the header beyond the trusted proxies
    are the client's own claim."""
    proxies = settings.ENVIRONMENT.trusted_proxies
    if proxies:
        chain = [part.strip() for part in forwarded.split(",")]
        if len(chain) >= proxies and chain[-proxies]:
            return _as_address(chain[-proxies])
    return _as_address(peer or "")


def _as_address(text: str) -> str | None:
    """Some proxies append the port, and some write `unknown`. The audit trail stores addresses only."""
    bare = _WITH_PORT.sub(r"\1\2", text)
    try:
        return str(ipaddress.ip_address(bare.partition("%")[0]))
    except ValueError:
        return None


def note_known(asked: HttpRequest | dict[str, Any], owner: str) -> None:
    """Whoever sent this request, or opened this WebSocket (its scope), has shown a good credential: it
    and its connection are no stranger's any more, but the `owner`'s: a person or a process, and not one
    of the credentials that they have. Any thread may say so."""
    scope = getattr(asked, "scope", None) if isinstance(asked, HttpRequest) else asked
    if scope is None:
        return  # it did not come over the network
    scope[KNOWN] = owner
    connection: HttpConnection | None = scope.get("extensions", {}).get(EXTENSION)
    if connection is not None:
        connection.prove(owner)
