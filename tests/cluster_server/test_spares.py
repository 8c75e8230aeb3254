"""Managers that wait before it is known what for become what they are told, or nothing."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_server.processes.kernel import MARK, LinuxKernel, Order
from cluster_server.processes.spares import FAILURES_MAX, Spares
from tests.cluster_server.servers import server
from tests.live import wait_until

# Says what it sees of itself, and ends.
SEES = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
def main(arguments):
    if arguments == ["spare"]:
        from workload_manager import spare
        return spare.wait(main)
    os.umask(mask := os.umask(0))
    leads = os.getsid(0) == os.getpid()
    name = open("/proc/self/comm").read().strip()
    seen = {"name": name, "arguments": arguments, "folder": os.getcwd(), "variables": dict(os.environ),
        "leads": leads, "mask": mask, "input": sys.stdin.read(), "pid": os.getpid()}
    print(json.dumps(seen), flush=True)
    return 3
sys.exit(main(sys.argv[2:]))
"""
COMMAND = (sys.executable, "-c", SEES, str(Path(__file__).resolve().parents[2]))
ENVIRONMENT = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}


@pytest.fixture
def spares() -> Iterator[Spares]:
    made = Spares(COMMAND, ENVIRONMENT, 1)
    yield made
    made.close()


def started(kernel: LinuxKernel, folder: Path) -> dict[str, Any]:
    """What a process sees that is started there."""
    folder.mkdir()
    order = Order(folder, [*COMMAND, "run", "--folder", str(folder)], {**ENVIRONMENT, "A": "1"})
    process = kernel.start(order)
    assert not (folder / "begun").exists(), "it waits for being recorded"
    process.release()
    wait_until("it has ended", lambda: not kernel.is_running(process.identity), 30)
    assert kernel.exit_status(process.identity) == 3
    assert (folder / "begun").exists()
    seen: dict[str, Any] = json.loads((folder / "log").read_text())
    assert seen.pop("pid") == process.identity.pid
    return seen


def test_a_spare_becomes_what_any_other_process_is(spares: Spares, tmp_path: Path) -> None:
    spares.fill()
    [waiting] = spares._waiting
    seen = started(LinuxKernel(spares=spares), tmp_path / "one")
    assert waiting.args == [*COMMAND, "spare"]
    assert spares._waiting == [], "it was taken"
    assert seen["leads"]
    assert (seen["mask"], seen["input"]) == (0o077, "")
    assert seen["variables"] == {**ENVIRONMENT, "A": "1", MARK: str(tmp_path / "one")}
    ordinary = started(LinuxKernel(), tmp_path / "two")
    assert seen.pop("name") == "one"
    assert ordinary.pop("name").startswith("python")
    for of_shell in ("PWD", "OLDPWD", "SHLVL", "_"):
        ordinary["variables"].pop(of_shell, None)
    assert json.loads(json.dumps(ordinary).replace("/two", "/one")) == seen


def test_without_a_spare_one_is_started(spares: Spares, tmp_path: Path) -> None:
    """None is left, it has ended, or it is another command that is ordered."""
    kernel = LinuxKernel(spares=spares)
    started(kernel, tmp_path / "none")
    spares.fill()
    spares._waiting[0].kill()
    spares._waiting[0].wait()
    started(kernel, tmp_path / "ended")
    spares.fill()
    other = Order(tmp_path / "none", ["/bin/true"], ENVIRONMENT)
    kernel.start(other).release()
    assert len(spares._waiting) == 1


def test_what_can_not_be_told_is_started(spares: Spares, tmp_path: Path) -> None:
    """A variable that is no text, as a shell may have one."""
    spares.fill()
    folder = tmp_path / "odd"
    folder.mkdir()
    order = Order(folder, ["/bin/true"], {**ENVIRONMENT, "A": "\udc80"})
    LinuxKernel(spares=spares).start(order).release()
    order = Order(folder, COMMAND, {**ENVIRONMENT, "A": "\udc80"})
    started = LinuxKernel(spares=spares).start(order)
    assert len(spares._waiting) == 1
    started.abandon()


def test_who_could_not_be_recorded_is_ended(spares: Spares, tmp_path: Path) -> None:
    spares.fill()
    order = Order(tmp_path, COMMAND, ENVIRONMENT)
    waiting = LinuxKernel(spares=spares).start(order)
    waiting.abandon()
    assert not Path(f"/proc/{waiting.identity.pid}").exists(), "and collected"
    assert not (tmp_path / "begun").exists()


def test_a_log_that_is_no_file_is_refused_with_a_spare_as_without(
    spares: Spares, tmp_path: Path
) -> None:
    spares.fill()
    os.mkfifo(tmp_path / "log")
    for kernel in (LinuxKernel(spares=spares), LinuxKernel()):
        with pytest.raises(OSError, match="log"):
            kernel.start(Order(tmp_path, COMMAND, ENVIRONMENT))
    assert len(spares._waiting) == 1


def test_failures_long_ago_do_not_count(spares: Spares, tmp_path: Path) -> None:
    kernel = LinuxKernel(spares=spares)
    for number in range(FAILURES_MAX + 1):
        spares.fill()
        spares._waiting[0].kill()
        spares._waiting[0].wait()
        spares.fill()
        started(kernel, tmp_path / str(number))
    spares.fill()
    assert len(spares._waiting) == 1


def test_a_command_that_knows_no_spares_is_not_asked_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spares = Spares(["/bin/false"], ENVIRONMENT, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(FAILURES_MAX + 2):
            spares.fill()
            for one in spares._waiting:
                one.wait(60)
    [said] = [one.getMessage() for one in caplog.records]
    assert said.startswith("`/bin/false spare` ends by itself: ")
    spares.close()


@pytest.mark.slow
def test_a_spare_ends_with_its_server_however_that_ends(tmp_path: Path) -> None:
    with server(tmp_path, "--spares", "2") as running:

        def waiting() -> list[int]:
            processes = (path for path in Path("/proc").iterdir() if path.name.isdecimal())
            return [int(path.name) for path in processes if _parent(path) == running.pid]

        wait_until("both wait", lambda: len(waiting()) == 2, 30)
        first = waiting()
        running.kill()
        wait_until("both have ended", lambda: not any(map(_runs, first)), 30)
        running.start()
        wait_until("two others wait", lambda: len(waiting()) == 2, 30)
        second = waiting()
        assert running.terminate() == 0, running.log()
        assert not any(map(_runs, second))


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
