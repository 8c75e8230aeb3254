"""Real models over a driver and an agent in this process, with its real data plane. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvss_agent.client import Credentials, connect
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim.adapters.transformers import PrefixCache
from swdriver_shim.cache.misses import ColumnState
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.desired import ModelSpec
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys, Prompt
from swdriver_shim.prefixes import LocalPrefixes
from tests.kvss_agent.plane import DRIVER, SECRET, Plane
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.tiny_models import CHUNK, spec_of


@dataclass
class World:
    """A model, an agent, a driver; all in this process, the agent with its real data plane."""

    model: Any
    spec: ModelSpec
    plane: Plane
    driver: Driver

    def cache(self, name: str = "acme", chunk: int = CHUNK) -> PrefixCache:
        keys = Keys(name, name.encode().ljust(32, b"!"), self.spec.namespace())
        return PrefixCache(self.model, LocalPrefixes(self.driver, keys), chunk_tokens=chunk)

    def query(self, tokens: list[int]) -> int:
        return self.driver.query(self._prompt(tokens))

    def explain(self, tokens: list[int]) -> dict[str, list[ColumnState]]:
        return self.driver.explain(self._prompt(tokens))

    def _prompt(self, tokens: list[int]) -> Prompt:
        return Keys("acme", b"acme".ljust(32, b"!"), self.spec.namespace()).prompt(tokens)


class Worlds:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._drivers: list[Driver] = []

    def make(self, model: Any, slots: int = 40) -> World:
        made = spec_of(model)
        shards = []
        for group in made.shape().groups:
            identity = ShardIdentity(group.name, group.slot_bytes[0], DRIVER)
            arena = Arena.allocate(identity.slot_bytes, slots)
            wake = self._plane.plane.wake
            self._plane.shards[group.name] = HostedShard(identity, arena, 0, wake_me=wake)
            shards.append([Shard(group.name, self._connector(group.name))])
        driver = Driver(made.shape(), made.name, shards)
        self._drivers.append(driver)
        return World(model, made, self._plane, driver)

    def _connector(self, name: str) -> Any:
        return lambda: connect(f"unix:{self._plane.unix}", name, Credentials(DRIVER, SECRET))

    def close(self) -> None:
        for driver in self._drivers:
            check_integrity(driver.ledger)
            driver.close()
