"""A shard that leaves an agent while columns wait in front of its tier 2: none is lost, and none that is
deleted meanwhile comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.client import Credentials, Evict, Miss
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.shard import Shard, moves
from swdriver_shim.data_plane.shard.columns import RecallColumn, SpillColumn
from tests.disk_faults.disks import Disk, Disks
from tests.kvss_agent.plane import DRIVER, SECRET, TAG, column, kv
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import files, tier2
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts two processes
KEYS = [column(f"{number}").key for number in range(4)]


@dataclass
class World:
    """A shard at the first of two agents that share a store; each has a directory in front of it."""

    folder: Path
    old: AgentProcess
    new: AgentProcess
    behind: Disk  # as the old one finds it
    shard: Shard
    generation: int = 0

    def tell(self, one: AgentProcess, *shards: dict[str, Any]) -> None:
        self.generation += 1
        front = {"path": str(self.front(one)), "cap_bytes": 1 << 30, "writes": "displaced"}
        told = {**tier2(self.behind.path), "front": front}
        one.tell(document(self.generation, *shards, tier2=told))

    def front(self, one: AgentProcess) -> Path:
        return self.folder / f"front-{one.directory.name}"

    def store(self) -> None:
        wait_until("it is open", self.shard.open)
        for slot, key in enumerate(KEYS):
            assert self.shard.evict([Evict(slot, key, TAG, 64, kv())])
        spilled = [SpillColumn(slot, key, TAG, 7) for slot, key in enumerate(KEYS)]
        assert self.shard.spill(spilled) == [True] * len(KEYS)
        assert self.shard.clear(range(len(KEYS)), scrub=False)
        assert not files(self.behind.path), "all wait in front"

    def move(self) -> None:
        self.tell(self.new, spec())
        assert self.shard.move(home(self.new), lambda *_: PullResult(done=True, bytes=0))

    def recall(self) -> list[int | Miss]:
        return self.shard.recall([RecallColumn(slot, key, TAG) for slot, key in enumerate(KEYS)])

    def delete(self, key: bytes) -> bool:
        return self.shard.delete([(key, TAG)])

    def empty(self) -> bool:
        """Whether nothing is left of the shard where it was."""
        self.shard.empty_former_homes(scrub=False)
        return not self.shard.has_former_homes


def home(one: AgentProcess) -> Home:
    return Home(f"unix:{one.directory}/data.sock", "s", lambda: Credentials(DRIVER, SECRET), 0)


@pytest.fixture
def world(tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(moves, "FLUSH_AHEAD_SECONDS", 0.0)
    behind = disks.at(tmp_path / "store")
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(agent(tmp_path / "old", **disks.more))
        new = stack.enter_context(agent(tmp_path / "new"))
        shard = Shard("s", home(old))
        stack.callback(shard.close)
        made = World(tmp_path, old, new, behind, shard)
        made.tell(old, spec())
        made.store()
        yield made
        disks.heal()


def test_what_waits_is_found_at_the_new_home(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "FLUSH_AHEAD_SECONDS", 30.0)
    world.move()
    assert world.recall() == [7] * len(KEYS)
    wait_until("nothing is left where it was", world.empty)


def test_what_is_deleted_does_not_come_back_with_a_late_copy(world: World) -> None:
    world.behind.be_read_only()
    world.move()
    assert not world.empty()
    assert "wait in front" in str(world.shard.former_homes), world.shard.former_homes
    assert world.shard.may_be_elsewhere(TAG), "no receipt before that"
    assert not world.delete(KEYS[0]), "it has to be repeated, and would come back else"
    assert set(world.recall()) == {Miss.ABSENT}
    world.behind.heal()
    assert world.delete(KEYS[0]), "also while it waits"
    wait_until("nothing is left where it was", world.empty)
    assert world.recall() == [Miss.ABSENT, *[7] * (len(KEYS) - 1)]
    assert len(files(world.behind.path)) == len(KEYS) - 1


@pytest.mark.parametrize("then", ["goes on", "is killed"])
def test_an_agent_that_was_told_to_drop_the_shard_is_asked_until_nothing_waits(
    world: World, then: str
) -> None:
    world.behind.be_read_only()
    world.move()
    world.tell(world.old)
    assert not world.empty()
    if then == "is killed":
        world.old.kill()
        assert not world.empty()
        world.old.start()
    wait_until("it says why", lambda: not world.empty() and "front" in str(world.shard.former_homes))
    assert not world.delete(KEYS[0])
    assert world.shard.purge(TAG) is None
    world.behind.heal()
    wait_until("nothing is left where it was", world.empty)
    assert world.delete(KEYS[0])
    assert world.recall() == [Miss.ABSENT, *[7] * (len(KEYS) - 1)]
    assert world.shard.purge(TAG) is not None
    assert not files(world.behind.path)


def test_agents_that_are_no_more_hold_up_no_delete(world: World) -> None:
    world.behind.be_read_only()
    world.move()
    world.old.kill()
    assert not world.delete(KEYS[0])
    world.shard.set_agents([home(world.old).address], [])
    assert world.delete(KEYS[0])
    assert world.empty()
