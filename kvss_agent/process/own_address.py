"""The address of this machine, as others see it."""

from __future__ import annotations

import socket
from typing import Final
from urllib.parse import urlsplit

PORTS: Final = {"http": 80, "https": 443}


def own_address(url: str) -> str | None:
    """The address of this machine from which it reaches that URL; None if it does not, or if nobody
    knows its name just now.

    Nothing is sent to it: this asks for its name, and the routing table.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 443)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, place = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None
