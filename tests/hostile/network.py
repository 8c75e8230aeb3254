"""An evil network: a TCP proxy that records, delays, drips, cuts and reorders what passes it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Self

RECORDED_BYTES_MAX: Final = 64 << 20
PIECE_BYTES: Final = 1 << 16


@dataclass
class Weather:
    """What it does to bytes from now on. Both directions alike."""

    delay_seconds: float = 0.0  # before each piece
    piece_bytes: int = PIECE_BYTES  # at most so many at once: 1 drips
    cut_after_bytes: int | None = None  # a connection ends after so many
    flip: float = 0.0  # the share of pieces in which a bit is turned over
    swap: float = 0.0  # the share of pieces that are sent in two halves, the later half first


@dataclass
class Network:
    """Between those who connect to `port` and whoever listens at `target`, a TCP port of this machine.

    `recorded` is all that has passed, in both directions, up to RECORDED_BYTES_MAX.
    """

    target: int
    weather: Weather = field(default_factory=Weather)
    seed: int = 7
    recorded: bytearray = field(default_factory=bytearray)
    connections: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="network", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections that pass it now."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.connections += 1
            for source, sink in ((near, far), (far, near)):
                self._open.add(source)
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(self.weather.piece_bytes):
                weather = self.weather
                if len(self.recorded) < RECORDED_BYTES_MAX:
                    self.recorded += piece
                if weather.delay_seconds:
                    time.sleep(weather.delay_seconds)
                sink.sendall(self._spoiled(piece, weather))
                carried += len(piece)
                if weather.cut_after_bytes is not None and carried >= weather.cut_after_bytes:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()

    def _spoiled(self, piece: bytes, weather: Weather) -> bytes:
        if weather.flip and self._random.random() < weather.flip:
            spoiled = bytearray(piece)
            spoiled[self._random.randrange(len(spoiled))] ^= 1 << self._random.randrange(8)
            piece = bytes(spoiled)
        if weather.swap and self._random.random() < weather.swap:
            half = len(piece) // 2
            piece = piece[half:] + piece[:half]
        return piece
