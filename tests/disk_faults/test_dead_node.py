"""The death of a node, with its memory and its disk: no column that was used again is a miss for it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.desired import ControlSpec, Desired, GroupSpec, HomeSpec, ModelSpec, OrgSpec
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.plane import SECRET as DRIVER_SECRET
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.redundancy.fleets import TCP
from tests.live import wait_until
from tests.swdriver_shim.fleets import C, Engine, tokens
from tests.swdriver_shim.prompts import LAYOUT, NAMESPACE, SECRET, prompt
from tests.swdriver_shim.tiers import SOON

pytestmark = pytest.mark.slow  # starts five processes
ROOM = 64
COLUMNS = 4  # of each prompt
AGENTS_NAMESPACE = "ab" * 16
REDUNDANT = Policy(tiers=Tiers.TIER2, redundant_from_priority=0)
PARTS = [
    (one.name, index, one.slot_bytes[index]) for one in LAYOUT.groups for index in range(one.shards)
]
DYING = ("full", 0)  # the shard whose home dies


class World:
    """A driver, the agents that are its homes, and those that are holders of its fragments."""

    def __init__(
        self, folder: Path, shim: Shim, homes: list[AgentProcess], holders: list[AgentProcess], data: int
    ) -> None:
        """`homes`: of the shard that dies, and of the others."""
        self.shim, self.homes, self.holders, self.data = shim, homes, holders, data
        self.engine: Engine
        self._folder = folder
        self._generation = 0

    def store_of(self, one: AgentProcess) -> Path:
        return self._folder / f"store-{one.directory.name}"

    def tell(self) -> None:
        """Agents and driver get documents, as from a console."""
        self._generation += 1
        for one in {id(one): one for one in (*reversed(self.holders), *self.homes)}.values():
            path = str(self.store_of(one))
            tier2 = {"kind": "posix", "path": path, "cap_bytes": 1 << 30, "shared": False}
            shards = [*self._shards_at(one), *self._fragment_shards_at(one)]
            one.tell(document(self._generation, *shards, tier2=tier2))
        told = Desired(
            generation=self._generation,
            driver=DRIVER,
            secret=DRIVER_SECRET,
            model=ModelSpec(
                name=NAMESPACE.model,
                revision=NAMESPACE.revision,
                kv_dtype=NAMESPACE.kv_dtype,
                layout=NAMESPACE.layout,
                groups=tuple(map(GroupSpec.of, LAYOUT.groups)),
            ),
            homes=tuple(self._home_spec(group, index) for group, index, _ in PARTS),
            orgs=(OrgSpec("acme", SECRET, OrgPolicies(policy=REDUNDANT)),),
        )
        self.shim.set_desired(msgspec.json.encode(told))

    def redundancy(self) -> list[dict[str, Any]]:
        """Of each shard."""
        shards = [one for home in self.homes for one in home.observed()["shards"]]
        return [one["redundancy"] for one in shards if "redundancy" in one]

    def wait_until_ready(self) -> None:
        wait_until(
            "redundancy is ready", lambda: {one["state"] for one in self.redundancy()} == {"ready"}
        )
        wait_until("shards are at home", lambda: self.shim.is_ready)
        wait_until("the driver has noticed", lambda: self.shim.driver.ledger.is_reachable)

    def wait_until_whole(self) -> None:
        """Each column has all of its fragments: a holder may have been away when it was stored."""
        wait_until(
            "nothing is incomplete", lambda: not any(one["incomplete"] for one in self.redundancy())
        )

    def _home_of(self, group: str, index: int) -> AgentProcess:
        return self.homes[(group, index) != DYING]

    def _home_spec(self, group: str, index: int) -> HomeSpec:
        home = self._home_of(group, index)
        control = ControlSpec(str(home.http.base_url), (home.directory / "token").read_text().strip())
        return HomeSpec(group, index, f"tcp:127.0.0.1:{home.tcp}", f"{group}.{index}", control)

    def _shards_at(self, one: AgentProcess) -> Iterator[dict[str, Any]]:
        counts = {}
        if self._generation > 1:
            seen = self.shim.observed()["shards"]
            counts = {(its["group"], its["index"]): its["count_from"] for its in seen}
        for group, index, size in PARTS:
            if self._home_of(group, index) is not one:
                continue
            holders = [
                {"address": f"tcp:127.0.0.1:{its.tcp}", "shard": f"{group}.{index}.f{at}"}
                for at, its in enumerate(self.holders)
            ]
            how = {"data": self.data, "parity": len(self.holders) - self.data, "holders": holders}
            yield {
                **spec(f"{group}.{index}", ROOM, namespace=AGENTS_NAMESPACE, redundancy=how),
                "slot_bytes": size,
                "applied": counts.get((group, index), 0) if (group, index) == DYING else 0,
            }

    def _fragment_shards_at(self, one: AgentProcess) -> Iterator[dict[str, Any]]:
        for at, holder in enumerate(self.holders):
            if holder is not one:
                continue
            for group, index, size in PARTS:
                name = f"{group}.{index}.f{at}"
                made = spec(name, SLOTS, namespace=AGENTS_NAMESPACE, is_for_fragments=True)
                part = fragment_part(f"{group}.{index}", at, self.data, len(self.holders) - self.data)
                yield {**made, "slot_bytes": fragment_slot_bytes(size, self.data), "part": part}


@pytest.mark.parametrize("data", [1, 2])
def test_no_column_that_was_used_again_is_a_miss_after_the_death_of_its_node(
    tmp_path: Path, data: int
) -> None:
    with contextlib.ExitStack() as stack:
        dying, other, *more = (
            stack.enter_context(agent(tmp_path / name, *TCP)) for name in "abcd"[: data + 2]
        )
        shim = Shim(DRIVER, None)
        stack.callback(shim.stop)
        # The node that dies holds fragments, too.
        world = World(tmp_path, shim, [dying, other], [dying, *more], data)
        world.tell()
        world.wait_until_ready()
        engine = Engine(shim.mover)
        wait_until("it has room", lambda: all(pool.limit for pool in shim.driver.ledger.pools))

        hot = [prompt(tokens(*range(kind, kind + COLUMNS))) for kind in range(10, 50, 10)]
        cold = prompt(tokens(*range(50, 50 + COLUMNS)))
        for asked in (*hot, cold):
            engine.store(asked)
        for asked in hot:
            for _ in range(2):
                assert engine.load(asked) == COLUMNS * C
        spilled = shim.driver.ledger.tier2.spilled
        # Of the window, of 100 tokens, a load needs the last two columns only.
        wait_until("they are in tier 2", lambda: spilled.redundant >= len(hot) * (COLUMNS + 2))
        world.wait_until_whole()

        dying.kill()
        shutil.rmtree(world.store_of(dying))
        assert engine.load(hot[0]) == 0, "without a home there is no memory to recall to"
        heir = stack.enter_context(agent(tmp_path / "heir", *TCP))
        world.homes, world.holders = [heir, other], [heir, *more]
        world.tell()
        world.wait_until_ready()
        wait_until("it has room", lambda: all(pool.limit for pool in shim.driver.ledger.pools))
        for asked in hot:
            assert engine.load(asked, SOON) == COLUMNS * C
        assert engine.load(cold, SOON) == 0, "it was in that memory alone"
        for asked in hot:
            assert engine.load(asked) == COLUMNS * C, "from memory again"
        world.wait_until_whole()  # the heir has got the fragments of the dead, for the next death
        assert sum(1 for _ in world.store_of(heir).glob("*/*/*/*")) >= len(hot) * (2 * COLUMNS + 2)
