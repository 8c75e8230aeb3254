"""Connecting to a host by its name, which may have several addresses: nobody may listen at some."""

from __future__ import annotations

import socket
import time
from typing import Final

ADDRESSES_MAX: Final = 4  # of one name that are tried


def connected_to(host: str, port: int, seconds: float) -> socket.socket:
    """A connection to the first of its addresses that accepts one, in so many seconds after the name was
    looked up: each address has an equal part of what is left. Raises OSError, with why the last one does
    not. The timeout of the socket is the caller's to set."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:ADDRESSES_MAX]
    except UnicodeError as error:
        raise OSError(f"{host} is no name of a host") from error
    until = time.monotonic() + seconds
    failed = OSError(f"{host} has no address")
    for number, (family, kind, protocol, _, place) in enumerate(found):
        left = (until - time.monotonic()) / (len(found) - number)
        try:
            return _connected(socket.socket(family, kind, protocol), place, max(left, 0.001))
        except OSError as error:
            failed = error
    raise failed


def _connected(sock: socket.socket, place: object, seconds: float) -> socket.socket:
    try:
        sock.settimeout(seconds)
        sock.connect(place)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock
