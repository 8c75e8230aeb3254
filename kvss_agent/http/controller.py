"""What the control APIs of agents and drivers share beyond `api`: how the console proves who it is, and
what it asks of both alike.

It has the token, and over TLS its certificate; see `kvss_agent.http.server`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvss_agent.documents import decode
from kvss_agent.http.api import CONTROLLER, Refused, as_json, bearer, body_of, is_token, problem
from kvss_agent.http.extension import EXTENSION
from kvss_agent.http.server import HttpConnection
from kvss_agent.security.certificates import Peer, Role, peer_of_connection
from kvss_agent.security.confirmations import NotConfirmedYet, Question, Statement, sign
from kvss_agent.security.identity import ProcessIdentity

METRICS: Final = "/metrics"
CONSOLE_ONLY: Final = (
    "Beside the token the console's certificate is needed. Ask the console's API or pages instead; "
    f"`{METRICS}` takes the token alone."
)
_PEER: Final = "peer"
_QUESTION: Final = msgspec.json.Decoder(Question)


def application(routes: Sequence[Route]) -> Starlette:
    return Starlette(routes=routes, exception_handlers={HTTPException: _error, Exception: _failure})


async def _error(_request: Request, error: Exception) -> Response:
    status = HTTPStatus(error.status_code if isinstance(error, HTTPException) else 500)
    return problem(
        status, "There is nothing here." if status == HTTPStatus.NOT_FOUND else status.description
    )


async def _failure(_request: Request, _error: Exception) -> Response:
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error; see the log.")


# Who asks


def is_private(request: Request) -> bool:
    """Whether it came over TLS."""
    return bool(request.scope["scheme"] == "https")


def peer_of_request(request: Request) -> Peer | None:
    """Who has shown a certificate; None without TLS, or without one."""
    if not is_private(request):
        return None
    extensions = request.scope["extensions"]  # one for all requests of a connection
    if _PEER not in extensions:
        connection: HttpConnection = extensions[EXTENSION]
        transport = connection.transport
        found = transport.get_extra_info("ssl_object") if transport else None
        extensions[_PEER] = peer_of_connection(found)
    peer: Peer | None = extensions[_PEER]
    return peer


def controller_of(request: Request, token: str) -> str | None:
    """The console, as the owner of the connection; None for who has another token. Without TLS nobody
    can tell more, and the token has to be enough. Raises Refused where the certificate is missing."""
    if not is_token(bearer(request), token):
        return None
    # `request.url` is made of the Host header, and so of what the caller writes.
    if is_private(request) and request.scope["path"] != METRICS:
        peer = peer_of_request(request)
        if peer is None or peer.role is not Role.CONSOLE:
            raise Refused(HTTPStatus.UNAUTHORIZED, CONSOLE_ONLY)
    return CONTROLLER


# What both answer


def health(*, ready: bool) -> Response:
    """Alive, and whether all that was asked for is there. Says nothing that is worth a token."""
    return as_json({"live": True, "ready": ready}, 200 if ready else 503)


async def confirm_purge(
    request: Request,
    identity: ProcessIdentity | None,
    purge: Callable[[Question], Awaitable[Statement]],
) -> Response:
    """Remove all that was asked for: 200 with a signed statement, 202 with a sentence while it is not
    done. `identity`: what it is signed with."""
    question = decode(await body_of(request), _QUESTION)
    if identity is None:
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "There is no identity to sign with.")
    try:
        statement = await purge(question)
    except NotConfirmedYet as why:
        return as_json({"detail": str(why)}, 202)
    return as_json(sign(identity, statement))
