"""The data plane of an agent: listeners, and a thread for each connection.

Nothing here polls: an idle agent sleeps in the kernel. What a connection does is in `connection`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvss_agent.clock import FOREVER, Clock
from kvss_agent.data_plane import channel as channels
from kvss_agent.data_plane import constants
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.carrier import Carrier
from kvss_agent.data_plane.channel import AnyChannel, PlainChannel, TlsChannel
from kvss_agent.data_plane.connection import Connection, spawn
from kvss_agent.data_plane.latencies import Latencies
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.limits.admission import Admission, Places
from kvss_agent.limits.origins import origin_of_socket
from kvss_agent.shard.hosted import HostedShard

log = logging.getLogger(__name__)

PLACES: Final = Places(strangers_max=128, strangers_per_origin=32, proven_max=1024)
ENDING_MAX: Final = 256  # connections that have lost their place and whose threads have not ended yet
# For sending what is read. A driver that evicts to the same slot is kept waiting by it, and must not
# take the agent for lost.
LEASE_SECONDS: Final = channels.STALL_SECONDS / 2


class DataPlane:
    """Everybody who is connected, and the clock that their waiting goes by."""

    def __init__(
        self,
        shards: Mapping[str, HostedShard],
        secrets: Mapping[str, bytes],
        tier_requests: TierRequests | None = None,
        borrowing: Carrier | None = None,
        *,
        stall_seconds: float = channels.STALL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`shards` by name and `secrets` by driver may change at any time; they are looked at when
        somebody connects."""
        self.shards = shards
        self.secrets = secrets
        self.keys: Mapping[str, str] = {}  # of drivers, by fingerprint; may change likewise
        self.tier_requests = tier_requests
        self.borrowing = borrowing
        self.versions = constants.VERSION_MIN, constants.VERSION
        self.stall_seconds = stall_seconds
        self.lease_seconds = lease_seconds
        self.breaches: Counter[str] = Counter()
        self.latencies: dict[str, Latencies] = {}
        self._listeners: list[socket.socket] = []
        self._paths: list[Path] = []
        self._connections: dict[int, Connection] = {}
        self.admission: Admission[Connection] = Admission(PLACES, self._owners)
        self._numbers = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._clock = Clock(self._tick, "clock")

    @property
    def connections(self) -> int:
        return len(self._connections)

    def _owners(self) -> set[str]:
        """Who has places of its own."""
        return {*self.secrets, *(shard.identity.driver for shard in list(self.shards.values()))}

    def wake(self, moment: float) -> None:
        """A shard has to be ticked at this moment. Give this to the shards."""
        self._clock.at(moment)

    def _tick(self) -> float:
        return min((shard.tick() for shard in list(self.shards.values())), default=FOREVER)

    def latencies_of(self, shard: str) -> Latencies:
        return self.latencies.setdefault(shard, Latencies())

    @property
    def served(self) -> tuple[int, int]:
        """Columns evicted to the shards that there are, and bytes refilled from them, so far. Fragments
        do not count: this agent may be a holder of its own shards, and is not in its own way. Nor do
        refills in place, by drivers that share the arena: the agent is not asked for them."""
        theirs = [one for one in list(self.shards.values()) if not one.identity.is_for_fragments]
        refilled = sum(self.latencies_of(one.identity.name).refilled_bytes for one in theirs)
        return sum(one.evicts for one in theirs), refilled

    # Listening

    def listen_unix(self, path: Path) -> None:
        """Accept on a Unix socket that only this user can open. Takes over one that nobody serves."""
        remove_dead_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        self._paths.append(path)
        self._listen(listener, None, f"unix {path}")

    def listen_tcp(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Accept on TCP; the port. With TLS, drivers are known by their certificates' common names."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        self._listen(listener, tls, f"tcp {host}")
        return int(listener.getsockname()[1])

    def _listen(self, listener: socket.socket, tls: ssl.SSLContext | None, name: str) -> None:
        listener.listen(128)
        self._listeners.append(listener)
        spawn(self._accept, listener, tls, name=f"accept {name}")

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("Cannot accept a connection yet: %s", error.strerror)
                    time.sleep(0.1)  # it stays in the backlog; others may end meanwhile
                continue
            if cause := self._refuse_or_admit(sock, tls):
                self.breaches[cause] += 1
                sock.close()

    def _refuse_or_admit(self, sock: socket.socket, tls: ssl.SSLContext | None) -> Cause | None:
        """Give the connection a thread; or why not. The listener goes on, whatever it is."""
        with self._lock:
            if self._stopping:
                return Cause.DRAINING
            places = self.admission.places
            if len(self._connections) >= places.strangers_max + places.proven_max + ENDING_MAX:
                return Cause.LIMIT
            self._numbers += 1
            try:
                origin = origin_of_socket(sock)
                connection = Connection(self, self._numbers, self._channel(sock, tls))
            except (OSError, channels.Closed):  # it has broken off already
                return Cause.GONE
            self._connections[connection.number] = connection
            displaced = self.admission.enter(connection, origin)
            try:
                spawn(connection.run, name=f"connection {connection.number}")
            except RuntimeError:  # the system has no thread left
                del self._connections[connection.number]
                self.admission.leave(connection)
                return Cause.LIMIT
            finally:
                if displaced:
                    displaced.close(Cause.LIMIT, "others connect, and it has not proved who it is")
        return None

    def _channel(self, sock: socket.socket, tls: ssl.SSLContext | None) -> AnyChannel:
        if not tls:
            return PlainChannel(sock, self.stall_seconds)
        sock.setblocking(False)  # the TLS handshake comes with the first frame, in another thread
        wrapped = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return TlsChannel(wrapped, self.stall_seconds)

    # The end

    def drain(self) -> None:
        """Accept nobody any more, and ask those who are connected to leave."""
        with self._lock:
            self._stopping = True
            connections = list(self._connections.values())
        for listener in self._listeners:
            channels.shut(listener)
        while self._paths:  # only once: later it may be another agent's
            self._paths.pop().unlink(missing_ok=True)
        for connection in connections:
            spawn(connection.send_goodbye, name=f"goodbye {connection.number}")

    def stop(self, seconds: float) -> bool:
        """Wait for them to leave, at most so long; then close. Whether all had left."""
        deadline = time.monotonic() + seconds
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.02)
        left = list(self._connections.values())
        for connection in left:
            connection.close(Cause.DRAINING, "the agent stops")
        for connection in left:
            connection.left.wait(1)
        self._clock.stop()
        return not left

    def remove(self, connection: Connection) -> None:
        with self._lock:
            self.admission.leave(connection)
            self._connections.pop(connection.number, None)


def remove_dead_socket(path: Path) -> None:
    """Remove a socket that nobody serves. FileExistsError if somebody does, or if it is no socket."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise FileExistsError(f"another process serves {path}")
