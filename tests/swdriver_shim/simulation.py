"""A driver, its agents, their disks and the network between them, in one thread and from one seed.

All that decides or moves a byte is the code that runs in production: `Driver` with its ledger, its
carrier and its shards, the clients of both transports, and of an agent the connections, the shards with
their cores and arenas, the pulls, and tier 2 with its index. Threads, clocks, event loops, sockets and
files are not: threads are left and go on as chance has it (`tests.one_thread`), and sockets and disks
fail as it has it. Agents crash and come back empty, connections break at any byte, bits flip, files
vanish, shards shrink, grow and move, all while an engine stores, loads, deletes and purges.

What comes of that is for `judge` to say. What is not tried: the control API and the documents of agents
and driver, TLS, a driver that dies (its successor knows nothing of what lies in memory), and shards with
agents that don't share tier 2 and move.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self, TypeVar
from unittest import mock

from kvss_agent import channel, connection, hosting, pulling, serving
from kvss_agent.arena import Arena
from kvss_agent.breach import Breach, Cause
from kvss_agent.channel import Closed, PlainChannel
from kvss_agent.client import Credentials, ShardClient, requests, shared, stream, window
from kvss_agent.client import line as lines
from kvss_agent.client.line import Address
from kvss_agent.hosting import HostedShard, Identity
from kvss_agent.mover import Bytes, PythonMover
from kvss_agent.pulling import Pull, Source
from kvss_agent.serving import DataPlane
from kvss_agent.tier2 import store as stores
from kvss_agent.tier2.address import Scope, parse
from kvss_agent.tier2.backend import (
    Failed,
    Fault,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    silent,
)
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.store import Tier2
from kvss_agent.tiering import LoopTiering
from swdriver_shim import deciding, driver
from swdriver_shim.cache import spilling
from swdriver_shim.cache.prefix_map import State
from swdriver_shim.driver import Driver, Loaded
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Group, Layout
from swdriver_shim.moving import carrier
from swdriver_shim.moving import shard as moving
from swdriver_shim.moving.agents import Pulled
from swdriver_shim.moving.shard import Shard
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tiers
from tests.one_thread import Loop, Process, Task, Turns, installed
from tests.swdriver_shim.judge import Judge, Sight, Watched, WatchedDriver
from tests.swdriver_shim.prompts import NAMESPACE, OTHER, keys

C = COLUMN_TOKENS
EACH = 16  # bytes per token, of every shard
LAYOUT: Final = Layout((Group("full", (EACH, EACH)), Group("window", (EACH, EACH), window=100)))
ORGS: Final = ("acme", "globex", "initech")
DRIVER, SECRET = "job-1", b"a secret of the driver and of its agents"
STALL_SECONDS: Final = 10.0
ASKING_MAX: Final = 8  # requests at once
MODULES: Final = (
    *(deciding, driver, carrier, moving),
    *(lines, requests, shared, stream, window),
    *(channel, connection, hosting, pulling, serving, stores),
)
Place = tuple[int, int, int, int]  # group, shard, depth, tokens


class EngineFailed(Exception):
    """What an engine raises where it is read from."""


# The network


@dataclass(eq=False)
class Pipe:
    """One direction of a connection: bytes on their way, and file descriptors that come along."""

    room: int
    bytes: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    is_over: bool = False  # nothing more is sent
    is_deaf: bool = False  # nothing more is heard
    held_until: float = 0.0
    readers: list[Task] = field(default_factory=list)
    writers: list[Task] = field(default_factory=list)


class End(PlainChannel):
    """One end of a connection."""

    def __init__(
        self, turns: Turns, incoming: Pipe, outgoing: Pipe, family: socket.AddressFamily
    ) -> None:
        self.turns = turns
        self.family = family
        self.incoming = incoming
        self.outgoing = outgoing
        self.descriptors = []
        self.socket = self  # type: ignore[assignment]
        self._sending = turns.threading.Lock()

    def receive_into(self, place: memoryview) -> int:
        pipe, turns = self.incoming, self.turns
        turns.maybe_leave()
        if not self.comes_within(STALL_SECONDS):
            raise TimeoutError
        if pipe.is_deaf or not pipe.bytes:
            raise Closed
        most = turns.chance.choice((1, 70, 600, 5000, 5000))
        count = min(len(place), len(pipe.bytes), most)
        place[:count] = pipe.bytes[:count]
        del pipe.bytes[:count]
        turns.wake_all(pipe.writers)
        return count

    def receive_with_descriptors(self, place: memoryview) -> int:
        count = self.receive_into(place)
        self.descriptors += self.incoming.descriptors
        self.incoming.descriptors.clear()
        return count

    def comes_within(self, seconds: float) -> bool:
        pipe, turns = self.incoming, self.turns
        until = turns.now + seconds
        while not pipe.is_deaf and (pipe.held_until > turns.now or not (pipe.bytes or pipe.is_over)):
            left = until - turns.now
            if left <= 0:
                return False
            held = pipe.held_until - turns.now
            turns.wait(pipe.readers, min(left, held) if held > 0 else left)
        return True

    def has_more(self) -> bool:
        return bool(self.incoming.bytes) and self.incoming.held_until <= self.turns.now

    def send(self, parts: Sequence[Bytes], descriptors: Sequence[int] = ()) -> None:
        pipe, turns = self.outgoing, self.turns
        with self._sending:
            pipe.descriptors += [os.dup(one) for one in descriptors]
            for part in parts:
                left = memoryview(part)
                while left:
                    turns.maybe_leave()
                    if pipe.is_over or pipe.is_deaf:
                        raise Closed
                    room = pipe.room - len(pipe.bytes)
                    if room <= 0:
                        if not turns.wait(pipe.writers, STALL_SECONDS):
                            raise Breach(Cause.STALLED, "the peer does not read")
                        continue
                    pipe.bytes += left[:room]
                    left = left[room:]
                    turns.wake_all(pipe.readers)

    def close(self) -> None:
        self.hang_up()
        self.outgoing.is_over = True
        self._tell()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def hang_up(self) -> None:
        self.incoming.is_deaf = True
        self._tell()

    def _tell(self) -> None:
        for pipe in (self.incoming, self.outgoing):
            self.turns.wake_all(pipe.readers)
            self.turns.wake_all(pipe.writers)

    def cut(self, lost: int) -> None:
        """The connection breaks: of what is on its way, so many bytes never come."""
        for pipe in (self.incoming, self.outgoing):
            del pipe.bytes[max(0, len(pipe.bytes) - lost) :]
            pipe.is_over = True
        self._tell()


@dataclass(frozen=True)
class To(Address):
    """The address of an agent of ours."""

    agent: Agent | None = None

    def open(self, tls: object, stall_seconds: float) -> End:  # noqa: ARG002 - one network for all
        assert self.agent
        return self.agent.connect(is_near=bool(self.path))

    def __str__(self) -> str:
        return self.agent.name if self.agent else "nowhere"


# An agent


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


@dataclass(eq=False)
class File:
    raw: bytearray
    published: int  # at this moment of the judge's


T = TypeVar("T")


def _answer(call: Callable[..., T], *arguments: Any) -> T | Failed:
    try:
        return call(*arguments)
    except Failed as failed:
        return failed


class Disk:
    """Files that outlive agents; what `Backend` says."""

    kind = "simulated"

    def __init__(self, turns: Turns, judge: Judge) -> None:
        self._turns = turns
        self._judge = judge
        self.contents: dict[str, File] = {}
        self.faults = 0  # so many of the next calls fail
        self.slow = turns.chance.choice((0.0, 0.1, 0.5))  # how often
        self._purged: Counter[str] = Counter()

    def open(self) -> None:
        pass

    def properties(self) -> Mapping[str, bool | int]:
        return {}

    def close(self) -> None:
        pass

    def _may_fail(self) -> None:
        if self._turns.chance.random() < self.slow:
            self._turns.wait(None, self._turns.chance.choice((0.01, 0.1, 1.0)))
        self._turns.maybe_leave()
        if self.faults:
            self.faults -= 1
            fault = self._turns.chance.choice((Fault.IO_ERROR, Fault.NO_SPACE, Fault.UNREACHABLE))
            self._judge.seen["a disk failed"] += 1
            raise Failed(fault, "as chance has it")

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        return [_answer(self._write, *file) for file in files]

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        return [_answer(self._read, *file) for file in files]

    def _write(self, name: str, parts: Sequence[memoryview], intact: Callable[[], bool]) -> bool:
        self._may_fail()
        folder = _folder(name)
        purged = self._purged[folder]
        raw = bytearray()
        for part in filter(None, parts):
            half = self._turns.chance.randrange(len(part))
            raw += part[:half]
            self._turns.maybe_leave()
            raw += part[half:]
        if not intact():
            return False
        self._turns.maybe_leave()
        if self._purged[folder] != purged:  # its directory has gone
            raise Failed(Fault.VANISHED, "purged under a writer")
        self.contents[name] = File(raw, self._judge.moment)
        self._turns.maybe_leave()
        return True

    def _read(self, name: str, parts: Sequence[memoryview]) -> int | None:
        self._may_fail()
        found = self.contents.get(name)  # an open file stays readable
        if found is None:
            return None
        done = 0
        for part in parts:
            piece = found.raw[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
            self._turns.maybe_leave()
        return done

    def look(self, name: str) -> Seen | None:
        self._turns.maybe_leave()
        found = self.contents.get(name)
        return Seen(len(found.raw), float(found.published)) if found else None

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._may_fail()
            self.contents.pop(name, None)

    def files(self, progress: Progress = silent) -> Iterator[Found]:  # noqa: ARG002 - nobody follows
        for name in list(self.contents):
            self._turns.maybe_leave()
            found = self.contents.get(name)
            if found and (address := parse(name)):
                yield Found(address, len(found.raw), float(found.published))

    def purge(self, scope: Scope) -> Removed:
        self._may_fail()
        columns = size = 0
        for name in list(self.contents):
            address = parse(name)
            if address and scope.covers(address) and (gone := self.contents.pop(name, None)):
                self._purged[_folder(name)] += 1
                columns, size = columns + 1, size + len(gone.raw)
                self._turns.maybe_leave()
        return Removed(columns, size)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


@dataclass
class Spec:
    """A shard, as its agent was told to have it."""

    identity: Identity
    slots: int
    applied: int


class Plane(DataPlane):
    """Channels come as they are."""

    def _channel(self, sock: End, _: object) -> End:  # type: ignore[override]
        return sock


class Agent:
    """An agent as far as its data plane, its shards and tier 2 go; what it is told outlives it."""

    def __init__(self, name: str, turns: Turns, disk: Disk, caps: Caps) -> None:
        self.name = name
        self.turns = turns
        self.disk = disk
        self.caps = caps
        self.specs: dict[str, Spec] = {}
        self.process = Process(name)
        self.process.is_alive = False
        self.is_heard = True  # by whoever connects
        self.ends: list[End] = []
        self.shards: dict[str, HostedShard] = {}

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

    def listen(self) -> None:
        self.is_heard = True

    def _start(self) -> None:
        self.tiering = LoopTiering(self.loop)
        self.plane = Plane(self.shards, {DRIVER: SECRET}, self.tiering, stall_seconds=STALL_SECONDS)
        for spec in self.specs.values():
            self.provide(spec)
        asyncio.run_coroutine_threadsafe(self._open(), self.loop)

    async def _open(self) -> None:
        opened = Tier2(self.disk, self.caps, threads=2)
        while True:
            with contextlib.suppress(Failed):
                await opened.open()
                self.tiering.store = opened
                return

    def provide(self, spec: Spec) -> None:
        arena = Arena.allocate(spec.identity.slot_bytes, spec.slots)
        self.shards[spec.identity.name] = HostedShard(
            spec.identity, arena, spec.applied, clock=lambda: self.turns.now, wake_me=self.plane.wake
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
            turns.wait(None, lines.CONNECT_SECONDS)
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


class Near(shared.SharedClient):
    """Sets of clients are looked through in the same order each time."""

    order = 0

    def __hash__(self) -> int:
        return self.order


class Far(stream.StreamClient):
    order = 0

    def __hash__(self) -> int:
        return self.order


# All of it


class Simulation:
    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.turns = Turns(chance, restless=chance.choice((0.05, 0.2, 0.5)))
        self.judge = Judge(LAYOUT, self.seen)
        self.mover = Mover(self.turns)
        self.is_shared = chance.random() < 0.6  # tier 2 is one, of all agents
        self.disks = [Disk(self.turns, self.judge) for _ in range(1 if self.is_shared else 3)]
        self.agents = [
            Agent(name, self.turns, self.disks[at % len(self.disks)], self._caps())
            for at, name in enumerate(("one", "two", "three"))
        ]
        self.homes: dict[tuple[int, int], Agent] = {}
        self.moving: set[tuple[int, int]] = set()
        self.resizing: dict[HostedShard, list[int]] = {}
        self.clients = 0
        self.asking = 0
        self.orgs = ORGS[: chance.randint(1, 3)]
        self.namespaces = (NAMESPACE, OTHER)[: chance.randint(1, 2)]
        self.talks: deque[tuple[Keys, bytes]] = deque(maxlen=chance.choice((3, 6, 12)))
        self.given: deque[tuple[bytearray, bytes]] = deque(maxlen=50)
        self.policies: dict[str, OrgPolicies] = {}
        self.kinds = chance.choice((2, 3))  # of columns: with few of them prompts share prefixes
        # Each life has a temper of its own: something happens often in it, and something never.
        always = [1.0, 1.0, 1.0]
        self.temper = [*always, *(chance.choice((0.0, 0.3, 1.0, 1.0, 3.0, 10.0)) for _ in range(14))]
        self.is_rough = False
        self.spell = 0
        self.driver: Driver | None = None
        self.process = Process("driver")
        self._installed = contextlib.ExitStack()

    def __enter__(self) -> Self:
        enter = self._installed.enter_context
        enter(installed(self.turns, MODULES, ("swdriver_shim", "kvss_agent")))
        enter(mock.patch.object(channel, "hang_up", lambda end: end.hang_up()))
        enter(mock.patch.object(deciding, "Ledger", partial(Watched, self.judge)))
        enter(mock.patch.object(spilling, "RESERVE_PART", self.chance.choice((3, 5, 32))))
        enter(mock.patch.object(moving, "PULL_SLOTS", self.chance.choice((1, 3, 64))))
        self._make()
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()
        for agent in self.agents:
            for shard in agent.shards.values():
                shard.arena.close()
                shard.count.close()

    def _make(self) -> None:
        for at in self._places():
            agent = self.homes[at] = self.chance.choice(self.agents)
            agent.specs[_name(at)] = self._spec(at, 0)
        for agent in self.agents:
            agent.start()
        while self.turns.go_on():
            pass
        for org in ORGS:
            self.policies[org] = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))
        self.turns.start(self._drive, "start", self.process)

    def _drive(self) -> None:
        self.shards = [
            [self._shard((group, index)) for index in range(len(of.bytes_per_token))]
            for group, of in enumerate(LAYOUT.groups)
        ]
        self.driver = WatchedDriver(
            LAYOUT,
            "llama",
            self.shards,
            clock=lambda: self.turns.now,
            wall_clock=lambda: self.turns.now + 1.7e9 + 0.3,
        )
        self.driver.judge = self.judge
        self.driver.set_policies(self.policies)

    def _caps(self) -> Caps:
        total = self.chance.choice((1 << 30, 1 << 30, 20 * 4096, 5 * 4096))
        return Caps(total, self.chance.choice((1 << 30, 20 * 4096)))

    def _spec(self, at: tuple[int, int], applied: int) -> Spec:
        name = _name(at)
        size = LAYOUT.groups[at[0]].slot_bytes[at[1]]
        readers = frozenset({DRIVER})
        identity = Identity(name, size, DRIVER, readers, NAMESPACE.digest(), name)
        return Spec(identity, self.chance.randint(5, 10), applied)

    def _shard(self, at: tuple[int, int]) -> Shard:
        return Shard(_name(at), self._connect(at, self.homes[at]))

    def _connect(self, at: tuple[int, int], agent: Agent) -> Callable[[], ShardClient]:
        is_near = self.chance.random() < 0.5

        def connect() -> ShardClient:
            credentials = Credentials(DRIVER, SECRET, stall_seconds=STALL_SECONDS)
            self.clients += 1
            if is_near:
                near = Near(To(path="near", agent=agent), _name(at), credentials, self.mover)
                near.order = self.clients
                return near
            far = Far(To(host="far", agent=agent), _name(at), credentials, self.mover, write=True)
            far.order = self.clients
            return far

        return connect

    @staticmethod
    def _places() -> list[tuple[int, int]]:
        return [
            (group, index)
            for group, of in enumerate(LAYOUT.groups)
            for index in range(len(of.bytes_per_token))
        ]

    # One step

    def step(self) -> None:
        """Something new happens, or what is under way goes on a little."""
        self.spell -= 1
        if self.spell <= 0:  # there are quiet times, in which caches fill
            self.is_rough = not self.is_rough
            self.spell = self.chance.randint(30, 100) if self.is_rough else self.chance.randint(30, 200)
        if self.driver and self.chance.random() < 0.25:
            acts = [*self._wishes(), *(self._misfortunes() if self.is_rough else ())]
            weights = [weight * temper for (_, weight), temper in zip(acts, self.temper, strict=False)]
            self.chance.choices([act for act, _ in acts], weights)[0]()
        else:
            self._go_on(self.chance.randint(1, 30))
        self.check()

    def _go_on(self, slices: int) -> None:
        for _ in range(slices):
            if not self.turns.go_on():  # all of them wait for something
                if self.is_rough and self.chance.random() < 0.1:
                    self.turns.pass_time(self.chance.choice((0.3, 1.0, 4.0, 15.0)))
                self.turns.pass_time_until_something_is_due(1.0)
                return

    def _wishes(self) -> list[tuple[Callable[[], None], float]]:
        return [
            (self.request, 30),
            (self.load, 25),
            (self.pass_time, 10),
            (self.verb, 6),
            (self.delete, 1),
            (self.purge, 0.5),
            (self.set_policy, 1),
        ]

    def _misfortunes(self) -> list[tuple[Callable[[], None], float]]:
        return [
            (self.cut, 4),
            (self.hold, 4),
            (self.be_deaf, 1),
            (self.crash, 1.5),
            (self.resize, 2),
            (self.move, 2),
            (self.flip, 5),
            (self.spoil, 4),
            (self.fail, 1),
            (self.set_caps, 0.5),
        ]

    # The engine

    def _start(self, work: Callable[[], None], name: str) -> None:
        if self.asking < ASKING_MAX:
            self.asking += 1

            def run() -> None:
                work()
                self.asking -= 1

            self.turns.start(run, name, self.process)

    def _asked(self) -> Prompt:
        """Something new, or what was stored before: the same again, or a part of it and something
        else."""
        chance = self.chance
        if self.talks and chance.random() < 0.85:
            maker, tokens = chance.choice(self.talks)
            if chance.random() < 0.7:
                return maker.prompt(tokens)
            tokens = tokens[: 4 * C * chance.randint(1, 4)]
        else:
            maker = keys(chance.choice(self.orgs), chance.choice(self.namespaces))
            tokens = b""
        asked = maker.prompt(tokens[: len(tokens) // (4 * C) * 4 * C])
        asked.extend(self._more())
        return asked

    def _more(self) -> list[int]:
        chance = self.chance
        whole = [chance.randrange(self.kinds) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))]
        return [kind for kind in whole for _ in range(C)] + [1] * chance.choice((0, 0, 0, 1, 40, 63))

    def request(self) -> None:
        """What an engine does: load, compute the rest, store."""
        asked = self._asked()
        chance = self.chance
        rules = Rules(
            no_store=chance.random() < 0.03,
            ttl_seconds=chance.choice((None, None, None, None, 3, 10)),
            priority=chance.choice((None, None, None, 0, 100)),
            continue_id=chance.choice(("", "talk 1", "talk 2")),
        )

        def work() -> None:
            self._load(asked)
            if chance.random() < 0.1:
                asked.rewind(chance.randint(0, asked.tokens))
            if asked.tokens < 5 * C:
                asked.extend(self._more())
            self._store(asked, rules)
            self.talks.append((asked.maker, bytes(asked._raw)))
            self.judge.forget(asked)

        self._start(work, "request")

    def load(self) -> None:
        asked = self._asked()

        def work() -> None:
            self._load(asked)
            self.judge.forget(asked)

        self._start(work, "load")

    def _load(self, asked: Prompt) -> int:
        assert self.driver
        got: dict[Place, bytearray] = {}

        def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            place = got[group, shard, depth, tokens] = bytearray(EACH * tokens)
            self.turns.maybe_leave()
            return memoryview(place)

        seconds = self.chance.choice((0.0, 0.0, 0.5, 5.0))
        loaded = self.driver.load(asked, into, seconds=seconds)
        self._check_loaded(asked, loaded, 0, got)
        for _ in range(self.chance.randint(0, 2)):
            had = loaded.tokens
            got.clear()
            loaded = self.driver.load_more(loaded, into, seconds=seconds)
            self._check_loaded(asked, loaded, had, got)
            self.seen["more was loaded"] += loaded.tokens > had
        self.seen["load"] += 1
        self.seen["hit"] += loaded.tokens > 0
        self.seen["hit altogether"] += loaded.tokens == asked.tokens > 0
        return loaded.tokens

    def _check_loaded(
        self, asked: Prompt, loaded: Loaded, had: int, got: dict[Place, bytearray]
    ) -> None:
        """All that is needed behind the first so many tokens is there, and what it should be."""
        assert had <= loaded.tokens <= asked.tokens
        sight: Sight = self.judge.sight(asked)
        whole, rest = divmod(loaded.tokens, C)
        for group, of in enumerate(LAYOUT.groups):
            columns = [(depth, C) for depth in range(of.first_needed(loaded.tokens), whole)]
            columns += [(whole, rest)] if rest else []
            for depth, tokens in columns:
                if depth * C + tokens <= had:
                    continue
                for shard in range(len(of.bytes_per_token)):
                    place = (group, shard, depth, tokens)
                    assert place in got, "a part is missing"
                    self.judge.check_part(asked, place, bytes(got[place]), sight)
                    self.given.append((got[place], bytes(got[place])))

    def _store(self, asked: Prompt, rules: Rules) -> None:
        assert self.driver
        verified = asked.tokens
        if self.chance.random() < 0.25:
            verified = self.chance.randint(0, asked.tokens)
        written = self.judge.begins(asked, verified, rules)
        fails = self.chance.choice((0.0, 0.0, 0.0, 0.02))
        lent: list[bytearray] = []

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            if self.chance.random() < fails:
                raise EngineFailed
            content = bytearray(written.content(group, shard, depth * C + tokens, EACH * tokens))
            lent.append(content)
            self.turns.maybe_leave()
            return memoryview(content)

        try:
            stored = self.driver.store(asked, verified, read, rules)
            self.seen["stored"] += stored.columns
            self.seen["not stored"] += stored.failed
        except EngineFailed:
            self.seen["an engine failed"] += 1
        for content in lent:  # it is used for something else now
            content[:] = b"\xee" * len(content)

    def verb(self) -> None:
        driver, asked, chance = self.driver, self._asked(), self.chance
        assert driver

        def work() -> None:
            match chance.randrange(7):
                case 0:
                    driver.set_priority(asked, chance.choice((0, 35, 100)))
                case 1:
                    driver.set_ttl(asked, chance.choice((1, 5, 20)))
                case 2:
                    driver.evict_policy(
                        asked.org, chance.choice(("lru", "lfu", "slru", "s3fifo", "cost"))
                    )
                case 3:
                    assert driver.query(asked) <= asked.tokens
                case 4:
                    driver.explain(asked)
                case 5:
                    driver.prefetch(asked.org, chance.choice(("talk 1", "talk 2")))
                case 6:
                    driver.computed(asked.org, chance.randint(1, 500), chance.choice((0.0, 0.01, 5.0)))

        self._start(work, "verb")

    def delete(self) -> None:
        driver, asked, chance = self.driver, self._asked(), self.chance
        assert driver

        def work() -> None:
            is_shared = chance.random() < 0.6
            receipt = driver.delete(asked, shared=is_shared, seconds=chance.choice((0, 5, 30)))
            self.seen["deleted columns"] += receipt.columns
            self.inspect()

        self._start(work, "delete")

    def purge(self) -> None:
        driver, chance = self.driver, self.chance
        assert driver
        org = chance.choice(self.orgs)
        namespace = chance.choice((None, None, NAMESPACE, OTHER))

        def work() -> None:
            tag = keys(org).tag
            driver.purge(org, namespace, tag=tag, seconds=chance.choice((0, 5, 30, 100)))
            self.inspect()

        self._start(work, "purge")

    def set_policy(self) -> None:
        chance = self.chance
        seconds = (None, None, None, 2, 10, 60)
        policy = Policy(
            ttl_first_use_seconds=chance.choice(seconds),
            ttl_last_use_seconds=chance.choice(seconds),
            tiers=chance.choice((*Tiers, *[Tiers.TIER2] * 6)),
            dram_bytes_max=chance.choice((None, None, None, 0, 40 * 4096, 20 * 4096)),
            share=chance.randint(1, 3),
            priority=chance.choice((30, 35)),
            eviction=chance.choice(("default", "lru", "lfu", "slru", "s3fifo")),
            encrypt_tier2=chance.random() < 0.05,
            scrub=chance.random() < 0.4,
        )
        self.policies = {**self.policies, chance.choice(self.orgs): OrgPolicies(policy=policy)}
        self._set_policies(self.policies)

    def _set_policies(self, policies: Mapping[str, OrgPolicies]) -> None:
        driver = self.driver
        assert driver
        self._start(lambda: driver.set_policies(policies), "policies")

    # Time and misfortune

    def pass_time(self) -> None:
        self.turns.pass_time(self.chance.choice((0.05, 0.2, 1.0)))

    def _some_end(self) -> End | None:
        ends = [end for agent in self.agents for end in agent.ends if not end.outgoing.is_over]
        return self.chance.choice(ends) if ends else None

    def cut(self) -> None:
        """Rather where something is on its way."""
        busy = [
            end
            for agent in self.agents
            for end in agent.ends
            if end.incoming.bytes or end.outgoing.bytes
        ]
        end = self.chance.choice(busy) if busy and self.chance.random() < 0.7 else self._some_end()
        if end:
            end.cut(self.chance.choice((0, 50, 10_000)))
            self.seen["cut"] += 1

    def hold(self) -> None:
        """Nothing comes through, one way, for a while."""
        if end := self._some_end():
            pipe = self.chance.choice((end.incoming, end.outgoing))
            pipe.held_until = self.turns.now + self.chance.choice((0.3, 3.0, 15.0, 70.0))
            self.seen["held up"] += 1

    def be_deaf(self) -> None:
        agent = self.chance.choice(self.agents)
        agent.is_heard = False

        self._later(self.chance.choice((1.0, 6.0, 20.0)), agent.listen)

    def crash(self) -> None:
        agent = self.chance.choice(self.agents)
        if agent.is_up:
            agent.crash()
            self.seen["crash"] += 1
            self._later(self.chance.choice((0.5, 3.0, 20.0)), agent.start_again)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        def run() -> None:
            self.turns.wait(None, seconds)
            work()

        self.turns.start(run, "later", self.turns.here)

    def resize(self) -> None:
        at = self.chance.choice(self._places())
        self._resize(at, self.chance.choice((2, 3, 5, 8, 12)))

    def _resize(self, at: tuple[int, int], slots: int) -> None:
        agent = self.homes[at]
        shard = agent.shards.get(_name(at))
        if shard and agent.is_up:
            agent.specs[_name(at)].slots = slots
            self.resizing.setdefault(shard, []).append(slots)

            def work() -> None:
                with contextlib.suppress(Breach):  # it has moved away
                    shard.resize(slots)
                    self.seen["resized"] += 1
                self.resizing[shard].remove(slots)

            self.turns.start(work, "resize", agent.process)

    def _has_its_size(self, shard: HostedShard) -> bool:
        return not self.resizing.get(shard)

    def flip(self) -> None:
        """One bit, in memory."""
        held = [
            (shard, slot)
            for agent in self.agents
            for shard in agent.shards.values()
            for slot in range(shard.arena.slots)
        ]
        if held:
            shard, slot = self.chance.choice(held)
            self.seen["a bit flipped"] += self._flip(shard.arena.slot(slot))

    def spoil(self) -> None:
        """A file is gone, or not what it was."""
        disk = self.chance.choice(self.disks)
        if disk.contents:
            name = self.chance.choice(list(disk.contents))
            raw = disk.contents[name].raw
            match self.chance.randrange(3):
                case 0:
                    del disk.contents[name]
                case 1:
                    disk.contents[name] = File(raw[: len(raw) // 2], self.judge.moment)
                case 2:
                    self._flip(memoryview(raw))
            self.seen["a file was spoilt"] += 1

    def _flip(self, raw: memoryview) -> bool:
        at = self.chance.randrange(64 + C * EACH) % len(raw)
        is_there = any(raw[: 64 + C * EACH])
        if is_there:
            raw[at] ^= 1 << self.chance.randrange(8)
        return is_there

    def fail(self) -> None:
        self.chance.choice(self.disks).faults = self.chance.randint(1, 5)

    def set_caps(self) -> None:
        agent = self.chance.choice(self.agents)
        if agent.is_up and agent.tiering.store:
            agent.caps = self._caps()

            async def told(store: Tier2, caps: Caps) -> None:
                with contextlib.suppress(Failed):
                    await store.set_caps(caps)

            asyncio.run_coroutine_threadsafe(told(agent.tiering.store, agent.caps), agent.loop)

    # Moves, as `Shim` does them

    def move(self) -> None:
        at = self.chance.choice(self._places())
        target = self.chance.choice(self.agents)
        old = self.homes[at]
        can = self.is_shared and target is not old and target.is_up and at not in self.moving
        if can and len(self.moving) < 2:
            self.moving.add(at)
            self.turns.start(lambda: self._move(at, old, target), "move", self.process)

    def _move(self, at: tuple[int, int], old: Agent, target: Agent) -> None:
        name = _name(at)
        shard = self.shards[at[0]][at[1]]
        target.specs[name] = self._spec(at, shard.count_from)
        target.provide(target.specs[name])

        def pull(slots: Sequence[int], after: int) -> Pulled:
            hosted = target.shards.get(name) if target.is_up else None
            if hosted is None or self.chance.random() < 0.05:
                return Pulled(done=False, bytes=0)
            source = Source(
                To(host="far", agent=old),
                name,
                Credentials(DRIVER, SECRET, stall_seconds=STALL_SECONDS),
                after,
            )
            fetching = Pull("pull", name, len(slots))
            task = self.turns.start(
                lambda: pulling.run(fetching, hosted, source, slots), "pull", target.process
            )
            until = self.turns.now + 120
            while not task.done and target.is_up and self.turns.now < until:
                self.turns.wait(task.joining, 1.0)
                if self.chance.random() < 0.02:  # the controller is not heard from any more
                    return Pulled(done=False, bytes=fetching.moved_bytes)
            self.seen["pulled"] += fetching.moved
            return Pulled(fetching.state == "done", fetching.moved_bytes)

        is_moved = shard.move(self._connect(at, target), pull)
        leaving = old if is_moved else target
        if is_moved:
            self.homes[at] = target
            self.seen["moved"] += 1
        leaving.specs.pop(name, None)
        gone = leaving.shards.pop(name, None)
        if gone and leaving.is_up:
            self.turns.start(lambda: gone.end(Cause.GONE, "it was taken away"), "end", leaving.process)
        self.moving.discard(at)

    # What always holds

    def check(self) -> None:
        if self.driver:
            ledger = self.driver.ledger
            if self.chance.random() < 0.1:
                ledger.check_integrity()
                self.inspect()
            else:
                for account in ledger.stock.accounts.values():
                    account.tally.check_integrity()
            for place, before in self.given:
                assert place == before, "written to after it was given"
            if not self.is_shared:
                self._check_caps()

    def _check_caps(self) -> None:
        for agent in self.agents:
            held = sum(len(file.raw) for file in agent.disk.contents.values())
            store = agent.tiering.store if agent.is_up else None
            if store and not store._index.any_exceeds():
                assert held <= store._index.caps.total, "tier 2 has more than it may"

    def inspect(self) -> None:
        """Look into every slot and file."""
        done = self.judge.receipts()
        for agent in self.agents:
            for name, shard in agent.shards.items():
                # What is about to be given back is not emptied before.
                for slot in range(min(shard.arena.slots, *self.resizing.get(shard, ()), 99)):
                    self.judge.check_slot((int(name[0]), slot), shard.arena.slot(slot), done)
        for disk in self.disks:
            for name, file in disk.contents.items():
                if address := parse(name):
                    self.judge.check_file(
                        address.tag, address.key, bytes(file.raw[:256]), file.published, done
                    )

    # The end

    def come_to_rest(self) -> None:
        """No more misfortune: then all that was begun comes to its end, and all is as good as new."""
        self.is_rough = False
        for disk in self.disks:
            disk.faults = 0
        for agent in self.agents:
            agent.listen()
            agent.start_again()
            for end in agent.ends:
                end.incoming.held_until = end.outgoing.held_until = 0
        self._until(lambda: self.driver is not None and not self.moving, "moves come to their end")
        driver = self.driver
        assert driver
        for at, agent in self.homes.items():
            self._until(partial(agent.has, _name(at)), "shards are made")
            self._until(partial(self._has_its_size, agent.shards[_name(at)]), "they get their size")
            self._resize(at, 12)
        self._until(lambda: not self.asking, "requests come to their end")
        for end in [end for agent in self.agents for end in agent.ends]:
            end.cut(0)  # over a stream, a driver hears of another size when it connects
        roomy = Policy(tiers=Tiers.TIER2, ttl_last_use_seconds=None)
        self._set_policies({org: OrgPolicies(policy=roomy) for org in ORGS})
        self._start(self._find_out, "find out")
        self._until(lambda: not self.asking, "all shards are there again")
        self._until(lambda: self._is_quiet(driver), "housekeeping comes to its end")
        driver.ledger.check_integrity()
        for account in driver.ledger.stock.accounts.values():
            for group in range(len(LAYOUT.groups)):
                states = {column.state for column in account.columns(group)}
                assert states <= {State.READY, State.EMPTY}, "a column is on its way for ever"
        for ask in self.judge.asks:
            assert ask.removal.done, "all that was to be removed is"
            ask.is_confirmed = True
        self.inspect()
        self._start(lambda: self._show_life(driver), "show")
        self._until(lambda: not self.asking, "it goes on as before")
        self._start(driver.close, "close")
        self._until(lambda: not self.asking, "it can be closed")
        for account in driver.ledger.stock.accounts.values():
            for tier, tokens in account.tally.hits.items():
                self.seen[f"tokens from {tier}"] += tokens
            for reason, tokens in account.tally.missed.items():
                self.seen[f"missed: {reason}"] += tokens
        recalled = driver.ledger.recalling.recalled
        self.seen["spilled"] += driver.ledger.spilling.spilled.columns
        self.seen["recalled"] += recalled.columns
        self.seen["restored"] += recalled.restored
        self.seen["late"] += recalled.late

    def _find_out(self) -> None:
        """Who sends something hears that a connection has broken."""
        assert self.driver
        kind = 10
        while any(group.slots < 12 for group in self.driver.groups()):
            kind += 1
            self._store_all(keys().prompt([kind] * C))
            self.turns.wait(None, 0.5)

    def _show_life(self, driver: Driver) -> None:
        for _ in range(200):
            for org in ORGS:
                driver.computed(org, 100, 100.0)  # or else computing may be faster than fetching
        for org in ORGS:
            asked = keys(org).prompt([7] * (2 * C) + [8] * 5)
            for _ in range(20):  # some connections may not have been used since they broke
                if self._store_all(asked) and self._load(asked) == asked.tokens:
                    break
                self.turns.wait(None, 1.0)
            else:
                raise AssertionError("what was just stored is missed")
            self.judge.forget(asked)
        for org in ORGS:
            assert driver.purge(org, tag=keys(org).tag, seconds=30).done
        self.inspect()
        assert not any(disk.contents for disk in self.disks)
        assert not any(pool.used for pool in driver.ledger.slots.pools)

    def _store_all(self, asked: Prompt) -> bool:
        assert self.driver
        written = self.judge.begins(asked, asked.tokens, Rules())

        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            return memoryview(written.content(group, shard, depth * C + tokens, EACH * tokens))

        return not self.driver.store(asked, asked.tokens, read).failed

    @staticmethod
    def _is_quiet(driver: Driver) -> bool:
        ledger, stock = driver.ledger, driver.ledger.stock
        slots, forgetting, restoring = ledger.slots, ledger.forgetting, ledger.restoring
        busy = (
            slots._uses, slots._limbo, slots._clears, slots._clearing, stock._purged, restoring._lost,
            stock.agenda.is_behind, forgetting._forgets, forgetting._purges, restoring._restores,
            forgetting._closed,
        )  # fmt: skip
        carrier = driver._carrier
        is_carrying = carrier._is_busy or carrier._spilling or carrier._searching
        return (
            stock.reachable
            and not any(busy)
            and not is_carrying
            and all(pool.line >= 12 for pool in slots.pools)
        )

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        until = self.turns.now + 1000
        while not holds():
            assert self.turns.now < until, f"{what}: it never does"
            self._go_on(20)
            self.check()


def _name(at: tuple[int, int]) -> str:
    return f"{at[0]}.{at[1]}"
