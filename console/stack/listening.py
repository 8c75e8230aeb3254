"""The socket of the console, opened before and kept beyond any process that serves it."""

from __future__ import annotations

import errno
import socket

from console.stack.errors import StackError

PORTS_TRIED = 100
PORT_MAX = 65535
BACKLOG = 512


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


def address(host: str, listener: socket.socket) -> str:
    """What to type into a browser on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - shown, not bound
    return f"http://{everywhere.get(host, host)}:{listener.getsockname()[1]}"
