"""Where an embedded server listens: a Unix socket, or a loopback port where its path cannot be one. And
where the console does."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from console.stack.errors import StackError

# sun_path holds 108 bytes on Linux and 104 on macOS, each with a closing NUL.
SOCKET_PATH_BYTES_MAX = 103
LOOPBACK = "127.0.0.1"
PORTS_TRIED = 100
PORT_MAX = 65535
BACKLOG = 512


@dataclass(frozen=True)
class UnixEndpoint:
    """A socket file; the directory around it is what keeps strangers out."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class TcpEndpoint:
    """A loopback port; every user of the machine can reach it, so the password is what protects."""

    port: int

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


# The socket of the console, opened before and kept beyond any process that serves it


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket on the first free port from `port` on. It stays open while the web process changes."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    last = min(port + PORTS_TRIED - 1, PORT_MAX)
    for candidate in range(port, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((bare, candidate))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                continue
            sentence = f"Cannot listen on {host}, port {candidate}: {error.strerror}. Set "
            raise StackError(sentence + "TIDEGATE_HOST or TIDEGATE_PORT.") from error
        return listener
    sentence = f"Every port from {port} to {last} on {host} is in use. Set TIDEGATE_PORT to another."
    raise StackError(sentence)


def first_free_port(port: int) -> int:
    """Of this machine alone, from `port` on; free a moment ago. Raises StackError."""
    with listening_socket(LOOPBACK, port) as probe:
        found: int = probe.getsockname()[1]
        return found


def address(host: str, listener: socket.socket) -> str:
    """What to type into a browser on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - shown, not bound
    return f"http://{everywhere.get(host, host)}:{listener.getsockname()[1]}"
