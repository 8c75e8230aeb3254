"""A server of LMCache's `lm://` protocol, so that every engine with LMCache is a client without changes.

    $ python -m swdriver_shim serve --lmcache acme=10.0.0.7:65432

The protocol does not identify its callers, so each org has a listener of its own, and every connection
to it is served as that org. Tags (`lmcache.tag.*`) are part of each key and separate what is stored for
an org.

Failures are misses. A client that sends invalid frames, or stops in the middle of one, loses its
connection; others are not affected. Until its first request is complete, a client takes one of the
places for silent connections. If these are full, the oldest is closed: silent connections keep no engine
out.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from kvss_agent.limits.admission import Admission, Places
from kvss_agent.limits.origins import origin_of_socket
from swdriver_shim.adapters.lmcache_frames import (
    REQUEST_BYTES,
    SHAPE,
    SHAPE_BYTES,
    Code,
    Command,
    Malformed,
    Request,
    answer,
    parse,
)
from swdriver_shim.adapters.remote import Objects
from swdriver_shim.object_store import too_large

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 256  # of one listener that have asked for something: each may hold one value
SILENT_MAX: Final = 256  # that have not; engines connect long before they ask
SILENT_PER_ORIGIN: Final = 128
FRAME_SECONDS_MAX: Final = 30.0  # to send a request with its value, or to take an answer
TIER2_SECONDS: Final = 0.1  # a client waits for its answer, and its engine with it
REST_SECONDS: Final = 60.0  # then a connection without requests has no memory for values any more
SCRAP_BYTES: Final = 1 << 16
STOP_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 60  # then the kernel asks every 10 whether a client's machine is still there
COUNTED: Final = (
    *("puts", "puts_missed", "gets", "gets_missed", "looks", "looks_missed"),
    *("connections_closed", "connections_broken", "connections_malformed"),
    *("connections_stalled", "connections_refused"),
)


_TIME: Final = struct.Struct("@ll")  # of the kernel: seconds and microseconds
_FOREVER: Final = _TIME.pack(0, 0)


class LmcacheServer:
    """Serves one listener, for one org."""

    def __init__(
        self,
        listener: socket.socket,
        objects: Callable[[], Objects | None],
        *,
        frame_seconds: float = FRAME_SECONDS_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`objects` returns the org's objects, or None while there are none, which is a miss."""
        self.counts = dict.fromkeys(COUNTED, 0)  # what became of requests and connections
        self._listener = listener
        self._objects = objects
        self._frame_seconds = frame_seconds
        places = Places(SILENT_MAX, SILENT_PER_ORIGIN, connections_max)
        self._admission: Admission[socket.socket] = Admission(places)
        self._open: dict[socket.socket, threading.Thread] = {}  # at most as many, and those that end
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="lmcache front", daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            left = dict(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in left:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._accepting, *left.values()):
            thread.join(STOP_SECONDS)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    log.warning("Cannot accept a connection yet: %s", error.strerror)
                    time.sleep(0.1)  # descriptors may come free
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            origin = origin_of_socket(sock)
        except OSError:  # it has broken off already
            self._end(sock, "connections_broken")
            return
        places = self._admission.places
        with self._lock:
            is_full = len(self._open) >= 2 * places.strangers_max + places.proven_max
            if not self._stopping.is_set() and not is_full:
                thread = threading.Thread(target=self._serve, args=(sock, origin), daemon=True)
                self._open[sock] = thread
        if sock not in self._open:
            self._end(sock, "connections_refused")
            return
        displaced = self._admission.enter(sock, origin)
        if displaced is not None:
            with contextlib.suppress(OSError):  # its thread ends then
                displaced.shutdown(socket.SHUT_RDWR)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("A connection was refused: %s", error)
            self._end(sock, "connections_refused")

    def _serve(self, sock: socket.socket, origin: str) -> None:
        why = "connections_closed"
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_death(sock)
            connection = Connection(sock, self._frame_seconds)
            while (raw := connection.request()) is not None:
                request = parse(raw)
                if not self._admission.prove(sock, origin):
                    why = "connections_refused"
                    return
                self._answer(connection, request)
        except Malformed as error:
            why = "connections_malformed"
            log.warning("The connection of an LMCache client was closed: %s", error)
        except BlockingIOError:  # the time was over
            why = "connections_stalled"
        except OSError:
            why = "connections_broken"
        finally:
            self._end(sock, why)

    def _end(self, sock: socket.socket, why: str) -> None:
        with self._lock:
            self.counts[why] += 1
            self._open.pop(sock, None)
        self._admission.leave(sock)
        sock.close()

    def _answer(self, connection: Connection, request: Request) -> None:
        match request.command:
            case Command.PUT:
                self._count("puts", is_done=self._put(connection, request))
            case Command.GET:
                self._count("gets", is_done=self._get(connection, request))
            case Command.EXIST:
                objects = self._objects()
                is_there = objects is not None and all(objects.exists([request.key], TIER2_SECONDS))
                self._count("looks", is_done=is_there)
                connection.send(answer(Code.SUCCESS if is_there else Code.FAIL))
            case Command.HEALTH:
                connection.send(answer(Code.SUCCESS))
            case Command.LIST:  # which the stock server does not answer at all
                connection.send(answer(Code.FAIL))

    def _count(self, what: str, *, is_done: bool) -> None:
        with self._lock:
            self.counts[what if is_done else f"{what}_missed"] += 1

    def _put(self, connection: Connection, request: Request) -> bool:
        """Returns whether the value is stored. It is received in any case."""
        objects = self._objects()
        size = SHAPE_BYTES + request.length
        if objects is None or not request.length or size > objects.value_bytes_max:
            if objects is not None and request.length:
                log.warning(too_large("A value of LMCache", size, objects.value_bytes_max))
            connection.skip(request.length)
            return False
        room = connection.room(size)
        room[:SHAPE_BYTES] = SHAPE.pack(*request.shape)
        connection.receive_into(room[SHAPE_BYTES:])
        return all(objects.put([request.key], [room]))

    def _get(self, connection: Connection, request: Request) -> bool:
        objects = self._objects()
        if objects is not None:
            room = connection.room(objects.value_bytes_max)
            [size] = objects.get([request.key], [room], TIER2_SECONDS)
            if size is not None and size > SHAPE_BYTES:
                shape = SHAPE.unpack(room[:SHAPE_BYTES])
                value = room[SHAPE_BYTES:size]
                connection.send(answer(Code.SUCCESS, len(value), shape), value)
                return True
        connection.send(answer(Code.FAIL))
        return False


def _notice_death(sock: socket.socket) -> None:
    """Close connections of machines that are down: the number of connections is limited."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def _time(seconds: float) -> bytes:
    """For the kernel, to which 0 means forever."""
    return _TIME.pack(*divmod(max(1, int(seconds * 1e6)), 1_000_000))


class Connection:
    """Between frames a client may be silent for as long as its machine lives; within one there is a
    deadline.

    The kernel waits and counts the time, for whole values at once: our thread is not woken for each
    piece that has come or gone.
    """

    def __init__(
        self, sock: socket.socket, frame_seconds: float, rest_seconds: float = REST_SECONDS
    ) -> None:
        self._sock = sock
        self._rest_seconds = rest_seconds
        self._frame_seconds = frame_seconds
        self._until = 0.0  # of the frame that is received
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(frame_seconds))
        self._head = bytearray(REQUEST_BYTES)
        self._room = bytearray()

    def request(self) -> bytearray | None:
        """The next one; None if the client has left. In a long silence the memory for values is freed:
        each connection may have as much as the largest value."""
        head = memoryview(self._head)
        rest = _time(self._rest_seconds) if self._room else _FOREVER
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, rest)
        try:
            count = self._sock.recv_into(head)
        except BlockingIOError:
            self._room = bytearray()
            return self.request()
        self._until = time.monotonic() + self._frame_seconds
        if 0 < count < len(head):
            self.receive_into(head[count:])
        return self._head if count else None

    def room(self, size: int) -> memoryview:
        """Memory for one value, used again for the next one."""
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)[:size]

    def receive_into(self, place: memoryview) -> None:
        """Within what is left of the frame's time."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise BlockingIOError
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(left))
        count = self._sock.recv_into(place, len(place), socket.MSG_WAITALL)
        if count < len(place):
            raise BlockingIOError if count else ConnectionResetError

    def skip(self, size: int) -> None:
        """Receive so many bytes and drop them."""
        scrap = memoryview(bytearray(min(size, SCRAP_BYTES)))
        while size:
            self.receive_into(scrap[:size])
            size -= min(size, len(scrap))

    def send(self, head: bytes, value: memoryview | None = None) -> None:
        parts = [memoryview(head), value] if value else [memoryview(head)]
        if self._sock.sendmsg(parts) < sum(map(len, parts)):
            raise BlockingIOError
