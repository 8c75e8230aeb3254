"""A data plane in this process, on real sockets, and clients of it."""

from __future__ import annotations

import contextlib
import secrets
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvss_agent import native
from kvss_agent.client import Credentials, ShardClient, Transport, connect
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.server import DataPlane
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.shard.seal import Column
from tests.kvss_agent.integrity import check_integrity

PAYLOAD = 64 * 1024
TAG = b"org-a".ljust(16, b"\0")
SECRET = b"a secret that only the driver and the agent know"
DRIVER, READER = "job-1", "another-agent"


@dataclass
class Plane:
    plane: DataPlane
    unix: Path
    tcp: int
    shards: dict[str, HostedShard]
    secrets: dict[str, bytes] = field(default_factory=lambda: {DRIVER: SECRET, READER: SECRET[::-1]})

    def add(
        self, name: str = "s", slots: int = 8, payload: int = PAYLOAD, applied: int = 0
    ) -> HostedShard:
        identity = ShardIdentity(name, slot_bytes_for(payload), DRIVER)
        arena = Arena.allocate(identity.slot_bytes, slots)
        self.shards[name] = HostedShard(
            identity, arena, applied, readers={READER}, wake_me=self.plane.wake
        )
        return self.shards[name]

    @contextlib.contextmanager
    def client(
        self,
        kind: str = "unix",
        shard: str = "s",
        *,
        driver: str = DRIVER,
        write: bool = True,
        versions: tuple[int, int] = (1, 2),
        tls: ssl.SSLContext | None = None,
    ) -> Iterator[ShardClient]:
        address = f"tcp:127.0.0.1:{self.tcp}" if kind == "tcp" else f"unix:{self.unix}"
        transport: Transport = "shm" if kind.startswith("shm") else "stream"
        credentials = Credentials(driver, self.secrets[driver], tls, versions=versions)
        mover = compiled() if kind == "shm native" else PYTHON if kind == "shm" else None
        client = connect(address, shard, credentials, transport=transport, mover=mover, write=write)
        try:
            yield client
        finally:
            client.close()

    def breaches(self) -> dict[Cause, int]:
        return {Cause(cause): count for cause, count in self.plane.breaches.items()}


@contextlib.contextmanager
def running(
    directory: Path,
    *,
    tls: ssl.SSLContext | None = None,
    tier_requests: TierRequests | None = None,
    stall_seconds: float = 30.0,
    lease_seconds: float = 30.0,
) -> Iterator[Plane]:
    shards: dict[str, HostedShard] = {}
    known = {DRIVER: SECRET, READER: SECRET[::-1]}
    plane = DataPlane(
        shards, known, tier_requests, stall_seconds=stall_seconds, lease_seconds=lease_seconds
    )
    path = directory / "data.sock"
    plane.listen_unix(path)
    try:
        yield Plane(plane, path, plane.listen_tcp("127.0.0.1", 0, tls), shards, known)
    finally:
        plane.drain()
        plane.stop(0)
        for shard in shards.values():
            check_integrity(shard)
            shard.end(Cause.GONE, "the test is over")


def compiled() -> Mover:
    """The native mover; skips the test where there can be none."""
    try:
        return native.require(build=True)
    except native.Unavailable as reason:
        pytest.skip(f"the native mover cannot be built here: {reason}")


def column(name: str, sequence: int = 0, tag: bytes = TAG) -> Column:
    return Column(name.encode().ljust(16, b"\0"), tag, sequence)


def kv(length: int = PAYLOAD) -> memoryview:
    return memoryview(secrets.token_bytes(length))


def place(length: int = PAYLOAD) -> memoryview:
    return memoryview(bytearray(length))
