"""Who asks at a control API, by the certificate of the connection. See `kvss_agent.http.server`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request

from kvss_agent.http.api import Refused
from kvss_agent.http.server import EXTENSION, HttpConnection
from kvss_agent.security.certificates import Peer, Role, peer_of_connection

CONSOLE_ONLY: Final = (
    "Beside the token the console's certificate is needed. Ask the console's API or pages instead; "
    "`/metrics` takes the token alone."
)
_PEER = "peer"


def is_private(request: Request) -> bool:
    """Whether it came over TLS."""
    return request.url.scheme == "https"


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


def is_of_console(request: Request) -> bool:
    """Whether the console asks. Without TLS nobody can tell, and its token has to be enough."""
    peer = peer_of_request(request)
    return not is_private(request) or (peer is not None and peer.role is Role.CONSOLE)


def check_console(request: Request) -> None:
    """For who has shown the console's token. Raises Refused, and says what is missing."""
    if not is_of_console(request):
        raise Refused(HTTPStatus.UNAUTHORIZED, CONSOLE_ONLY)
