"""An agent as far as its data plane, its shards and tier 2 go, and how a driver reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from dataclasses import dataclass

from kvss_agent.borrowing import Borrowing
from kvss_agent.client import Credentials, connection, shared, stream
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.constants import VERSION, VERSION_MIN
from kvss_agent.data_plane.server import DataPlane
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.mover import PythonMover
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.tier2.backend import Backend, Failed
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.store import Tier2
from tests.kvss_agent.redundancy.one_store import OneStore
from tests.one_thread import Loop, Process, Turns
from tests.swdriver_shim.simulated.disk import Disk
from tests.swdriver_shim.simulated.front import Front
from tests.swdriver_shim.simulated.network import STALL_SECONDS, End, Pipe

DRIVER, SECRET = "job-1", b"a secret of the driver and of its agents"
OTHER_DRIVER = "job-2"
ROOMY = Caps(1 << 30, 1 << 30)


@dataclass(frozen=True)
class To(Address):
    """The address of an agent of ours."""

    agent: Agent | None = None

    def __str__(self) -> str:
        return self.agent.name if self.agent else "nowhere"


def opened(to: Address, tls: object, stall_seconds: float) -> End:
    """In place of `connection.opened`."""
    assert isinstance(to, To)
    assert to.agent
    return to.agent.connect(is_near=bool(to.path))


class Mover(PythonMover):
    """Copies in two parts, between which others go on."""

    name = "restless"

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def copy_in(self, into: memoryview, source: memoryview) -> int:
        self._copy(into, source)
        return self.checksum(source)

    def copy_out(self, into: memoryview, source: memoryview) -> int:
        self._copy(into, source)
        return self.checksum(into)

    def _copy(self, into: memoryview, source: memoryview) -> None:
        half = self._turns.chance.randrange(len(source))
        into[:half] = source[:half]
        self._turns.maybe_leave()
        into[half:] = source[half:]


@dataclass
class Spec:
    """A shard, as its agent was told to have it."""

    identity: ShardIdentity
    slots: int
    applied: int
    readers: tuple[str, ...] = ()


class Plane(DataPlane):
    """Channels come as they are."""

    def _channel(self, sock: End, _: object) -> End:  # type: ignore[override]
        return sock


class Agent:
    """An agent as far as its data plane, its shards and tier 2 go; what it is told outlives it."""

    def __init__(
        self,
        name: str,
        turns: Turns,
        disk: Disk,
        fragments: Disk,
        caps: Caps,
        front: Front | None,
    ) -> None:
        self.name = name
        self.turns = turns
        self.disk = disk
        self.front = front
        self.fragments = fragments  # of redundant columns, of all agents
        self.caps = caps
        self.specs: dict[str, Spec] = {}
        self.process = Process(name)
        self.process.is_alive = False
        self.is_heard = True  # by whoever connects
        self.ends: list[End] = []
        self.shards: dict[str, HostedShard] = {}
        self.fronted: Fronted | None = None
        self.versions = (VERSION_MIN, turns.chance.choice((VERSION - 1, VERSION, VERSION)))

    @property
    def is_up(self) -> bool:
        return self.process.is_alive

    def start(self) -> None:
        self.process = Process(self.name)
        self.loop = Loop(self.turns)  # type: ignore[abstract]
        self.loop.start(self.process)
        self.shards = {}
        self.turns.start(self._start, "start", self.process)

    def has(self, shard: str) -> bool:
        return shard in self.shards

    def start_again(self) -> None:
        if not self.is_up:
            self.start()

    def go_on(self) -> None:
        self.turns.let_go_on(self.process)

    def listen(self) -> None:
        self.is_heard = True

    def _start(self) -> None:
        redundant = OneStore()
        self.tier_requests = TierRequests(self.loop, redundant=redundant)
        self.borrowing = Borrowing(self.shards, _shown)
        self.plane = Plane(
            self.shards,
            {DRIVER: SECRET, OTHER_DRIVER: SECRET},
            self.tier_requests,
            self.borrowing,
            stall_seconds=STALL_SECONDS,
        )
        self.plane.versions = self.versions
        self.fronted = self.front.before(self.disk) if self.front else None
        self.attend()
        for spec in list(self.specs.values()):  # others may move here meanwhile
            self.provide(spec)
        own = self.tier_requests, self.fronted or self.disk, self.caps
        for where, backend, caps in own, (redundant, self.fragments, ROOMY):
            asyncio.run_coroutine_threadsafe(self._open(where, backend, caps), self.loop)

    async def _open(self, where: TierRequests | OneStore, backend: Backend, caps: Caps) -> None:
        opened = Tier2(backend, caps, threads=2, clock=self.turns.calendar)
        while where.store is None:
            with contextlib.suppress(Failed):
                await opened.open()
                where.store = opened
        while backend is self.fronted:
            await asyncio.sleep(1.0)
            try:
                await opened.expire()
            except Failed:
                pass
            except Exception as error:
                self.turns.fail(error)
                raise

    def attend(self) -> None:
        """As an agent does with each document."""
        if self.is_up and self.fronted:
            identities = [spec.identity for spec in self.specs.values()]
            self.fronted.attend([(one.namespace, one.part) for one in identities])

    def provide(self, spec: Spec) -> None:
        self.attend()
        arena = Arena.allocate(spec.identity.slot_bytes, spec.slots)
        self.shards[spec.identity.name] = HostedShard(
            spec.identity,
            arena,
            spec.applied,
            readers=spec.readers,
            clock=lambda: self.turns.now,
            wake_me=self.plane.wake,
        )

    def crash(self) -> None:
        self.process.is_alive = False
        for end in self.ends:
            end.cut(self.turns.chance.choice((0, 10_000)))
        self.ends.clear()
        for shard in self.shards.values():
            shard.arena.close()
            shard.count.close()
        self.shards.clear()

    def connect(self, *, is_near: bool) -> End:
        turns = self.turns
        turns.leave()
        if not self.is_heard:
            turns.wait(None, connection.CONNECT_SECONDS)
            raise OSError(errno.ETIMEDOUT, "no answer")
        if not self.is_up:
            raise OSError(errno.ECONNREFUSED, "nobody listens")
        family = socket.AF_UNIX if is_near else socket.AF_INET
        room = turns.chance.choice((300, 3000, 30_000))
        there, back = Pipe(room), Pipe(room)
        mine, yours = End(turns, there, back, family), End(turns, back, there, family)
        self.ends = [end for end in self.ends if not end.outgoing.is_over]
        self.ends.append(mine)

        def admit() -> None:
            if self.plane._refuse_or_admit(mine, None):  # type: ignore[arg-type]
                mine.close()

        turns.start(admit, "accept", self.process)
        return yours


def _shown(driver: str) -> Credentials:
    return Credentials(driver, SECRET, stall_seconds=STALL_SECONDS)


class Near(shared.SharedClient):
    """Sets of clients are looked through in the same order each time."""

    order = 0

    def __hash__(self) -> int:
        return self.order


class Far(stream.StreamClient):
    order = 0

    def __hash__(self) -> int:
        return self.order
