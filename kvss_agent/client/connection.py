"""A connection to an agent: its address, credentials, the handshake, and frames in both directions."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from kvss_agent.data_plane import channel as channels
from kvss_agent.data_plane import constants, handshake, wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.channel import Closed, Piece, PlainChannel, TlsChannel
from kvss_agent.data_plane.wire import Means, Role
from kvss_agent.dialing import connected_to
from kvss_agent.mover import Mover
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss

if TYPE_CHECKING:
    from kvss_agent.security.trust import ClientCertificate

CONNECT_SECONDS: Final = 5.0
HANDSHAKE_SECONDS: Final = 5.0  # of an agent, from connecting on, in however small pieces it comes
LAST_WORDS_SECONDS: Final = 0.2

F = TypeVar("F")


class Lost(Exception):
    """The agent is gone, or has ended the connection. `cause` says why, where it said so."""

    def __init__(self, message: str, cause: Cause | None = None) -> None:
        super().__init__(message)
        self.cause = cause


def opened(
    address: Address, tls: ssl.SSLContext | None, stall_seconds: float
) -> PlainChannel | TlsChannel:
    """A connected channel. Raises OSError; Breach where it has to be TLS and we can't."""
    if address.is_tls and not (tls and address.key):
        raise Breach(
            Cause.AUTHENTICATION,
            "this agent wants a certificate of the console's authority, and there is none yet"
            if address.key
            else "nothing says which key this agent has to have",
        )
    if address.path:
        return PlainChannel(_connected_unix(address.path), stall_seconds)
    sock = connected_to(address.host, address.port, CONNECT_SECONDS)
    try:
        sock.settimeout(CONNECT_SECONDS)
        if tls:
            expected = _name_of(address.key) if address.is_tls else address.host
            return TlsChannel(tls.wrap_socket(sock, server_hostname=expected), stall_seconds)
    except BaseException:
        sock.close()
        raise
    return PlainChannel(sock, stall_seconds)


def _name_of(key: str) -> str:
    from kvss_agent.security.certificates import key_name  # it takes a while, and few need it

    return key_name(key)


def _connected_unix(path: str) -> socket.socket:
    """Raises OSError. It waits where others are before us in the listener's queue: with a timeout of
    Python's own, a Unix socket with a full queue refuses at once, and strangers can fill it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        wait = struct.pack("@ll", int(CONNECT_SECONDS), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        sock.connect(path)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 0))
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who connects and how it shows that: by a secret, or over TCP with TLS by a certificate.

    An agent that is silent in the middle of something for `stall_seconds`, or for as long beyond what
    a request may wait, is lost.
    """

    driver: str
    secret: bytes | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    software: str = ""
    versions: tuple[int, int] = (constants.VERSION_MIN, constants.VERSION)
    stall_seconds: float = channels.STALL_SECONDS
    certified: ClientCertificate | None = field(default=None, repr=False)  # for `tls:` addresses


class AgentConnection:
    """A connection to an agent, after its handshake. Raises Lost when it ends, for whatever reason."""

    def __init__(self, address: Address, shard: str, credentials: Credentials, role: Role) -> None:
        with lost(address):
            certified = credentials.certified.context if credentials.certified else None
            tls = certified if address.is_tls else credentials.tls
            self.channel = opened(address, tls, credentials.stall_seconds)
        self.address = address
        self._until = time.monotonic() + max(HANDSHAKE_SECONDS, credentials.stall_seconds)
        self.reader = wire.FrameReader()
        self._with_descriptors = role is Role.SHARED
        try:
            self._shake_hands(shard, credentials, role)
        except BaseException:
            self.channel.close()
            raise

    def _shake_hands(self, shard: str, credentials: Credentials, role: Role) -> None:
        secret = credentials.secret
        if secret is None and isinstance(self.channel, PlainChannel):
            raise Lost("a connection without TLS needs a secret", Cause.AUTHENTICATION)
        said = handshake.hello(
            role,
            credentials.driver,
            shard,
            versions=credentials.versions,
            software=credentials.software,
        )
        self.send(said)
        got = self.receive_a(wire.Challenge)
        if isinstance(self.channel, TlsChannel) and got.means is Means.CERTIFICATE:
            secret = None  # the certificate has been enough
        with lost(self.address):
            proof = handshake.prove(said, got, secret)
        self.send(proof)
        self.version = got.version
        self.features = got.features & said.features
        self.welcome = self.receive_a(wire.Welcome)
        self._until = math.inf

    @property
    def is_private(self) -> bool:
        """Nobody else can read what goes over it."""
        return bool(self.address.path) or isinstance(self.channel, TlsChannel)

    def send(self, frame: wire.Frame, payloads: Sequence[memoryview] = ()) -> None:
        with lost(self.address):
            self.channel.send([frame.encode(), *payloads])

    def send_at_once(self, frame: wire.Frame) -> bool:
        """Send something small, unless the agent does not read; whether it was sent."""
        with lost(self.address):
            return self.channel.send_at_once(frame.encode())

    def last_words(self, error: Lost) -> Lost:
        """Sending has failed. The agent may have said why; only who receives here may look."""
        try:
            with lost(self.address):
                while self.channel.comes_within(LAST_WORDS_SECONDS):
                    self.receive()
        except Lost as reason:
            return reason if reason.cause else error
        return error

    def receive(self, deadline: float | Callable[[], float] = 0.0) -> wire.Frame:
        """The next frame. It may begin to come until `deadline` (monotonic), which is looked at each
        time that nothing has come for a while; soon, if there is none."""
        whole_by = 0.0  # the frame that has begun
        with lost(self.address):
            while True:
                place = self.reader.want()
                try:
                    if self._with_descriptors and isinstance(self.channel, PlainChannel):
                        count = self.channel.receive_with_descriptors(place)
                    else:
                        count = self.channel.receive_into(place)
                except TimeoutError as error:
                    until = deadline() if callable(deadline) else deadline
                    if self.reader.between_frames and time.monotonic() < until:
                        continue
                    raise Breach(Cause.STALLED, "it does not answer") from error
                if time.monotonic() > self._until:
                    raise Breach(Cause.STALLED, "its handshake takes too long")
                found = self.reader.fed(count)
                if isinstance(found, wire.Error):
                    raise Lost(f"{self.address} says: {found.sentence}", found.cause)
                if found is not None and not isinstance(found, wire.Filled):
                    return found
                whole_by = channels.check_pace(self.channel, whole_by)

    def receive_a(self, kind: type[F], deadline: float = 0.0) -> F:
        """The next frame, which has to be of this kind. GOODBYE may come at any time, and is ignored:
        the agent wants to stop, and this connection will see it do so."""
        while (found := self.receive_a_or_goodbye(kind, deadline)) is None:
            pass
        return found

    def receive_a_or_goodbye(self, kind: type[F], deadline: float = 0.0) -> F | None:
        """As `receive_a`; None for GOODBYE, behind which nothing may come for long."""
        found = self.receive(deadline)
        if isinstance(found, wire.Goodbye):
            return None
        if not isinstance(found, kind):
            raise Lost(f"{self.address} sent {type(found).__name__}, which is not allowed here")
        return found

    def receive_pieces(self, places: Sequence[memoryview]) -> Iterator[Piece]:
        """The payloads that follow, into these places; each piece as it has arrived."""
        with lost(self.address):
            yield from channels.receive_pieces(self.channel, self.reader, places)

    def receive_sums(self, places: Sequence[memoryview], mover: Mover) -> list[int]:
        """The payloads that follow, into these places; the checksum of each where it has arrived."""
        with lost(self.address):
            return channels.receive_sums(self.channel, self.reader, places, mover)

    def receive_columns(
        self,
        headers: Sequence[bytes],
        slots: Sequence[memoryview],
        columns: Sequence[Column],
        mover: Mover,
    ) -> list[Header | Miss] | None:
        """The payloads that follow these headers, into slots that are open for these columns; each is
        sealed as soon as it is whole. By compiled code: None where there is none for it."""
        compiled = getattr(mover, "receive_columns", None)
        if not compiled or not isinstance(self.channel, PlainChannel):
            return None
        most, into = self.payload_bytes_max, list(zip(slots, columns, strict=True))

        def receive(sock: socket.socket, seconds: float) -> list[Header | Miss] | None:
            found: list[Header | Miss] | None = compiled(sock, headers, into, most, seconds)
            return found

        with lost(self.address):
            try:
                return self.channel.receive_by(receive, slots)
            except ValueError as error:
                raise self.too_large() from error

    @property
    def payload_bytes_max(self) -> int:
        return self.welcome.slot_bytes - HEADER_BYTES

    def too_large(self) -> Lost:
        return Lost(f"{self.address} announces a payload that is larger than its slots")

    def take_descriptors(self) -> list[int]:
        """The file descriptors that have come along. They are the caller's now."""
        if not isinstance(self.channel, PlainChannel):
            return []
        taken, self.channel.descriptors = self.channel.descriptors, []
        return taken

    def close(self) -> None:
        self.channel.close()


@contextlib.contextmanager
def lost(address: Address) -> Iterator[None]:
    """Whatever ends a connection is Lost to those who use it."""
    try:
        yield
    except Closed as error:
        raise Lost(f"{address} is gone") from error
    except Breach as breach:
        raise Lost(f"{address}: {breach}", breach.cause) from breach
    except OSError as error:
        raise Lost(f"{address} cannot be reached: {error.strerror or error}") from error
