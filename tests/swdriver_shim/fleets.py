"""Agents and an engine for a driver in this process."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

from kvss_agent.client import (
    Credentials,
    ShardClient,
    Transport,
    connect,
)
from kvss_agent.data_plane.breach import Cause
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.moves import Pull
from swdriver_shim.driver import Driver, Part, ResumableLoad
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Layout
from swdriver_shim.policy import OrgPolicies, Policy, Rules
from tests.kvss_agent.plane import DRIVER, SECRET, Plane
from tests.live import wait_until
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import LAYOUT

C = COLUMN_TOKENS
PULLED = PullResult(done=True, bytes=0)


def kv(asked: Prompt, group: int, shard: int, depth: int, tokens: int) -> bytes:
    """What a model would compute: it depends on the org's tokens so far, the group and the shard."""
    size = LAYOUT.groups[group].bytes_per_token[shard] * tokens
    prefix = asked._raw(0, 4 * (depth * C + tokens))
    return hashlib.shake_128(prefix + bytes([group, shard])).digest(size)


class Engine:
    """What stores what it computes, and checks every byte that comes back."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def store(self, asked: Prompt, rules: Rules | None = None) -> int:
        def read(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            return memoryview(kv(asked, group, shard, depth, tokens))

        return self.driver.store(asked, asked.tokens, read, rules or Rules()).columns

    def load(self, asked: Prompt, seconds: float = 0.0) -> int:
        return self.loaded(asked, lambda into: self.driver.load(asked, into, seconds=seconds)).tokens

    def loaded(self, asked: Prompt, ask: Callable[[Part], ResumableLoad]) -> ResumableLoad:
        """What a load gave, every byte of it checked."""
        got: dict[tuple[int, int, int, int], bytearray] = {}

        def into(group: int, shard: int, depth: int, tokens: int) -> memoryview:
            size = LAYOUT.groups[group].bytes_per_token[shard] * tokens
            place = got[group, shard, depth, tokens] = bytearray(size)
            return memoryview(place)

        loaded = ask(into)
        for (group, shard, depth, tokens), place in got.items():
            if depth * C + tokens <= loaded.tokens:
                assert place == kv(asked, group, shard, depth, tokens), "wrong bytes"
        return loaded


class Fleet:
    """One agent in this process, with the shards of the layout."""

    def __init__(self, plane: Plane, layout: Layout = LAYOUT) -> None:
        self.plane = plane
        self.layout = layout

    def make(self, slots: int = 20, applied: int = 0, suffix: str = "") -> None:
        for name, size in self.names():
            self.make_one(name + suffix, size, slots, applied)

    def make_one(self, name: str, size: int, slots: int, applied: int) -> HostedShard:
        part = name.partition(" ")[0]
        identity = ShardIdentity(name, slot_bytes_for(size), DRIVER, part=part)
        arena = Arena.allocate(identity.slot_bytes, slots)
        wake = self.plane.plane.wake
        shard = self.plane.shards[name] = HostedShard(identity, arena, applied, wake_me=wake)
        return shard

    def names(self) -> Iterator[tuple[str, int]]:
        for index, group in enumerate(self.layout.groups):
            for shard, size in enumerate(group.bytes_per_token):
                yield f"{index}.{shard}", size * C

    def shards(self, kind: str) -> Sequence[Sequence[Shard]]:
        return [
            [self.shard(f"{index}.{shard}", kind) for shard in range(len(group.bytes_per_token))]
            for index, group in enumerate(self.layout.groups)
        ]

    def shard(self, name: str, kind: str) -> Shard:
        return Shard(name, self.connect(name, kind))

    def connect(self, name: str, kind: str) -> Callable[[], ShardClient]:
        address = f"tcp:127.0.0.1:{self.plane.tcp}" if kind == "tcp" else f"unix:{self.plane.unix}"
        transport: Transport = "shm" if kind == "shm" else "stream"
        credentials = Credentials(DRIVER, SECRET)
        return lambda: connect(address, name, credentials, transport=transport)

    def end_one(self, name: str) -> None:
        self.plane.shards.pop(name).end(Cause.GONE, "killed")

    def kill(self) -> None:
        for shard in self.plane.shards.values():
            shard.end(Cause.GONE, "killed")
        self.plane.shards.clear()


@contextlib.contextmanager
def driving(
    fleet: Fleet, kind: str = "shm", clock: Callable[[], float] = time.monotonic, **policies: Policy
) -> Iterator[Engine]:
    driver = Driver(LAYOUT, "llama", fleet.shards(kind), clock=clock)
    driver.set_policies({org: OrgPolicies(policy=policy) for org, policy in policies.items()})
    try:
        yield Engine(driver)
        check_integrity(driver.ledger)
    finally:
        driver.close()


def tokens(*kinds: int, rest: int = 0) -> list[int]:
    return [kind for kind in kinds for _ in range(C)] + [99] * rest


def pull_with(fleet: Fleet, name: str, new: str) -> Pull:
    """What the new agent's control does, slot by slot: once all evicts are applied at the old one."""

    def pull(slots: Sequence[int], after: int) -> PullResult:
        old, target = fleet.plane.shards[name], fleet.plane.shards[new]
        wait_until("what was evicted is there", lambda: old.state()["applied"] >= after)
        for slot in slots:
            if bytes(target.arena.slot(slot)[:4]) != b"TIDE":
                target.arena.slot(slot)[:] = old.arena.slot(slot)
        return PULLED

    return pull
