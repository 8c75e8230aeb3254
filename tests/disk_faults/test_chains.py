"""A directory of an agent's own disk before the store behind, while one of the two fails."""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvss_agent.client import Miss
from tests.disk_faults.disks import ALL, Disk, Disks, small_disk
from tests.kvss_agent.plane import TAG
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.redundancy.fleets import COUNT, recall, store
from tests.kvss_agent.stores import files, tier2
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts a process


@pytest.fixture
def front(disks: Disks, tmp_path: Path) -> Disk:
    return disks.at(tmp_path / "front")


@pytest.fixture
def behind(disks: Disks, tmp_path: Path) -> Disk:
    return disks.at(tmp_path / "store")


@pytest.fixture
def running(tmp_path: Path, disks: Disks, front: Disk, behind: Disk) -> Iterator[AgentProcess]:
    assert front.path != behind.path
    with agent(tmp_path / "a", **disks.more) as made:
        yield made
        disks.heal()


def chained(tmp_path: Path, writes: str, cap: int = 1 << 30) -> dict[str, Any]:
    at = {"path": str(tmp_path / "front"), "cap_bytes": cap, "writes": writes}
    told = {**tier2(tmp_path / "store"), "front": at}
    return document(1, spec(slots=32), tier2=told)


def waiting(running: AgentProcess) -> int:
    """Columns that only the front has."""
    found = re.search(
        r"^kvss_tier2_front_waiting_columns (\d+)", running.http.get("/metrics").text, re.MULTILINE
    )
    return int(found[1]) if found else -1


def fail(disk: Disk) -> None:
    disk.fail(ALL, errno.EIO)


def flip(disk: Disk) -> None:
    disk.flip(5000)


@pytest.mark.parametrize("writes", ["through", "back"])
def test_a_front_that_fails_costs_no_column_that_is_behind(
    running: AgentProcess, front: Disk, tmp_path: Path, writes: str
) -> None:
    running.tell(chained(tmp_path, writes))
    with running.client() as client:
        for fault in (fail, flip, Disk.be_read_only, Disk.be_full):
            kind = fault.__name__
            contents = store(client, COUNT, kind, redundant=False)
            wait_until("all is behind", lambda: waiting(running) == 0)
            fault(front)
            assert recall(client, COUNT, kind) == contents
            later = store(client, 4, f"+{kind}", redundant=False)
            if fault is not flip:  # what is in front alone, and is read wrong, is nowhere right
                assert recall(client, 4, f"+{kind}") == later
            assert front.met
            front.heal()
            assert recall(client, COUNT, kind) == contents
        assert client.purge(TAG) is not None
    assert not files(front.path)
    assert not files(tmp_path / "store")


def test_a_front_that_hangs_costs_its_time_and_no_column(
    running: AgentProcess, front: Disk, tmp_path: Path
) -> None:
    running.tell(chained(tmp_path, "through"))
    with running.client() as client:
        contents = store(client, redundant=False)
        front.hang()
        timer = threading.Timer(1.0, front.heal)
        timer.start()
        try:
            assert recall(client) == contents
            assert front.met == 0, "it is healed, and not before"
        finally:
            timer.join()


def test_a_lie_in_front_alone_is_a_miss_and_never_a_wrong_byte(
    running: AgentProcess, front: Disk, behind: Disk, tmp_path: Path
) -> None:
    running.tell(chained(tmp_path, "back"))
    behind.be_read_only()
    with running.client() as client:
        contents = store(client, redundant=False)
        front.flip(5000, one_in=2)
        found = recall(client)
        assert {one for one in found if isinstance(one, Miss)} == {Miss.CORRUPT}
        hits = [(one, its) for one, its in zip(found, contents, strict=True) if isinstance(one, bytes)]
        assert 0 < len(hits) < COUNT
        assert all(one == its for one, its in hits)


@pytest.mark.parametrize("heals", ["before the start", "after it"])
def test_what_waits_for_a_store_that_is_read_only_outlives_a_kill_and_is_copied_later(
    running: AgentProcess, behind: Disk, tmp_path: Path, heals: str
) -> None:
    running.tell(chained(tmp_path, "back"))
    behind.be_read_only()
    with running.client() as client:
        contents = store(client, redundant=False)
        wait_until("it was tried", lambda: behind.met > 0)
        assert waiting(running) == COUNT
        assert recall(client) == contents
    running.kill()
    if heals == "before the start":
        behind.heal()
    running.start()
    if heals == "after it":
        wait_until("it is open", lambda: running.observed()["tier2"]["state"] == "ready")
        assert waiting(running) == COUNT
        behind.heal()
    wait_until("it is open", lambda: running.observed()["tier2"]["state"] == "ready")
    with running.client() as client:
        assert recall(client) == contents
        wait_until("all is behind", lambda: waiting(running) == 0)
        assert len(files(behind.path)) == COUNT
        assert recall(client) == contents


def test_a_real_front_that_is_full_costs_no_column(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        front = stack.enter_context(small_disk(tmp_path / "front", "512k"))
        running = stack.enter_context(agent(tmp_path / "a"))
        running.tell(chained(tmp_path, "back"))
        client = stack.enter_context(running.client())
        contents = store(client, 24, redundant=False)
        assert recall(client, 24) == contents
        assert files(front.path)
        wait_until("all is behind", lambda: waiting(running) == 0)
        assert len(files(tmp_path / "store")) == 24
        front.remount(read_only=True)
        assert recall(client, 24) == contents
        more = store(client, 4, "more", redundant=False)
        assert recall(client, 4, "more") == more
        front.remount(read_only=False)
        assert client.purge(TAG) is not None
        assert not files(front.path)
        assert not files(tmp_path / "store")
