"""Numbers of processes are used again: whoever has one next is nobody's to kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cluster_server.processes.cgroups import Cgroups
from cluster_server.processes.core import Running
from cluster_server.processes.folder import Folder, ProcessIdentity
from cluster_server.processes.keeper import Keeper, Launch
from cluster_server.processes.kernel import LinuxKernel, Order, identity_of
from tests.live import wait_until

SLEEPS = ("/bin/sleep", "600")
# A manager with a child that has nothing of its environment, and works in the folder or elsewhere.
LEADS = "(cd {} && exec env -i /bin/sleep 600) & echo $! > child; wait"


def earlier(process: ProcessIdentity) -> ProcessIdentity:
    """One that had its number before."""
    return msgspec.structs.replace(process, started_ticks=process.started_ticks - 1000)


@contextlib.contextmanager
def stranger() -> Iterator[ProcessIdentity]:
    with subprocess.Popen(SLEEPS, start_new_session=True) as process:
        try:
            yield identity_of(process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def child_of(leader: int, folder: Path) -> Iterator[int]:
    """The child of a manager that `LEADS`."""
    child = folder / "child"
    wait_until("it has a child", lambda: child.exists() and child.read_text().strip())
    pid = int(child.read_text())
    try:
        wait_until("it sleeps", lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        yield pid
    finally:
        for one in (pid, leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_session_with_the_number_of_a_process_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    kernel = LinuxKernel()
    with stranger() as other:
        assert kernel.others(tmp_path, earlier(other)) == []
        kernel.kill(tmp_path, earlier(other))
        assert kernel.is_running(other)


def test_the_status_of_another_child_with_its_number_is_not_taken(tmp_path: Path) -> None:
    kernel = LinuxKernel()
    started = kernel.start(Order(tmp_path, ["/bin/sh", "-c", "exit 3"], dict(os.environ)))
    started.release()
    wait_until("it has ended", lambda: not kernel.is_running(started.identity))
    assert kernel.exit_status(earlier(started.identity)) is None
    assert kernel.exit_status(started.identity) == 3


@pytest.mark.parametrize(("place", "is_found"), [(".", True), ("/", False)])
def test_in_a_session_that_nobody_leads_only_what_works_in_the_folder_is_killed(
    tmp_path: Path, place: str, *, is_found: bool
) -> None:
    kernel = LinuxKernel()
    started = kernel.start(Order(tmp_path, ["/bin/sh", "-c", LEADS.format(place)], dict(os.environ)))
    started.release()
    with child_of(started.identity.pid, tmp_path) as child:
        assert kernel.others(tmp_path, started.identity) == [child]
        os.kill(started.identity.pid, signal.SIGKILL)
        wait_until("it has ended", lambda: not kernel.is_running(started.identity))
        assert kernel.others(tmp_path, started.identity) == [child], "its number is taken"
        assert kernel.exit_status(started.identity) == -signal.SIGKILL
        assert kernel.others(tmp_path, started.identity) == ([child] if is_found else [])
        kernel.kill(tmp_path, started.identity)
        if is_found:
            wait_until("it is killed", lambda: not runs(child))
        assert runs(child) is not is_found


def test_a_manager_is_collected_once_all_that_it_started_has_ended(tmp_path: Path) -> None:
    """Until then nobody else gets its number."""
    keeper = Keeper(Folder(tmp_path), LinuxKernel(), 0.0)
    keeper.start(Launch(["/bin/sh", "-c", LEADS.format("/")], dict(os.environ)), 0.0)
    assert keeper.process
    with child_of(keeper.process.pid, tmp_path) as child:
        os.kill(keeper.process.pid, signal.SIGKILL)
        wait_until("it has ended", lambda: keeper.look(0.0).process is Running.ENDED)
        seen = keeper.look(0.0)
        assert (seen.has_others, seen.exit_status) == (True, None)
        keeper.kill()
        wait_until("nothing runs", lambda: not keeper.look(0.0).has_others)
        assert not runs(child)
        assert keeper.look(0.0).exit_status == -signal.SIGKILL


def test_an_instance_and_a_job_of_one_name_have_control_groups_of_their_own(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    groups.mkdir()
    kernel, found = LinuxKernel(Cgroups(groups, frozenset())), set()
    for kind in ("instances", "jobs"):
        folder = tmp_path / kind / "x"
        folder.mkdir(parents=True)
        started = kernel.start(Order(folder, SLEEPS, {}))
        found.add(started.identity.group)
        started.abandon()
    assert found == {str(groups / "instances-x"), str(groups / "jobs-x")}
