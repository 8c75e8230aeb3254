"""Endpoints of replicas, as gateways name them: `IP:port`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

SECONDS: Final = 10.0  # that a name is not looked up again
KNOWN_MAX: Final = 10_000
_PORTS: Final = {"http": 80, "https": 443}


class _Known(NamedTuple):
    ip: str
    until: float


class Addresses:
    """Names are looked up, and remembered for a while. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def endpoint(self, url: str) -> str | None:
        """Of a replica's URL; None if it has none, if its name is not known, and if it can't be used."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
        except ValueError:
            return None
        if port is None:
            return None
        ip = await self._ip(host)
        if ip is None:
            return None
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    async def _ip(self, host: str) -> str | None:
        known = self._known.get(host)
        if known and self._clock() < known.until:
            return known.ip
        try:
            return str(ip_address(host))
        except ValueError:
            pass
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, ValueError):
            return known.ip if known else None  # better an old one than none
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        ip = str(found[0][4][0])
        self._known[host] = _Known(ip, self._clock() + SECONDS)
        return ip


def allows(among: object, endpoint: str) -> bool:
    """Whether a gateway's subset has this endpoint, or all of its machine."""
    return not isinstance(among, frozenset) or endpoint in among or endpoint.rpartition(":")[0] in among
