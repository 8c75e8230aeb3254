"""A way to a server that can be cut as a network is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
CARRIER_SECONDS_MAX = 10.0  # until a connection of the proxy has ended with its peers


class Proxy(threading.Thread):
    """A way to the API server, or to a pod, that can be cut as a network is: what is sent is lost, and
    not refused. `to`, an address or the socket of a file, may change; it is for connections from then
    on."""

    def __init__(self, to: tuple[str, int] | Path, host: str = LOOPBACK) -> None:
        super().__init__(daemon=True)
        self.to = to
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self._is_cut = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._carriers: list[threading.Thread] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                far = self._connected()
                self._pairs.append((near, far))
                for one, other in ((near, far), (far, near)):
                    carrier = threading.Thread(target=self._carry, args=(one, other), daemon=True)
                    self._carriers.append(carrier)
                    carrier.start()

    def _connected(self) -> socket.socket:
        if not isinstance(self.to, Path):
            return socket.create_connection(self.to)
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(self.to))
        return made

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            while piece := one.recv(1 << 16):
                if not self._is_cut.is_set():
                    other.sendall(piece)
            other.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self._is_cut.set()
        try:
            yield
        finally:
            self._end_pairs()  # a part of what they carried is lost
            self._is_cut.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()
        self._end_pairs()
        for carrier in self._carriers:
            carrier.join(CARRIER_SECONDS_MAX)

    def _end_pairs(self) -> None:
        for pair in self._pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()
