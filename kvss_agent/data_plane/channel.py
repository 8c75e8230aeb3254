"""A connected socket that sends and receives whole things, in place, and does not wait for ever.

`PlainChannel` blocks in the kernel, which measured as fast as C gets here. `TlsChannel` is the same over
TLS. Either may be read by one thread while others send.
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from xxhash import xxh3_64

from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.wire import EXTENTS_MAX, Filled, Frame, FrameReader
from kvss_agent.memory import unwritten
from kvss_agent.mover import PIECE_BYTES, PYTHON, Bytes, Mover

STALL_SECONDS: Final = 10.0  # without a byte moving, in the middle of a frame
# That a peer's bytes have to come at, beside the stall time: a hundredth of the slowest link between
# agents. Whoever sends a byte each time that it would have stalled holds nobody up for longer.
BYTES_PER_SECOND_MIN: Final = 1 << 20
# An unreachable peer is noticed after eleven seconds, even if nobody asks it for anything.
KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
# So much may be on its way over a Unix socket while one side sums up and the other keeps its books. TCP
# is left to find its own: every fixed size measured slower, and small ones stall.
UNIX_BUFFER_BYTES: Final = 1024 * 1024
# Of one call to send over a Unix socket: the kernel begins its timeout anew with each piece it queues,
# and how long all takes is looked at between calls.
UNIX_CALL_BYTES: Final = 4 << 20
_IOV_MAX: Final = 512
T = TypeVar("T")
_WOULD_BLOCK: Final = (errno.EAGAIN, errno.EWOULDBLOCK)


class Piece(NamedTuple):
    """Some bytes of a payload that have arrived."""

    place: int  # its index
    bytes: memoryview
    last: bool  # the place is full


class Closed(Exception):
    """The other side is gone."""


class PlainChannel:
    """A Unix or TCP socket."""

    def __init__(self, sock: socket.socket, stall_seconds: float = STALL_SECONDS) -> None:
        prepare(sock)
        sock.setblocking(True)
        self.socket = sock
        self.descriptors: list[int] = []
        self._sending = threading.Lock()
        self.stall_seconds = stall_seconds
        self.wait_at_most(stall_seconds)

    def wait_at_most(self, seconds: float) -> None:
        """Wait for a byte to come or go, before TimeoutError, never longer than for the stall time.

        By the kernel's own timeouts: those of Python cost a poll before every call.
        """
        micros = max(1, int(min(seconds, self.stall_seconds) * 1e6))  # 0 would be for ever
        whole, micros = divmod(micros, 1_000_000)
        timeout = struct.pack("ll", whole, micros)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive_into(self, place: memoryview) -> int:
        """Some bytes, at least one. Raises Closed at the end, and TimeoutError."""
        try:
            count = self.socket.recv_into(place)
        except OSError as error:
            raise _translated(error) from error
        if not count:
            raise Closed
        return count

    def receive_by(
        self, compiled: Callable[[socket.socket, float], T | None], places: Sequence[memoryview]
    ) -> T:
        """What compiled code receives into these places, or makes of it. Raises Closed and
        Breach(STALLED)."""
        try:
            received = compiled(self.socket, seconds_for(self, places))
        except OSError as error:
            translated = _translated(error)
            if isinstance(translated, TimeoutError):
                raise Breach(Cause.STALLED, "nothing comes, or too slowly") from error
            raise translated from error
        if received is None:
            raise Closed
        return received

    def has_more(self) -> bool:
        """Whether something is here. May be False although more is on its way, and at the end."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def comes_within(self, seconds: float) -> bool:
        """Wait for something to receive, or the end, at most so long; whether it has come."""
        return _poll(self.socket, select.POLLIN, seconds)

    @property
    def has_ended(self) -> bool:
        """Whether the peer has ended it, or the network says so. Known without receiving anything."""
        return _has_ended(self.socket)

    def receive_with_descriptors(self, place: memoryview) -> int:
        """As `receive_into`; file descriptors that come along are appended to `descriptors`."""
        room = socket.CMSG_SPACE((EXTENTS_MAX + 1) * array.array("i").itemsize)
        try:
            count, ancillary, _, _ = self.socket.recvmsg_into([place], room, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise _translated(error) from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors.extend(numbers)
        if not count:
            raise Closed
        return count

    def send(self, parts: Sequence[Bytes], descriptors: Sequence[int] = ()) -> None:
        """All of these bytes; over a Unix socket also descriptors.

        Raises Closed, or Breach(STALLED) when the peer does not read, or not within `seconds_for` them.
        """
        with self._sending:
            self._send(parts, descriptors)

    def send_at_once(self, frame: bytes) -> bool:
        """Send something small, unless others are sending or the peer does not read; whether it was
        sent. Raises as `send` does."""
        return _sent_at_once(self, self._sending, self._send, frame)

    def _send(self, parts: Sequence[Bytes], descriptors: Sequence[int] = ()) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        is_unix = self.socket.family == socket.AF_UNIX
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            if descriptors
            else []
        )
        until = time.monotonic() + seconds_for(self, left)
        while left:
            _check_reads(until)
            some = left[:_IOV_MAX]
            try:
                sent = self.socket.sendmsg(_front(some) if is_unix else some, ancillary)
            except OSError as error:
                translated = _translated(error)
                if isinstance(translated, TimeoutError):
                    raise Breach(Cause.STALLED, "the peer does not read") from error
                raise translated from error
            ancillary = []
            _drop(left, sent)

    def close(self) -> None:
        """End it; whoever is receiving or sending in another thread gets Closed."""
        shut(self.socket)
        while self.descriptors:
            os.close(self.descriptors.pop())


class TlsChannel:
    """As `PlainChannel`, over TLS. OpenSSL allows one call at a time, so nobody waits inside one."""

    def __init__(self, sock: ssl.SSLSocket, stall_seconds: float = STALL_SECONDS) -> None:
        prepare(sock)
        sock.setblocking(False)
        self.socket = sock
        self.stall_seconds = self._wait_seconds = stall_seconds
        self._calling = threading.Lock()
        self._sending = threading.Lock()

    def wait_at_most(self, seconds: float) -> None:
        self._wait_seconds = min(seconds, self.stall_seconds)

    def receive_into(self, place: memoryview) -> int:
        whole_by = time.monotonic() + self._wait_seconds  # a record: it may drip as well
        count = self._call(self.socket.recv_into, place, deadline=whole_by)
        if not count:
            raise Closed
        return count

    def send(self, parts: Sequence[Bytes], descriptors: Sequence[int] = ()) -> None:
        if descriptors:
            raise ValueError("TLS cannot carry file descriptors")
        with self._sending:
            self._send(parts)

    def send_at_once(self, frame: bytes) -> bool:
        """As `PlainChannel.send_at_once`."""
        return _sent_at_once(self, self._sending, self._send, frame)

    def _send(self, parts: Sequence[Bytes]) -> None:
        until = time.monotonic() + seconds_for(self, parts)
        for part in parts:
            left = memoryview(part)
            while left:
                try:
                    left = left[self._call(self.socket.send, left, deadline=until) :]
                except TimeoutError as error:
                    _check_reads(until)
                    raise Breach(Cause.STALLED, "the peer does not read") from error

    def has_more(self) -> bool:
        with self._calling:
            return self.socket.pending() > 0

    def comes_within(self, seconds: float) -> bool:
        return self.has_more() or _poll(self.socket, select.POLLIN, seconds)

    @property
    def has_ended(self) -> bool:
        return _has_ended(self.socket)

    def shake_hands(self, deadline: float) -> None:
        """The handshake of TLS itself. Raises Closed, or Breach: also if it is not done by then."""
        try:
            self._call(self.socket.do_handshake, deadline=deadline)
        except TimeoutError as error:
            raise Breach(Cause.STALLED, "the TLS handshake takes too long") from error

    def _call(self, call: Callable[..., T], *arguments: memoryview, deadline: float = math.inf) -> T:
        """Call this of OpenSSL, again each time that the socket has what it wanted: that may be often
        before all of a payload is sent. Raises TimeoutError, Closed and Breach."""
        while True:
            try:
                with self._calling:
                    return call(*arguments)
            except ssl.SSLWantReadError:
                direction = select.POLLIN
            except ssl.SSLWantWriteError:
                direction = select.POLLOUT
            except OSError as error:
                raise _translated(error) from error
            left = min(self._wait_seconds, deadline - time.monotonic())
            if left <= 0 or not _poll(self.socket, direction, left):
                raise TimeoutError

    def close(self) -> None:
        """As `PlainChannel.close`. Not in the middle of a call: OpenSSL goes by the number of the
        descriptor, which is another connection's as soon as this one is closed."""
        _wake(self.socket)
        with self._calling:
            self.socket.close()


AnyChannel = PlainChannel | TlsChannel


def receive(
    channel: AnyChannel, reader: FrameReader, *, patient: bool = False, deadline: float | None = None
) -> Frame | Filled:
    """The next frame, or the news that a place for a payload is full.

    Between frames a peer may be silent for as long as it likes if we are patient; in the middle of a
    frame it has stalled, also if it is not whole after the stall time. Bytes that drip are no excuse
    once the deadline has passed; after one, the caller says anew how long the channel waits.
    """
    whole_by = 0.0  # the frame that has begun
    while True:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Breach(Cause.STALLED, "it takes too long")
            channel.wait_at_most(left)
        try:
            found = reader.fed(channel.receive_into(reader.want()))
        except TimeoutError as error:
            if patient and reader.between_frames:
                continue
            raise Breach(Cause.STALLED, "nothing comes") from error
        if found is not None:
            return found
        whole_by = check_pace(channel, whole_by)


def check_pace(channel: AnyChannel, whole_by: float) -> float:
    """Some of a frame has come, and not all: by when that has to come. 0: it was the first. Raises
    Breach(STALLED)."""
    now = time.monotonic()
    if not whole_by:
        return now + channel.stall_seconds
    if now > whole_by:
        raise Breach(Cause.STALLED, "a frame comes too slowly")
    return whole_by


def seconds_for(channel: AnyChannel, places: Sequence[Bytes]) -> float:
    """How long payloads may take to fill these places, or what is sent until the peer has read it."""
    return channel.stall_seconds + sum(map(len, places)) / BYTES_PER_SECOND_MIN


def receive_pieces(
    channel: AnyChannel, reader: FrameReader, places: Sequence[memoryview], *, whole: bool = False
) -> Iterator[Piece]:
    """The payloads that follow a frame, into these places; each piece as it has arrived.

    Pieces are as small as is good for who sums them up; `whole` ones as large as they come. Raises
    Closed, and Breach(STALLED) where they do not come within `seconds_for` them.
    """
    if not places:
        return
    until = time.monotonic() + seconds_for(channel, places)
    reader.expect(places)
    last = False
    while not last:
        index, place = reader.place
        try:
            count = channel.receive_into(place if whole else place[:PIECE_BYTES])
        except TimeoutError as error:
            raise Breach(Cause.STALLED, "nothing comes") from error
        filled = reader.fed(count)
        last = isinstance(filled, Filled) and filled.last
        if not last and time.monotonic() > until:
            raise Breach(Cause.STALLED, "payloads come too slowly")
        yield Piece(index, place[:count], filled is not None)


def receive_sums(
    channel: AnyChannel, reader: FrameReader, places: Sequence[memoryview], mover: Mover = PYTHON
) -> list[int]:
    """The payloads that follow a frame, into these places; the checksum of each where it has arrived.

    Summed up piece by piece: while this one is still in the cache and the next on its way. A compiled
    mover asks for the interpreter once, where there is nothing to decrypt.
    """
    compiled: Callable[[socket.socket, Sequence[memoryview], float], list[int] | None] | None
    compiled = getattr(mover, "receive_payloads", None)
    if compiled and isinstance(channel, PlainChannel):
        receive = compiled
        return channel.receive_by(lambda sock, seconds: receive(sock, places, seconds), places)
    sums, sum_ = [], xxh3_64()
    for piece in receive_pieces(channel, reader, places):
        sum_.update(piece.bytes)
        if piece.last:
            sums.append(sum_.intdigest())
            sum_.reset()
    return sums


class DiscardBuffer:
    """A place for payloads that nobody wants: one for all, whose memory is taken as they come."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, length: int) -> memoryview:
        if len(self._memory) < length:
            self._memory = unwritten(length)
        return self._memory[:length]


def prepare(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def hang_up(sock: socket.socket) -> None:
    """Hear nothing more: whoever is receiving gets Closed, and something may still be said."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RD)


def shut(sock: socket.socket) -> None:
    """Wake whoever waits for this socket, and close it."""
    _wake(sock)
    sock.close()


def _wake(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # never connected, or closed by the other side
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _sent_at_once(
    channel: AnyChannel, sending: threading.Lock, send: Callable[[Sequence[Bytes]], None], frame: bytes
) -> bool:
    """A socket that can be written to has room for more than a few kilobytes."""
    if not sending.acquire(blocking=False):
        return False
    try:
        if not _poll(channel.socket, select.POLLOUT, 0.0):
            return False
        send([frame])
        return True
    finally:
        sending.release()


def _poll(sock: socket.socket, direction: int, seconds: float) -> bool:
    number = sock.fileno()
    if number < 0:
        raise Closed
    poll = select.poll()
    poll.register(number, direction)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _has_ended(sock: socket.socket) -> bool:
    number = sock.fileno()
    if number < 0:
        return True
    poll = select.poll()
    poll.register(number, select.POLLRDHUP)
    return bool(poll.poll(0))


def _check_reads(until: float) -> None:
    if time.monotonic() > until:
        raise Breach(Cause.STALLED, "the peer reads too slowly")


def _front(parts: Sequence[memoryview]) -> list[memoryview]:
    """What goes over a Unix socket in one call."""
    front, room = [], UNIX_CALL_BYTES
    for part in parts:
        front.append(part[:room])
        room -= len(front[-1])
        if not room:
            break
    return front


def _drop(parts: list[memoryview], sent: int) -> None:
    """Take what was sent off the front."""
    whole = 0
    while whole < len(parts) and sent >= len(parts[whole]):
        sent -= len(parts[whole])
        whole += 1
    del parts[:whole]
    if sent:
        parts[0] = parts[0][sent:]


def _translated(error: OSError) -> Exception:
    if error.errno in _WOULD_BLOCK:
        return TimeoutError()
    if isinstance(error, ssl.SSLError) and not isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return Breach(Cause.AUTHENTICATION, f"TLS: {error.reason}")
    return Closed(str(error))
