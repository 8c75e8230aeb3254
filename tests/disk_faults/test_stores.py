"""A store of one agent's own whose disk fails: what is not there is a miss with its reason."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Miss, ShardClient, TierAnswer, Wanted
from tests.disk_faults.disks import READ, SYNC, Disk, Disks
from tests.kvss_agent.plane import TAG, column, kv
from tests.kvss_agent.process import agent, document, spec
from tests.kvss_agent.redundancy.fleets import COUNT, recall, store
from tests.kvss_agent.stores import files, tier2

pytestmark = pytest.mark.slow  # each starts a process


@pytest.fixture
def disk(disks: Disks, tmp_path: Path) -> Disk:
    return disks.at(tmp_path / "store")


@pytest.fixture
def client(disk: Disk, disks: Disks, tmp_path: Path) -> Iterator[ShardClient]:
    with agent(tmp_path / "a", **disks.more) as running:
        told = {**tier2(disk.path), "durable": True, "shared": False}
        running.tell(document(1, spec(slots=32), tier2=told))
        with running.client() as made:
            yield made
        disks.heal()


def test_what_the_disk_does_not_have_for_sure_is_not_stored(client: ShardClient, disk: Disk) -> None:
    payload = kv()
    number = client.evict(0, column("x").key, TAG, 64, payload)
    asked = [Wanted(0, column("x", number))]
    disk.fail(SYNC, errno.EIO)
    assert client.spill(asked) == [TierAnswer.FAILED]
    assert disk.met
    assert client.exists([column("x")]) == [False]
    assert not files(disk.path)
    disk.heal()
    assert client.spill(asked) == [TierAnswer.DONE]
    assert client.exists([column("x")]) == [True]


def test_what_can_t_be_read_now_is_there_later_and_what_is_wrong_is_removed(
    client: ShardClient, disk: Disk
) -> None:
    contents = store(client, redundant=False)
    disk.fail(READ, errno.EIO)
    assert set(recall(client)) == {Miss.LOST}
    disk.heal()
    assert recall(client) == contents
    disk.flip(5000, one_in=2)
    found = recall(client)
    wrong = found.count(Miss.CORRUPT)
    assert 0 < wrong < COUNT
    assert all(one in (Miss.CORRUPT, its) for one, its in zip(found, contents, strict=True))
    assert len(files(disk.path)) == COUNT - wrong
    disk.heal()
    assert recall(client) == [Miss.ABSENT if one is Miss.CORRUPT else one for one in found]
