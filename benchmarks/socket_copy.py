"""The limit of a stream: a process that does nothing but receive and send, by the same system calls.

`python -m benchmarks.socket_copy unix PATH | tcp`: prints its port, then serves one connection after
another. A request is 17 bytes: what, size, count. `p`: receive count times size bytes, then answer one
byte. `g`: send count times size bytes.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

from kvss_agent.data_plane.channel import prepare

REQUEST = struct.Struct("<cQQ")
MEMORY_BYTES = 256 << 20  # beyond any cache, as an arena is


def open_socket(kind: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    prepare(made)
    return made


def receive_exactly(sock: socket.socket, place: memoryview) -> bool:
    while place:
        count = sock.recv_into(place)
        if not count:
            return False
        place = place[count:]
    return True


class Remote:
    """The near side: copies of `size` bytes to and from memory that is cold on both sides."""

    def __init__(self, kind: str, place: str | tuple[str, int]) -> None:
        self._socket = open_socket(kind)
        self._socket.connect(place)
        self._byte = memoryview(bytearray(1))

    def put(self, sources: list[memoryview]) -> None:
        """Send all of these, and wait until they have arrived."""
        self._socket.sendall(REQUEST.pack(b"p", len(sources[0]), len(sources)))
        for source in sources:
            self._socket.sendall(source)
        receive_exactly(self._socket, self._byte)

    def get(self, places: list[memoryview]) -> None:
        """Ask once for all of these."""
        self._socket.sendall(REQUEST.pack(b"g", len(places[0]), len(places)))
        for place in places:
            receive_exactly(self._socket, place)

    def close(self) -> None:
        self._socket.close()


def _serve(sock: socket.socket, memory: memoryview) -> None:
    head = memoryview(bytearray(REQUEST.size))
    at = 0
    while receive_exactly(sock, head):
        what, size, count = REQUEST.unpack(head)
        for _ in range(count):
            at = 0 if at + 2 * size > len(memory) else at + size
            place = memory[at : at + size]
            if what == b"p":
                receive_exactly(sock, place)
            else:
                sock.sendall(place)
        if what == b"p":
            sock.sendall(b"x")
    sock.close()


def main(kind: str, path: str = "") -> None:
    memory = memoryview(bytearray(b"\1") * MEMORY_BYTES)
    listener = open_socket(kind)
    listener.bind(path if kind == "unix" else ("127.0.0.1", 0))
    listener.listen(8)
    print(0 if kind == "unix" else listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        prepare(sock)
        threading.Thread(target=_serve, args=(sock, memory), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
