"""Endpoints of replicas, as gateways name them: `IP:port`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Collection
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import urlsplit

SECONDS: Final = 10.0  # that a name is not looked up again
WAIT_SECONDS: Final = 2.0  # of a request, for names that nobody has waited for
AGAIN_SECONDS: Final = 0.1  # for others: what is known of them may still be so
KNOWN_MAX: Final = 10_000
_PORTS: Final = {"http": 80, "https": 443}


class _Known(NamedTuple):
    ip: str | None  # None: nobody knows the name
    until: float


class Addresses:
    """Names are looked up, and remembered for a while. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def endpoints(self, urls: Collection[str]) -> dict[str, str | None]:
        """Of replicas, by their URLs; None for one that is empty or can't be used, and where the name is
        not known. Names are looked up beside each other; one request waits for them, and not long."""
        now = self._clock()
        names = {name for url in urls if (name := _place(url).name)}
        if due := [one for one in names if not self._is_known(one, now)]:
            is_first = any(one not in self._known for one in due)
            seconds = WAIT_SECONDS if is_first else AGAIN_SECONDS
            await asyncio.wait([self._look_up(one) for one in due], timeout=seconds)
            for one in due:
                self._known.setdefault(one, _Known(None, now))
        return {url: self._endpoint(_place(url)) for url in urls}

    def _is_known(self, name: str, now: float) -> bool:
        known = self._known.get(name)
        return known is not None and now < known.until

    def _endpoint(self, place: _Place) -> str | None:
        known = self._known.get(place.name)
        ip = known.ip if known else place.ip
        if not ip:
            return None
        return f"[{ip}]:{place.port}" if ":" in ip else f"{ip}:{place.port}"

    def _look_up(self, name: str) -> asyncio.Task[None]:
        """One at a time, for all who want to know."""
        looking = self._looking.get(name)
        if looking is None:
            looking = self._looking[name] = asyncio.create_task(self._find(name))
            looking.add_done_callback(lambda _: self._looking.pop(name))
        return looking

    async def _find(self, name: str) -> None:
        before = self._known.get(name)
        ip = before.ip if before else None  # better an old one than none
        with contextlib.suppress(OSError, ValueError):
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            ip = str(found[0][4][0])
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[name] = _Known(ip, self._clock() + SECONDS)


class _Place(NamedTuple):
    """Of a URL: `ip`, or a `name` for one; neither if it can't be used."""

    name: str = ""
    ip: str = ""
    port: int = 0


@lru_cache(maxsize=KNOWN_MAX)
def _place(url: str) -> _Place:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return _Place()
    if not host or port is None:
        return _Place()
    try:
        return _Place(ip=str(ip_address(host)), port=port)
    except ValueError:
        return _Place(name=host, port=port)


def allows(among: object, endpoint: str) -> bool:
    """Whether a gateway's subset has this endpoint, or all of its machine."""
    return not isinstance(among, frozenset) or endpoint in among or endpoint.rpartition(":")[0] in among
