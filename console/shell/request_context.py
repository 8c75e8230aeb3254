"""What is known of the request being served, for logs, the audit trail and Celery."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from django.conf import settings
from django.http import HttpRequest

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
    """The client's address: what the outermost of our own proxies saw, or the peer itself.

    Entries of X-Forwarded-For beyond the trusted proxies are the client's own claim.
    """
    proxies = settings.ENVIRONMENT.trusted_proxies
    if proxies:
        chain = [part.strip() for part in request.headers.get("X-Forwarded-For", "").split(",")]
        if len(chain) >= proxies and chain[-proxies]:
            return chain[-proxies]
    return request.META.get("REMOTE_ADDR") or None
