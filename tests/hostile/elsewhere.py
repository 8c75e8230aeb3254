"""Attackers who are busy with somebody else: what it costs a stack that this machine runs them, too.

They do what attackers spend their time on, compute and send, and never to the stack. On machines of
their own they would cost it nothing.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from contextlib import closing
from typing import Final

PIECE_BYTES: Final = 256 << 10


def work(ends: threading.Event) -> int:
    """Attack nobody until told to end; how many bytes were sent."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        reader = threading.Thread(target=_swallow, args=(theirs,))
        reader.start()
        sent, piece = 0, bytearray(PIECE_BYTES)
        while not ends.is_set():
            piece[:32] = hashlib.sha256(piece).digest()
            ours.sendall(piece)
            sent += len(piece)
        ours.shutdown(socket.SHUT_WR)
        reader.join()
    return sent


def _swallow(theirs: socket.socket) -> None:
    into = bytearray(PIECE_BYTES)
    while theirs.recv_into(into):
        pass
