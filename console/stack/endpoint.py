"""Where an embedded server listens: a Unix socket, or a loopback port where its path cannot be one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

# sun_path holds 108 bytes on Linux and 104 on macOS, each with a closing NUL.
SOCKET_PATH_BYTES_MAX = 103
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class UnixEndpoint:
    """A socket file; the directory around it is what keeps strangers out."""

    path: Path

    def connect(self, timeout_seconds: float) -> socket.socket:
        return _connected(socket.AF_UNIX, str(self.path), timeout_seconds)

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class TcpEndpoint:
    """A loopback port; every user of the machine can reach it, so the password is what protects."""

    port: int

    def connect(self, timeout_seconds: float) -> socket.socket:
        return _connected(socket.AF_INET, (LOOPBACK, self.port), timeout_seconds)

    def __str__(self) -> str:
        return f"{LOOPBACK}:{self.port}"


Endpoint = UnixEndpoint | TcpEndpoint


def choose(socket_path: Path) -> Endpoint:
    """The Unix socket at `socket_path` if its name is one that everybody can use, else a free port.

    The kernel limits its length, and libpq takes what has a comma in it for several hosts.
    """
    too_long = len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES_MAX
    if too_long or "," in str(socket_path):
        return TcpEndpoint(free_port())
    return UnixEndpoint(socket_path)


def free_port() -> int:
    """A loopback port that was free a moment ago; whoever loses the race is started again."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _connected(
    family: socket.AddressFamily, address: str | tuple[str, int], timeout_seconds: float
) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
