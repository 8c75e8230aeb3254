"""A decider and its workers, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvss_agent.client import Credentials, Evict, Miss
from kvss_agent.data_plane.tier_requests import TierRequests
from swdriver_shim.cache.prefix_map import Column
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.shard.columns import ViewColumn
from swdriver_shim.data_plane.worker.client import RemoteShard, WorkerConnection
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.decider.decider import Decider
from swdriver_shim.keys import Prompt
from swdriver_shim.policy import OrgPolicies, Policy
from tests.kvss_agent.plane import DRIVER, SECRET, running
from tests.swdriver_shim.fleets import Fleet, kv
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import LAYOUT


class Halves:
    """Two workers, the first of which holds two shards and the other one; and whoever decides."""

    def __init__(self, fleet: Fleet, **policies: Policy) -> None:
        self.fleet = fleet
        self.told: list[object] = []
        self.workers = [WorkerServer(), WorkerServer()]
        self.lines = [WorkerConnection(one.address, self.hear) for one in self.workers]
        held = {"0.0": 0, "0.1": 1, "1.0": 0}
        far = {name: RemoteShard(name, self.lines[at], self.home(name)) for name, at in held.items()}
        self.far = far
        self.driver = Decider(LAYOUT, "llama", [[far["0.0"], far["0.1"]], [far["1.0"]]])
        self.driver.set_policies({org: OrgPolicies(policy=one) for org, one in policies.items()})
        self.names = [["0.0", "0.1"], ["1.0"]]
        self.held = held

    def hear(self, raw: msgspec.Raw) -> None:
        self.told.append(msgspec.msgpack.decode(raw))

    def home(self, name: str) -> Home:
        return Home(f"unix:{self.fleet.plane.unix}", name, lambda: Credentials(DRIVER, SECRET), 0)

    def close(self) -> None:
        self.driver.close()
        for line in self.lines:
            line.close()
        for worker in self.workers:
            worker.close()

    def store(self, asked: Prompt) -> int:
        """As an engine does: slots are chosen here, and workers evict to them."""
        store = self.driver.begin_store(asked, asked.tokens)
        failed: dict[Column, Reason] = {}
        for column, slot in store.places:
            group, depth = column.group, column.depth
            for index, name in enumerate(self.names[group]):
                payload = memoryview(kv(asked, group, index, depth, column.tokens))
                out = Evict(slot, column.key, asked.maker.tag, column.tokens, payload)
                if not self.workers[self.held[name]].shards[name].evict([out]):
                    failed[column] = Reason.AGENT_LOST
        self.driver.end_store(store, failed)
        return len(store.places) - len(failed)

    def load(self, asked: Prompt) -> int:
        """And what comes back is compared, byte for byte."""
        loading = self.driver.begin_load(asked)
        match = loading.match
        refused: dict[Column, Miss] = {}
        for group, (hit, slots) in enumerate(zip(match.columns, match.slots, strict=True)):
            for index, name in enumerate(self.names[group]):
                looks = [
                    ViewColumn(slot, column.key, asked.maker.tag, column.tokens)
                    for column, slot in zip(hit, slots, strict=True)
                ]
                with self.workers[self.held[name]].shards[name].view(looks) as found:
                    for column, one in zip(hit, found, strict=True):
                        if isinstance(one, Miss):
                            refused[column] = one
                        else:
                            assert one == kv(asked, group, index, column.depth, column.tokens)
        self.driver.end_load(loading, (0, self.driver.refuse(refused)) if refused else None)
        return 0 if refused else match.tokens


@contextlib.contextmanager
def halves(directory: Path, tier: TierRequests | None = None, **policies: Policy) -> Iterator[Halves]:
    with running(directory, tier_requests=tier) as plane:
        fleet = Fleet(plane)
        fleet.make()
        made = Halves(fleet, **policies)
        try:
            yield made
            check_integrity(made.driver.ledger)
        finally:
            made.close()
