"""Columns that real agents store for each other while the disk of one of them, or of two, fails."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Miss, ShardClient
from tests.disk_faults.disks import READ, READS, WRITE, Disk, Disks, small_disk
from tests.kvss_agent.plane import TAG, column
from tests.kvss_agent.process import agent
from tests.kvss_agent.redundancy.fleets import COUNT, TCP, Fleet, recall, store
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts four processes, and waits for a disk


@pytest.fixture
def bad(disks: Disks, tmp_path: Path) -> Disk:
    return disks.at(tmp_path / "store-a")


@pytest.fixture
def other(disks: Disks, tmp_path: Path) -> Disk:
    return disks.at(tmp_path / "store-b")


@pytest.fixture
def fleet(tmp_path: Path, disks: Disks, bad: Disk, other: Disk) -> Iterator[Fleet]:
    """The disks of the first two holders can fail."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(agent(tmp_path / "home", *TCP))
        a, b = (stack.enter_context(agent(tmp_path / name, *TCP, **disks.more)) for name in "ab")
        made = Fleet(home, [a, b, stack.enter_context(agent(tmp_path / "c", *TCP))], tmp_path)
        made.tell()
        made.wait_until_ready()
        yield made
        disks.heal()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[ShardClient]:
    with fleet.home.client(stall_seconds=30.0) as made:
        yield made


def be_broken(disk: Disk) -> None:
    disk.fail(WRITE, errno.EIO)


def test_what_a_bad_disk_did_not_take_comes_back_and_is_made_again(
    fleet: Fleet, client: ShardClient, bad: Disk
) -> None:
    contents = {}
    for fault in (be_broken, Disk.be_read_only, Disk.be_full):
        fault(bad)
        kind = fault.__name__
        contents[kind] = store(client, 4, kind)
        assert bad.met
        assert recall(client, 4, kind) == contents[kind]
    assert fleet.redundancy()["incomplete"] == COUNT
    bad.heal()
    fleet.wait_until_repaired()
    fleet.holders[1].kill()  # so that the fragments that were made again are needed
    for kind, its in contents.items():
        assert recall(client, 4, kind) == its


def test_recalls_do_not_wait_for_a_disk_that_hangs_and_it_costs_no_column(
    fleet: Fleet, client: ShardClient, bad: Disk
) -> None:
    before = store(client)
    bad.hang()
    assert recall(client) == before
    assert bad.met
    assert fleet.counts()["holder_faults"] == 0, "it is still being waited for, and by no recall"
    told = fleet.redundancy()
    assert told["hedges"] > 0
    assert f"tcp:127.0.0.1:{fleet.holders[0].tcp}" in told["late"]
    assert recall(client) == before
    contents = store(client, 4, "later")
    assert recall(client, 4, "later") == contents
    bad.heal()

    def is_prompt() -> bool:
        assert recall(client) == before
        return not fleet.redundancy()["late"]

    wait_until("a probe has been answered", is_prompt, 60)
    fleet.wait_until_repaired()
    fleet.holders[1].kill()
    assert recall(client, 4, "later") == contents
    assert recall(client) == before


def fail_some(disk: Disk) -> None:
    disk.fail(READ, errno.EIO, one_in=2)


def fail_all(disk: Disk) -> None:
    disk.fail(READS, errno.EIO)


def flip_some(disk: Disk) -> None:
    disk.flip(5000, one_in=2)


def flip_header(disk: Disk) -> None:
    disk.flip(20)


def test_blocks_that_can_t_be_read_or_lie_cost_no_column_and_are_made_again(
    fleet: Fleet, client: ShardClient, bad: Disk
) -> None:
    contents = {}
    for fault in (fail_some, fail_all, flip_some, flip_header):
        kind = fault.__name__
        contents[kind] = store(client, COUNT, kind)
        fault(bad)
        assert recall(client, COUNT, kind) == contents[kind]
        assert bad.met
        bad.heal()

        def is_prompt(kind: str = kind) -> bool:
            assert recall(client, COUNT, kind) == contents[kind]
            return not fleet.redundancy()["late"]

        wait_until("no answer of before is still to come", is_prompt)
        fleet.wait_until_repaired()
    fleet.holders[1].kill()
    for kind, its in contents.items():
        assert recall(client, COUNT, kind) == its


def test_two_bad_disks_are_misses_and_never_other_bytes(
    fleet: Fleet, client: ShardClient, bad: Disk, other: Disk
) -> None:
    contents = store(client)
    fail_all(bad)
    fail_all(other)
    assert set(recall(client)) == {Miss.LOST}
    bad.heal()
    other.heal()
    assert recall(client) == contents, "nothing was removed for it"
    flip_some(bad)
    fail_all(other)
    found = recall(client)
    assert {one for one in found if isinstance(one, Miss)} <= {Miss.LOST, Miss.CORRUPT, Miss.ABSENT}
    hits = [(one, its) for one, its in zip(found, contents, strict=True) if isinstance(one, bytes)]
    assert 0 < len(hits) < COUNT
    assert all(one == its for one, its in hits)


@pytest.mark.parametrize("fault", [fail_all, Disk.hang])
def test_repair_that_a_bad_disk_stops_goes_on_when_it_heals(
    fleet: Fleet, client: ShardClient, bad: Disk, fault: Callable[[Disk], None], tmp_path: Path
) -> None:
    contents = store(client)
    fault(bad)
    fleet.holders[2].kill()
    with agent(tmp_path / "new", *TCP) as new:
        fleet.tell(holders=[*fleet.holders[:2], new])
        wait_until("repair has tried", lambda: bad.met > 0)
        assert fleet.redundancy().get("repaired", 0) == 0
        bad.heal()
        fleet.wait_until_ready()
        fleet.wait_until_repaired()
        fleet.holders[0].kill()
        assert recall(client) == contents


def test_repair_to_a_full_disk_goes_on_when_it_has_room_and_takes_it_from_no_other_fragment(
    fleet: Fleet, client: ShardClient, disks: Disks, tmp_path: Path
) -> None:
    before = store(client)
    fleet.holders[2].kill()
    full = disks.at(tmp_path / "store-new")
    with agent(tmp_path / "new", *TCP, **disks.more) as new:
        fleet.tell(holders=[*fleet.holders[:2], new])
        wait_until("the new one has its fragments", lambda: len(fleet.files()) == 3 * COUNT)
        fleet.wait_until_repaired()
        full.be_full()
        contents = store(client, 4, "more")
        met = full.met
        assert met
        wait_until("repair has tried", lambda: full.met > met)
        assert recall(client, 4, "more") == contents
        assert fleet.redundancy()["incomplete"] == 4
        full.heal()
        fleet.wait_until_repaired()
        fleet.holders[0].kill()
        assert recall(client, 4, "more") == contents
        assert recall(client) == before


def test_holders_that_are_full_cost_whole_columns_that_are_known_to_be_gone(
    fleet: Fleet, client: ShardClient, bad: Disk, other: Disk
) -> None:
    before = store(client)
    bad.be_full()
    other.be_full()
    contents = store(client, 2, "more")
    assert recall(client, 2, "more") == contents, "stored at home alone"
    assert fleet.redundancy()["columns"] == COUNT - 2
    assert len(fleet.files()) == 3 * (COUNT - 2)
    assert recall(client) == [Miss.ABSENT, Miss.ABSENT, *before[2:]]
    fleet.holders[0].kill()
    assert recall(client)[2:] == before[2:]


def test_a_purge_during_repair_leaves_nothing_and_nothing_comes_back(
    fleet: Fleet, client: ShardClient, bad: Disk, tmp_path: Path
) -> None:
    """And there is no receipt while a holder can't remove its fragments."""
    fleet.redundant["bytes_per_second"] = 64 << 10  # a column: it is under way for long enough
    store(client, 24)
    fleet.holders[2].kill()
    with agent(tmp_path / "new", *TCP) as new:
        fleet.tell(holders=[*fleet.holders[:2], new])
        wait_until("repair is under way", lambda: fleet.redundancy().get("repaired", 0) > 1)
        bad.be_read_only()
        assert client.purge(TAG) is None
        assert fleet.redundancy()["repaired"] < 24
        bad.heal()
        assert client.purge(TAG) is not None
        assert not fleet.files()
        assert fleet.redundancy()["incomplete"] == 0
        time.sleep(2)  # two turns of repair
        assert not fleet.files()
        assert set(recall(client, 24)) == {Miss.ABSENT}
        assert not any(client.exists([column("0"), column("23")]))


def test_a_real_disk_that_is_full_or_read_only_costs_no_column(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        small = stack.enter_context(small_disk(tmp_path / "store-a", "256k"))
        agents = [stack.enter_context(agent(tmp_path / name, *TCP)) for name in ("home", "a", "b", "c")]
        fleet = Fleet(agents[0], agents[1:], tmp_path)
        fleet.tell()
        fleet.wait_until_ready()
        client = stack.enter_context(fleet.home.client())
        contents = store(client, 24)
        assert recall(client, 24) == contents
        assert 0 < len([*small.path.glob("*/*/*/*")]) < 24
        small.remount(read_only=True)
        more = store(client, 4, "more")
        assert recall(client, 4, "more") == more
        assert recall(client, 24) == contents
        assert client.purge(TAG) is None, "a disk that is read-only still has them"
        small.remount(read_only=False)
        assert client.purge(TAG) is not None
        assert not fleet.files()
