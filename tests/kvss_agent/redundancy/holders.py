"""Several agents' data planes with tier 2, in this process, that store fragments of one shard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvss_agent.client import Credentials
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.server import DataPlane
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.fragments import Fragments
from kvss_agent.redundancy.holder import Holder
from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Tier2

DRIVER, SECRET = "job-1", b"a secret that only the driver and the agent know"
NAMESPACE, PART = b"n" * 16, "full.0"
PAYLOAD = 64 * 1024
SLOT = slot_bytes_for(PAYLOAD)
NAMES = ("fragments", "other")  # fragment shards, each of one driver of the model


@dataclass
class FragmentAgent:
    """One holder: it can be stopped, and started again on the same files."""

    folder: Path
    loop: asyncio.AbstractEventLoop
    identity: ShardIdentity
    cap: int = 1 << 30
    plane: DataPlane | None = None
    requests: TierRequests | None = None
    store: Tier2 | None = None
    reserved: socket.socket = field(default_factory=socket.socket)  # the port, while it is stopped, too
    shard: HostedShard | None = None  # of the first driver
    shards: dict[str, HostedShard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))

    @property
    def port(self) -> int:
        return int(self.reserved.getsockname()[1])

    def start(self) -> None:
        self.requests = requests = TierRequests(self.loop)
        requests.store = self.store = Tier2(Posix(self.folder), Caps(self.cap, self.cap))
        self.run(self.store.open())
        shards: dict[str, HostedShard] = {}
        self.plane = DataPlane(shards, {DRIVER: SECRET}, requests, stall_seconds=30, lease_seconds=30)
        for name in (*NAMES[1:], NAMES[0]):
            arena = Arena.allocate(self.identity.slot_bytes, SLOTS)
            self.shard = HostedShard(self.identity, arena, 0, wake_me=self.plane.wake)
            shards[name] = self.shard
        self.shards = shards
        self.plane.listen_tcp("127.0.0.1", self.port, None)

    def stop(self) -> None:
        if self.plane and self.shard and self.store:
            self.plane.drain()
            self.plane.stop(0)
            for shard in self.shards.values():
                shard.end(Cause.GONE, "the test is over")
            self.run(self.store.close())
            self.plane = None

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Its store is not open while this lasts."""
        if self.requests:
            self.requests.store = None
        try:
            yield
        finally:
            if self.requests:
                self.requests.store = self.store

    def run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(30)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        """Of its files."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*/*/*"))


@dataclass
class World:
    agents: list[FragmentAgent]
    loop: asyncio.AbstractEventLoop
    data: int
    parity: int
    made: list[Fragments] = field(default_factory=list)

    def fragments(self, name: str = "fragments") -> Fragments:
        """As another agent has them, that has just been started. Another name: of another driver."""
        code = ErasureCode(self.data, self.parity)
        credentials = Credentials(DRIVER, SECRET, stall_seconds=30.0)
        payload = fragment_slot_bytes(SLOT, self.data) - 64
        holders = [
            Holder(f"tcp:127.0.0.1:{one.port}", name, lambda: credentials, payload)
            for one in self.agents
        ]
        self.made.append(Fragments(code, holders, NAMESPACE, PART, SLOT))
        return self.made[-1]


@contextlib.contextmanager
def running(folder: Path, data: int, parity: int) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    slot = fragment_slot_bytes(SLOT, data)
    agents = [
        FragmentAgent(
            folder / str(place),
            loop,
            ShardIdentity(
                "fragments",
                slot,
                DRIVER,
                NAMESPACE,
                fragment_part(PART, place, data, parity),
                is_for_fragments=True,
            ),
        )
        for place in range(data + parity)
    ]
    try:
        for one in agents:
            one.start()
        world = World(agents, loop, data, parity)
        yield world
        for fragments in world.made:
            fragments.close()
    finally:
        for one in agents:
            one.stop()
            one.reserved.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
