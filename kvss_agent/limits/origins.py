"""Where a connection comes from, as a text by which strangers share a quota."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

PREFIX_BITS: Final = 64  # whoever has one IPv6 address has all of its /64
UNKNOWN: Final = "unknown"
_CREDENTIALS: Final = struct.Struct("3i")  # of the peer's process: pid, uid, gid


def origin_of(address: str) -> str:
    """The IPv4 address itself; of an IPv6 address its /64. Text that is no address has one origin."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return UNKNOWN
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ip_network((found, PREFIX_BITS), strict=False))
    return str(found)


def origin_of_socket(sock: socket.socket) -> str:
    """Of who is connected: by address, or over a Unix socket by user. Raises OSError if it has left."""
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return f"uid:{_CREDENTIALS.unpack(raw)[1]}"
    return origin_of(sock.getpeername()[0])
