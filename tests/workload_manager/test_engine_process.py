"""The processes of an engine: all of them are ended, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, TypeVar

import pytest
import uvloop

from tests.live import wait_until
from tests.workload_manager.managers import is_alive
from workload_manager.engine_process import MARK, STARTED, EngineProcess, kill_all
from workload_manager.engines.base import Launch
from workload_manager.listeners import listeners

T = TypeVar("T")

# An engine that dies, and leaves a process that has nothing of its environment.
LEAVES = "(cd {} && exec env -i /bin/sleep 600) & echo $! > child; sleep 0.3; exit 3"

# Writes its port to a file.
LISTENS = """
import os, socket, sys, time
with socket.create_server(("127.0.0.1", 0)) as server:
    with open(sys.argv[1] + ".part", "w") as file: file.write(str(server.getsockname()[1]))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(600)
"""


def as_a_manager(work: Coroutine[Any, Any, T]) -> T:
    """On its event loop: others say that a process has ended once nobody has its output open."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, 60))


@contextlib.contextmanager
def process(*command: str, folder: Path) -> Iterator[int]:
    """In a session of its own, without an engine's environment."""
    started = subprocess.Popen(command, cwd=folder, start_new_session=True)
    with started:
        try:
            yield started.pid
        finally:
            started.kill()


@contextlib.contextmanager
def child_of(folder: Path) -> Iterator[int]:
    child = folder / "child"
    wait_until("it has a child", lambda: child.exists() and child.read_text().strip())
    pid = int(child.read_text())
    wait_until("it sleeps", lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def record(folder: Path, session: int, **more: Any) -> None:
    """As a manager has that started an engine before."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (folder / STARTED).write_text(json.dumps({"session": session, "boot": boot, **more}))


def engines_of(folder: Path) -> list[str]:
    """Processes with this mark in their environment."""
    mark, found = f"{MARK}={folder}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes():
                found.append(environment.parent.name)
    return found


def started_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


async def test_it_is_recorded_when_its_engine_was_started(tmp_path: Path) -> None:
    engine = await EngineProcess.start(Launch(("/bin/sleep", "600"), ""), tmp_path)
    ticks = started_ticks(engine.pid)
    engine.end(kill=True)
    assert await engine.ended() == "The engine was killed."
    recorded = json.loads((tmp_path / STARTED).read_text())
    assert (recorded["session"], recorded["started_ticks"]) == (engine.pid, ticks)


async def test_no_line_is_taken_for_the_cause_of_an_engine_that_could_not_say_one(
    tmp_path: Path,
) -> None:
    says = "echo 'ERROR: one request was refused'"
    killed = await EngineProcess.start(Launch(("/bin/sh", "-c", f"{says}; kill -9 $$"), ""), tmp_path)
    assert await killed.ended() == (
        "The engine was ended by SIGKILL, as by the kernel when there is too little memory."
    )
    ended = await EngineProcess.start(Launch(("/bin/sh", "-c", f"{says}; kill -6 $$"), ""), tmp_path)
    assert "ended by SIGABRT: " in await ended.ended()


def port_in(file: Path) -> int:
    wait_until("it listens", file.exists)
    return int(file.read_text())


@contextlib.asynccontextmanager
async def engine_of(folder: Path, *command: str) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.start(Launch(command, ""), folder)
    try:
        yield engine
    finally:
        engine.end(kill=True)
        await engine.ended()


async def test_who_was_there_before_an_engine_is_a_stranger_at_its_port(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "/bin/sleep", "600") as engine:
        with socket.create_server(("127.0.0.1", 0)) as ours:
            port = ours.getsockname()[1]
            said = engine.stranger_at(port)
        assert said.startswith(f"Port {port} is answered by process {os.getpid()} (")
        assert engine.stranger_at(port) == "", "nobody is known to listen there"


async def test_an_engine_in_another_session_and_environment_is_no_stranger(tmp_path: Path) -> None:
    """As sudo starts it, in a process of ours, or a daemon of containers, in one of its own."""
    listens = ("/usr/bin/env", "-i", sys.executable, "-S", "-c", LISTENS)
    inner = " ".join(map(shlex.quote, (*listens, str(tmp_path / "port"))))
    async with engine_of(tmp_path, "/bin/sh", "-c", f"cd /; setsid --wait {inner}; exit") as engine:
        port = port_in(tmp_path / "port")
        said = engine.stranger_at(port)
        for child in listeners(port):
            os.kill(child, signal.SIGKILL)  # nobody else knows that it was the engine's
        assert said == ""
    async with engine_of(tmp_path, "/bin/sleep", "600") as engine:
        with process(*listens, str(tmp_path / "daemon"), folder=Path("/")):
            assert engine.stranger_at(port_in(tmp_path / "daemon")) == ""


async def test_an_engine_of_another_instance_is_a_stranger(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    listens = (sys.executable, "-S", "-c", LISTENS, str(tmp_path / "port"))
    async with (
        engine_of(tmp_path, "/bin/sleep", "600") as engine,
        engine_of(tmp_path / "other", *listens) as other,
    ):
        assert f"by process {other.pid} (" in engine.stranger_at(port_in(tmp_path / "port"))


async def test_an_engine_whose_start_can_not_be_recorded_does_not_run(tmp_path: Path) -> None:
    (tmp_path / STARTED).mkdir()
    with pytest.raises(IsADirectoryError):
        await EngineProcess.start(Launch(("/bin/sleep", "600"), ""), tmp_path)
    assert not engines_of(tmp_path)


async def test_a_session_with_the_number_of_an_engine_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    with process("/bin/sleep", "600", folder=tmp_path) as other:
        record(tmp_path, other, started_ticks=started_ticks(other) - 1000)
        await kill_all(tmp_path)
        assert is_alive(other)
        record(tmp_path, other, started_ticks=started_ticks(other))
        await kill_all(tmp_path)
        assert not is_alive(other)


async def test_what_an_earlier_version_recorded_is_believed_of_what_works_in_the_folder(
    tmp_path: Path,
) -> None:
    """It recorded no start time."""
    with (
        process("/bin/sleep", "600", folder=Path("/")) as other,
        process("/bin/sleep", "600", folder=tmp_path) as ours,
    ):
        for one in (other, ours):
            record(tmp_path, one)
            await kill_all(tmp_path)
        assert (is_alive(other), is_alive(ours)) == (True, False)


@pytest.mark.parametrize("place", [".", "/"])
def test_what_a_dead_engine_leaves_is_killed_by_its_manager(tmp_path: Path, place: str) -> None:
    """Who was there when it died knows whose the session was."""

    async def run() -> None:
        launch = Launch(("/bin/sh", "-c", LEAVES.format(place)), "")
        engine = await EngineProcess.start(launch, tmp_path)
        with child_of(tmp_path) as child:
            assert is_alive(child)
            assert await engine.ended() == "The engine ended with status 3."
            assert not is_alive(child)

    as_a_manager(run())


@pytest.mark.parametrize(("place", "is_known"), [(".", True), ("/", False)])
def test_the_next_manager_kills_of_it_what_works_in_the_folder(
    tmp_path: Path, place: str, *, is_known: bool
) -> None:
    with process("/bin/sh", "-c", LEAVES.format(place), folder=tmp_path) as leader:
        record(tmp_path, leader, started_ticks=started_ticks(leader))
        with child_of(tmp_path) as child:
            wait_until("its engine has ended", lambda: not is_alive(leader))
            os.waitpid(leader, 0)
            as_a_manager(kill_all(tmp_path))
            assert is_alive(child) is not is_known


def test_an_engine_is_read_on_where_its_log_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more lines than a pipe has room for, until there is room on the disk again."""
    says = """
import os, time
for number in range(5000): print("lost", number, "x" * 50, flush=True)
while not os.path.exists("go"): time.sleep(0.01)
print("after that", flush=True)
"""

    async def run(log: TextIO) -> None:
        engine = await EngineProcess.start(Launch((sys.executable, "-S", "-c", says), ""), tmp_path)
        ending = asyncio.create_task(engine.ended())
        try:
            async with asyncio.timeout(60):
                while engine._log._lost < 5000:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.02)
        except TimeoutError:
            engine.end(kill=True)
            raise
        monkeypatch.setattr(sys, "stderr", log)
        (tmp_path / "go").touch()
        assert await ending == "The engine ended with status 0: after that."

    with Path("/dev/full").open("w") as full, (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", full)
        as_a_manager(run(log))
        monkeypatch.undo()
    lines = (tmp_path / "log").read_text().split("\n")
    said = "5000 lines of the engine are lost: the log could not be written."
    assert lines == ["", said, "after that", ""]


async def test_the_group_of_an_engine_that_has_ended_is_not_signalled(tmp_path: Path) -> None:
    """Another one may have its number."""
    with process("/bin/sleep", "600", folder=Path("/")) as other:
        ended: Any = SimpleNamespace(pid=other, returncode=1)
        EngineProcess(ended, tmp_path).end(kill=True)
        await asyncio.sleep(0.05)
        assert is_alive(other)
