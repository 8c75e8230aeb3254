"""Pulls: what comes from another agent while something else goes on here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent import pulls
from kvss_agent.client import Credentials, ShardClient
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Cause
from kvss_agent.limits.background import Background
from kvss_agent.mover import PYTHON
from kvss_agent.pulls import Pull, Source, run_pull
from kvss_agent.shard import seal
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.hosted import HostedShard
from tests.kvss_agent.plane import DRIVER, SECRET, TAG, Plane, column, kv, running
from tests.live import wait_until

COUNT = 4


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    """The former home."""
    with running(tmp_path) as plane:
        plane.add(slots=COUNT)
        yield plane


@pytest.fixture
def driver(plane: Plane) -> Iterator[ShardClient]:
    with plane.client() as driver:
        for slot in range(COUNT):
            driver.evict(slot, column(str(slot)).key, TAG, 64, kv())
        driver.wait_applied(COUNT)
        yield driver


@pytest.fixture
def shard(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedShard]:
    """At the new home, where a purge waits for nobody."""
    monkeypatch.setattr("kvss_agent.shard.hosted.WRITE_SECONDS", 0.0)
    identity = plane.shards["s"].identity
    made = HostedShard(identity, Arena.allocate(identity.slot_bytes, COUNT), COUNT)
    yield made
    made.end(Cause.GONE, "the test is over")


@contextlib.contextmanager
def pulling(plane: Plane, shard: HostedShard, *, after: int) -> Iterator[Pull]:
    """It has ended when this has."""
    source = Source(Address(path=str(plane.unix)), "s", Credentials(DRIVER, SECRET), after)
    pull = Pull("a pull", "s", COUNT)
    arguments = pull, shard, source, range(COUNT), Background()
    thread = threading.Thread(target=run_pull, args=arguments)
    thread.start()
    try:
        yield pull
    finally:
        thread.join()


def tags(shard: HostedShard) -> set[bytes | None]:
    return {seal.tag_of(shard.arena.slot(slot)) for slot in range(COUNT)}


def test_a_purge_leaves_nothing_of_what_is_arriving(
    plane: Plane, driver: ShardClient, shard: HostedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come, goes_on = threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def checksum(payload: memoryview) -> int:
            has_come.set()
            assert goes_on.wait(60)
            return PYTHON.checksum(payload)

    monkeypatch.setattr(pulls, "PYTHON", Slow)
    with pulling(plane, shard, after=COUNT) as pull:
        assert has_come.wait(60)
        assert shard.purge({TAG}) == (COUNT, COUNT)
        goes_on.set()
    assert tags(shard) == {None}
    assert not any(shard.arena.slot(slot)[seal.HEADER_BYTES] for slot in range(COUNT))
    assert (pull.moved, pull.skipped.total()) == (0, COUNT)


def test_what_a_source_sends_only_after_a_purge_is_not_taken(
    plane: Plane, driver: ShardClient, shard: HostedShard
) -> None:
    with pulling(plane, shard, after=COUNT + 1) as pull:
        wait_until("the source is asked", lambda: plane.shards["s"].core.waiting == 1)
        shard.purge({TAG})
        driver.evict(0, column("another").key, TAG, 64, kv())
    assert tags(shard) == {None}
    assert (pull.state, pull.reason) == ("failed", "the shard was purged meanwhile")


def test_what_was_pulled_is_as_it_was(plane: Plane, driver: ShardClient, shard: HostedShard) -> None:
    with pulling(plane, shard, after=COUNT) as pull:
        pass
    assert (pull.state, pull.moved) == ("done", COUNT)
    there = plane.shards["s"].arena
    assert all(bytes(shard.arena.slot(slot)) == bytes(there.slot(slot)) for slot in range(COUNT))
