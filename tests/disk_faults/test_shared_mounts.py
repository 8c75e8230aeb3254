"""A store that several agents share by mounting one directory, each as a client of its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Miss, TierAnswer
from tests.disk_faults.shared_mounts import Client, mounted
from tests.kvss_agent.plane import TAG, column
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.redundancy.fleets import COUNT, recall, store
from tests.kvss_agent.stores import files, tier2
from tests.live import wait_until

pytestmark = pytest.mark.slow  # each starts processes


@pytest.fixture
def behind(tmp_path: Path) -> Path:
    return tmp_path / "behind"


@pytest.fixture
def mounts(tmp_path: Path, behind: Path) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mounted(behind, tmp_path / name)) for name in ("one", "other")]


@pytest.fixture
def agents(tmp_path: Path, mounts: list[Client]) -> Iterator[list[AgentProcess]]:
    """Each has a mount of its own."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(agent(tmp_path / f"a-{one.path.name}")) for one in mounts]
        for one, mount in zip(made, mounts, strict=True):
            one.tell(document(1, spec(slots=32), tier2=tier2(mount.path)))
        yield made


def test_what_one_client_stores_another_finds_and_a_purge_by_either_reaches_all(
    agents: list[AgentProcess], behind: Path
) -> None:
    one, other = agents
    with one.client() as first, other.client() as second:
        assert set(recall(second)) == {Miss.ABSENT}
        contents = store(first, redundant=False)
        assert len(files(behind)) == COUNT
        wait_until("the other client knows of them", lambda: recall(second) == contents)
        more = store(second, 4, "more", redundant=False)
        wait_until("and the first one of its own", lambda: recall(first, 4, "more") == more)
        assert first.tier_delete([column("0")]) == [TierAnswer.DONE]
        wait_until("a delete is seen", lambda: recall(second, 1) == [Miss.ABSENT])
        assert second.purge(TAG) is not None
        assert not files(behind)
        assert set(recall(first)) == {Miss.ABSENT}


def test_a_writer_that_dies_at_one_client_leaves_nothing_that_another_does_not_remove(
    agents: list[AgentProcess], behind: Path
) -> None:
    """Locks hold among clients: what somebody is writing stays."""
    one, other = agents
    with one.client() as first:
        contents = store(first, redundant=False)
    one.kill()
    folder = files(behind)[0].parent
    dead, writing = folder / ".tmp-00000000-1", folder / ".tmp-00000000-2"
    dead.write_bytes(b"half of a file")
    with writing.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other.kill()
        other.start()
        wait_until("it has listed the store", lambda: other.observed()["tier2"]["state"] == "ready")
        wait_until("the dead one's is gone", lambda: not dead.exists())
        assert writing.exists()
    with other.client() as second:
        assert recall(second) == contents


def test_a_server_that_is_away_costs_misses_and_a_front_serves_on(
    agents: list[AgentProcess], mounts: list[Client], behind: Path, tmp_path: Path
) -> None:
    one, other = agents
    front = {"path": str(tmp_path / "front"), "cap_bytes": 1 << 30, "writes": "back"}
    one.tell(document(2, spec(slots=32), tier2={**tier2(mounts[0].path), "front": front}))
    with one.client() as first, other.client() as second:
        contents = store(first, redundant=False)
        wait_until("all is behind", lambda: recall(second) == contents)
        for mount in mounts:
            mount.fault = errno.ETIMEDOUT
        assert recall(first) == contents
        later = store(first, 4, "later", redundant=False)
        assert recall(first, 4, "later") == later
        assert set(recall(second)) == {Miss.LOST}
        for mount in mounts:
            mount.fault = 0
        wait_until("what waited is behind", lambda: recall(second, 4, "later") == later)
        assert recall(second) == contents
