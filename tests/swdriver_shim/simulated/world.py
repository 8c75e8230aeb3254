"""A driver, its agents and their disks, all of them at the mercy of one seed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Final, Self
from unittest import mock

from kvss_agent import borrowing, clock, pulls
from kvss_agent.client import Credentials, ShardClient, requests, shared, stream, window
from kvss_agent.client import connection as client_connection
from kvss_agent.data_plane import channel, connection, latencies, server
from kvss_agent.data_plane.constants import VERSION, VERSION_MIN
from kvss_agent.limits import background
from kvss_agent.shard import hosted, own_member
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.tier2 import claims
from kvss_agent.tier2 import store as stores
from kvss_agent.tier2.address import parse
from kvss_agent.tier2.front import departures, faults, flushes, workers
from kvss_agent.tier2.front import disk as front_disk
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.parts import execution
from kvss_agent.tier2.parts import statistics as store_statistics
from kvss_agent.tier2.settings import Writes
from swdriver_shim import driver, fair_lock
from swdriver_shim.cache import promotion, prompt_deletes, spills
from swdriver_shim.data_plane import borrowing as driver_borrowing
from swdriver_shim.data_plane import tier2
from swdriver_shim.data_plane.shard import Shard, connections, former_homes, moves, reads, slots
from swdriver_shim.data_plane.shard import shard as shards
from swdriver_shim.decider import decider, housekeeping, removals, shard_threads, statistics
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.one_thread import Process, Turns, installed
from tests.swdriver_shim.judge import Judge, Watched, WatchedRemovals
from tests.swdriver_shim.prompts import NAMESPACE
from tests.swdriver_shim.simulated.agent import (
    DRIVER,
    SECRET,
    Agent,
    Far,
    Mover,
    Near,
    Spec,
    To,
    opened,
)
from tests.swdriver_shim.simulated.disk import Disk
from tests.swdriver_shim.simulated.front import CAPS, Front, posix
from tests.swdriver_shim.simulated.network import STALL_SECONDS
from tests.swdriver_shim.simulated.redundancy import FragmentsDisk
from tests.swdriver_shim.simulated.sibling import SimulatedSibling

C = COLUMN_TOKENS
BEFORE: Final = (VERSION_MIN, VERSION - 1)
NOW: Final = (VERSION_MIN, VERSION)
EACH = 16  # bytes per token, of every shard
LAYOUT: Final = Layout((Group("full", (EACH, EACH)), Group("window", (EACH, EACH), window=100)))
STATEFUL: Final = Layout((Group("state", bytes_per_state=(5000, 600)), *LAYOUT.groups))
ORGS: Final = ("acme", "globex", "initech")
MODULES: Final = (
    *(decider, fair_lock, housekeeping, removals, shard_threads, statistics),
    *(driver, tier2, connections, former_homes, moves, reads, shards, slots),
    *(client_connection, requests, shared, stream, window),
    *(channel, connection, latencies, hosted, own_member, pulls, server),
    *(background, borrowing, clock, driver_borrowing),
    *(stores, execution, store_statistics, claims),
    *(departures, front_disk, faults, flushes, workers),
)
At = tuple[int, int]  # of a shard: its group, and which of it


class World:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.seen: Counter[str] = Counter()
        self.turns = Turns(chance, restless=chance.choice((0.05, 0.2, 0.5)))
        self.layout = chance.choice((LAYOUT, STATEFUL))
        self.judge = Judge(self.layout, self.seen)
        self.mover = Mover(self.turns)
        self.promotion = chance.choice((0, 0, 1 << 30))  # bytes per second
        self.is_shared = chance.random() < 0.6  # tier 2 is one, of all agents
        # Of the data plane: who is upgraded later speaks the one before until then.
        self.driver_versions = chance.choice((BEFORE, NOW, NOW, NOW))
        # A directory in front of it: in half of the worlds most agents have one, in the others none.
        self.has_fronts = chance.choice((0.0, 0.8))
        self.stores = [Disk(self.turns, self.judge) for _ in range(1 if self.is_shared else 3)]
        self.fragments = FragmentsDisk(self.turns, self.judge)  # of redundant columns, of all agents
        self.agents = [
            Agent(
                name,
                self.turns,
                self.stores[at % len(self.stores)],
                self.fragments,
                self.caps(),
                self._front(),
            )
            for at, name in enumerate(("one", "two", "three"))
        ]
        in_front = [disk for agent in self.agents if agent.front for disk in agent.front.disks.values()]
        self.disks = [*self.stores, self.fragments, *in_front]
        self.homes: dict[At, Agent] = {}
        self.resizing: dict[HostedShard, list[int]] = {}
        self.clients = 0
        self.policies: dict[str, OrgPolicies] = {}
        self.driver: Driver | None = None
        self.process = Process("driver")
        self._installed = contextlib.ExitStack()

    def __enter__(self) -> Self:
        enter = self._installed.enter_context
        enter(installed(self.turns, MODULES, ("swdriver_shim", "kvss_agent")))
        enter(mock.patch.object(channel, "hang_up", lambda end: end.hang_up()))
        enter(mock.patch.object(client_connection, "opened", opened))
        enter(
            mock.patch.multiple(prompt_deletes, SLICE=2, PIECE=1)
        )  # else prompts would have to be long
        enter(mock.patch.object(borrowing, "Address", SimpleNamespace(parse=self._address)))
        native = SimpleNamespace(
            current=lambda: self.mover, follow=lambda one: one.use_mover(self.mover)
        )
        enter(mock.patch.object(borrowing, "native", native))
        enter(mock.patch.object(borrowing.log, "exception", self._fail))
        enter(mock.patch.object(front_disk, "Posix", posix))
        enter(mock.patch.object(decider, "Ledger", partial(Watched, self.judge)))
        enter(mock.patch.object(decider, "Removals", partial(WatchedRemovals, self.judge)))
        enter(mock.patch.object(spills, "RESERVE_PART", self.chance.choice((3, 5, 32))))
        enter(mock.patch.object(promotion, "HELD_PART", self.chance.choice((1, 2, 4))))  # of a few slots
        enter(mock.patch.object(promotion, "RATE_MIN", self.chance.choice((0.0, 1 / 60))))
        enter(mock.patch.object(moves, "PULL_SLOTS_MAX", self.chance.choice((1, 3, 64))))
        self._make()
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()
        for agent in self.agents:
            for shard in agent.shards.values():
                shard.arena.close()
                shard.count.close()

    def _fail(self, *_: object) -> None:
        """With the error that is being handled."""
        if error := sys.exception():
            self.turns.fail(error)

    def _make(self) -> None:
        for at in self.places():
            agent = self.homes[at] = self.chance.choice(self.agents)
            agent.specs[name_of(at)] = self.spec(at, 0)
        self.sibling = SimulatedSibling(self)
        for agent in self.agents:
            agent.start()
        while self.turns.go_on():
            pass
        for org in ORGS:
            policy = Policy(tiers=Tiers.TIER2, redundant_from_priority=50)
            self.policies[org] = OrgPolicies(policy=policy)
        self.turns.start(self._drive, "start", self.process)

    def _drive(self) -> None:
        self.shards = [
            [self._shard((group, index)) for index in range(of.shards)]
            for group, of in enumerate(self.layout.groups)
        ]
        self.driver = Driver(
            self.layout,
            "llama",
            self.shards,
            clock=lambda: self.turns.now,
            wall_clock=self.turns.calendar,
        )
        self.driver.set_policies(self.policies)
        self.driver.set_promotion_budget(self.promotion)

    def _address(self, name: str) -> To:
        return To(host="far", agent=next(agent for agent in self.agents if agent.name == name))

    @property
    def can_be_redundant(self) -> bool:
        """Whether all of them are of a version that knows it."""
        spoken = [self.driver_versions, *(agent.versions for agent in self.agents)]
        return all(highest == VERSION for _, highest in spoken)

    def _front(self) -> Front | None:
        if self.chance.random() >= self.has_fronts:
            return None
        writes = self.chance.choice(list(Writes))
        return Front(self.turns, self.judge, self.chance.choice(CAPS), writes)

    def caps(self) -> Caps:
        total = self.chance.choice((1 << 30, 1 << 30, 20 * 4096, 5 * 4096))
        return Caps(total, self.chance.choice((1 << 30, 20 * 4096)))

    def spec(self, at: At, applied: int) -> Spec:
        name = name_of(at)
        size = self.layout.groups[at[0]].slot_bytes[at[1]]
        identity = ShardIdentity(name, size, DRIVER, NAMESPACE.digest(), name)
        return Spec(identity, self.chance.randint(5, 10), applied)

    def _shard(self, at: At) -> Shard:
        return Shard(name_of(at), self.connect(at, self.homes[at]))

    def connect(self, at: At, agent: Agent) -> Way:
        return Way(at, agent, self, is_near=self.chance.random() < 0.5)

    def places(self) -> list[At]:
        return [
            (group, index) for group, of in enumerate(self.layout.groups) for index in range(of.shards)
        ]

    def inspect(self) -> None:
        """Look into every slot and file."""
        done = self.judge.receipts()
        for agent in self.agents:
            for name, shard in agent.shards.items():
                if name.startswith("sibling"):
                    continue  # it is emptied by its own driver
                # What is about to be given back is not emptied before.
                for slot in range(min(shard.arena.slots, *self.resizing.get(shard, ()), 99)):
                    self.judge.check_slot((int(name[0]), slot), shard.arena.slot(slot), done)
        for disk in self.disks:
            for name, file in disk.contents.items():
                if address := parse(name):
                    self.judge.check_file(
                        address.tag, address.key, bytes(file.raw[:256]), file.published, done
                    )


@dataclass(frozen=True)
class Way:
    """To a shard at an agent."""

    at: At
    agent: Agent
    world: World = field(compare=False)
    is_near: bool = field(compare=False)

    def __call__(self) -> ShardClient:
        world, agent, name = self.world, self.agent, name_of(self.at)
        credentials = Credentials(
            DRIVER, SECRET, stall_seconds=STALL_SECONDS, versions=world.driver_versions
        )
        if min(agent.versions[1], world.driver_versions[1]) < VERSION:
            world.seen["an earlier version was spoken"] += 1
        world.clients += 1
        if self.is_near:
            near = Near(To(path="near", agent=agent), name, credentials, world.mover)
            near.order = world.clients
            return near
        far = Far(To(host="far", agent=agent), name, credentials, world.mover, write=True)
        far.order = world.clients
        return far


def name_of(at: At) -> str:
    return f"{at[0]}.{at[1]}"
