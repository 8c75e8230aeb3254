"""The supervisor with real processes, which behave or don't."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.environment import PROJECT
from console.stack import snapshot
from console.stack.core import Effect, Spec, State
from console.stack.core import Service as Watched
from console.stack.errors import StackError
from console.stack.logs import Logs
from console.stack.privileges import Identity, launcher
from console.stack.processes import Notifications
from console.stack.services import WEB_SOCKET, Service
from console.stack.supervisor import Supervisor
from tests.stack.sessions import is_running, members

PATIENCE_SECONDS = 60.0
STAND_IN = (sys.executable, "-m", "tests.stack.stand_in")


def stand_in(name: str, *behaviour: str, **spec: Any) -> Service:
    return Service(Spec(name, once="step" in behaviour, **spec), (*STAND_IN, *behaviour))


class Recorder:
    """Who looks on."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, State]] = []
        self.lines: list[tuple[str, str]] = []
        self.facts: list[dict[str, Any]] = []
        self.ups = 0

    def changed(self, service: Watched, last_lines: list[str]) -> None:  # noqa: ARG002
        self.changes.append((service.spec.name, service.state))

    def line(self, service: str, line: str) -> None:
        self.lines.append((service, line))

    def prepared(self, fact: dict[str, Any]) -> None:
        self.facts.append(fact)

    def up(self) -> None:
        self.ups += 1

    def when(self, name: str, state: State) -> int:
        return self.changes.index((name, state))


class Stack:
    """A running supervisor, and what a test wants to know of it."""

    def __init__(self, supervisor: Supervisor, recorder: Recorder) -> None:
        self.supervisor = supervisor
        self.recorder = recorder

    def pid(self, name: str) -> int:
        return self.supervisor.children[name].pid

    def state(self, name: str) -> State:
        return self.supervisor.core.services[name].state

    def reason(self, name: str) -> str:
        return self.supervisor.core.services[name].reason

    def restarts(self, name: str) -> int:
        return self.supervisor.core.services[name].restarts

    async def until_up(self) -> None:
        await until(lambda: self.supervisor.core.all_up and self.has_all_numbers())

    def has_all_numbers(self) -> bool:
        """A process may be quicker to say that it is ready than the supervisor to take it down."""
        ready = {
            name
            for name, service in self.supervisor.core.services.items()
            if service.state is State.READY
        }
        return ready <= self.supervisor.children.keys()

    async def until_back(self, name: str, restarts: int = 1) -> None:
        await until(
            lambda: (
                self.restarts(name) >= restarts
                and self.state(name) is State.READY
                and self.has_all_numbers()
            )
        )


def everything_in(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, *services: Service, web_socket: socket.socket | None = None
) -> AsyncIterator[Stack]:
    """A supervisor over `services`; at the end it is told to stop, and must leave nothing."""
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
    recorder = Recorder()
    logs = Logs(tmp_path / "logs")
    supervisor = Supervisor(
        list(services),
        environment=dict(os.environ),
        run_directory=tmp_path / "run",
        status_file=tmp_path / "status",
        logs=logs,
        watcher=recorder,
        web_socket=web_socket,
    )
    task = asyncio.create_task(supervisor.run())
    sessions: set[int] = set()
    await asyncio.sleep(0)
    try:
        yield Stack(supervisor, recorder)
        sessions = {child.pid for child in supervisor.children.values()}
    finally:
        if not supervisor.core.stopping:
            supervisor.stop()
        try:
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        finally:
            logs.close()
    # What was killed is gone as soon as the kernel gets to it.
    await until(lambda: not [pid for first in sessions for pid in members(first)])
    assert not list((tmp_path / "run").iterdir())


async def test_starts_in_order_and_stops_in_the_opposite_one(tmp_path: Path) -> None:
    async with running(
        tmp_path,
        stand_in("first"),
        stand_in("step", "step", after=("first",)),
        stand_in("last", after=("step",)),
    ) as stack:
        await stack.until_up()
        seen = stack.recorder
        assert seen.ups == 1
        assert seen.when("first", State.READY) < seen.when("step", State.STARTING)
        assert seen.when("step", State.DONE) < seen.when("last", State.STARTING)
    assert seen.when("last", State.STOPPING) < seen.when("first", State.STOPPING)
    assert seen.when("last", State.STOPPED) < seen.when("first", State.STOPPED)


async def test_what_is_killed_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web")) as stack:
        await stack.until_up()
        before = stack.pid("web")
        os.kill(before, signal.SIGKILL)
        await stack.until_back("web")
        assert stack.pid("web") != before
        assert stack.reason("web") == "killed by SIGKILL"


async def test_what_is_due_is_done_though_the_supervisor_does_not_look_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.stack.supervisor.TICK_SECONDS", 3600.0)
    monkeypatch.setattr("console.stack.core.STALL_SECONDS", 3600.0)
    async with running(tmp_path, stand_in("web", ready_seconds_max=3600.0)) as stack:
        await stack.until_up()
        os.kill(stack.pid("web"), signal.SIGKILL)
        await stack.until_back("web")


async def test_what_keeps_dying_is_tried_again_and_again(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web", "dies-at-once")) as stack:
        await until(lambda: stack.restarts("web") >= 3)
        assert stack.reason("web") == "exit code 3"
        assert ("web", "no reason to live") in stack.recorder.lines


async def test_a_command_that_does_not_exist_is_a_death_like_any_other(tmp_path: Path) -> None:
    missing = Service(Spec("web", attempts_max=2), (str(tmp_path / "nothing-here"),))
    with pytest.raises(StackError, match="No such file"):
        async with running(tmp_path, missing) as stack:
            await until(lambda: stack.supervisor.core.all_down and stack.supervisor.core.stopping)


async def test_what_can_not_be_tidied_up_before_it_is_a_death_like_any_other(tmp_path: Path) -> None:
    """Not a fault that ends all others."""
    faults = [StackError("the disk is full")]

    def tidy() -> None:
        if faults:
            raise faults.pop()

    async with running(tmp_path, replace(stand_in("web"), tidy=tidy)) as stack:
        await stack.until_back("web")
        assert ("web", "It can't be started: the disk is full") in stack.recorder.lines


async def test_a_process_that_hangs_is_killed_and_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web", watchdog_seconds=0.7)) as stack:
        await stack.until_up()
        os.kill(stack.pid("web"), signal.SIGSTOP)
        await stack.until_back("web")
        assert stack.reason("web") == "silent for 0.7 s"


@pytest.mark.slow
async def test_a_server_that_does_not_answer_is_killed_and_comes_back(tmp_path: Path) -> None:
    answers = [True]
    server = Service(
        Spec("server", watchdog_seconds=3), (*STAND_IN, "never-ready"), answers=lambda: answers[0]
    )
    async with running(tmp_path, server) as stack:
        await stack.until_up()
        answers[0] = False
        await until(lambda: stack.restarts("server") == 1)
        answers[0] = True
        await stack.until_back("server")
        assert stack.reason("server") == "silent for 3 s"


async def test_whoever_is_never_ready_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web", "never-ready", ready_seconds_max=0.5)) as stack:
        await until(lambda: stack.restarts("web") == 1)
        assert stack.reason("web") == "not ready within 0.5 s"


async def test_whoever_does_not_stop_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web", "ignores-stop", stop_seconds_max=60)) as stack:
        await stack.until_up()
        stack.supervisor.stop()
        await until(lambda: ("web", "told to stop") in stack.recorder.lines)
        stack.supervisor.core.services["web"].deadline = time.monotonic()  # its time is over
    assert stack.reason("web") == "did not stop within 60 s"


async def test_stopping_twice_does_not_wait(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web", "ignores-stop", stop_seconds_max=60)) as stack:
        await stack.until_up()
        stack.supervisor.stop()
        stack.supervisor.stop()
    assert stack.reason("web") == "stopped in a hurry"


async def test_stopping_at_once_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web"), stand_in("worker")):
        pass


async def test_children_die_with_their_parent_and_do_not_delay_its_return(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("worker", "leaves-child")) as stack:
        await stack.until_up()
        said = stack.recorder.lines  # that it is ready may be heard before
        await until(lambda: any(line.startswith("child") for _, line in said))
        [child] = [int(line.split()[1]) for _, line in said if line.startswith("child")]
        os.kill(stack.pid("worker"), signal.SIGKILL)
        await stack.until_back("worker")
        await until(lambda: not is_running(child))


async def test_a_disk_that_takes_no_notes_stops_nobody(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web")) as stack:
        await stack.until_up()
        (tmp_path / "run" / "web.json").unlink()
        (tmp_path / "run").rmdir()
        stack.supervisor.status_file = tmp_path / "nowhere" / "status"
        os.kill(stack.pid("web"), signal.SIGKILL)
        await stack.until_back("web")
        (tmp_path / "run").mkdir()


async def test_a_step_tells_us_and_no_log(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("prepare", "step")) as stack:
        await stack.until_up()
        assert stack.recorder.facts == [
            {"stage": "think", "seconds": 0.01},
            {"admin": {"username": "admin", "password": "never-in-a-log"}},
        ]
    written = everything_in(tmp_path)
    assert b"a word of warning" in written
    assert b"something plain" in written
    assert b"never-in-a-log" not in written


async def test_a_step_that_fails_ends_the_start_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(
        StackError, match=r"(?s)“prepare” can't start \(exit code 7\):\n.*a word of warning"
    ):
        async with running(
            tmp_path,
            stand_in("database"),
            stand_in("prepare", "step", "fails", after=("database",)),
            stand_in("web", after=("prepare",)),
        ) as stack:
            await until(lambda: stack.supervisor.core.stopping and stack.supervisor.core.all_down)


async def test_a_line_too_long_is_cut_and_the_next_one_is_heard(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web", "shouts")) as stack:
        await until(lambda: ("web", "and a last word") in stack.recorder.lines)
    longest = max(len(line) for _, line in stack.recorder.lines)
    assert 10_000 < longest <= 128 * 1024


async def test_connections_wait_while_the_server_is_started_again(tmp_path: Path) -> None:
    code = (
        "import socket, sys\n"
        "from telemetry.notify import notify\n"
        "listener = socket.socket(fileno=int(sys.argv[1]))\n"
        "notify('READY=1')\n"
        "while True:\n"
        "    connection, _ = listener.accept()\n"
        "    connection.sendall(b'here')\n"
        "    connection.close()\n"
    )
    web = Service(Spec("web"), (sys.executable, "-c", code, WEB_SOCKET), listens=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with running(tmp_path, web, web_socket=listener) as stack:
            await stack.until_up()
            os.kill(stack.pid("web"), signal.SIGKILL)
            await until(lambda: stack.state("web") is not State.READY or stack.restarts("web") > 0)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b"here"
            writer.close()
            await writer.wait_closed()
            assert stack.restarts("web") == 1


async def test_the_status_tells_what_is(tmp_path: Path) -> None:
    async with running(tmp_path, stand_in("web"), stand_in("worker", after=("web",))) as stack:
        await stack.until_up()
        os.kill(stack.pid("web"), signal.SIGKILL)
        await stack.until_back("web")
        rows = {row.name: row for row in snapshot.read(tmp_path / "status")}
        assert [(row.state, row.restarts) for row in rows.values()] == [("ready", 1), ("ready", 0)]
        assert (rows["web"].reason, rows["worker"].reason) == ("killed by SIGKILL", "")
        assert rows["web"].pid == stack.pid("web")
        assert abs(rows["web"].since - time.time()) < PATIENCE_SECONDS
        assert rows["web"].memory_bytes


async def test_whoever_is_started_by_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running(tmp_path, stand_in("web")) as stack:
            await stack.until_up()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(stack.pid("web"), signal.SIGKILL)
            await stack.until_back("web")
            assert not stack.supervisor.core.stopping
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_fault_of_our_own_ends_everything_and_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_fault(_now: float) -> list[Effect]:
        raise ZeroDivisionError

    async def goes_wrong() -> None:
        async with running(tmp_path, stand_in("web")) as stack:
            await stack.until_up()
            monkeypatch.setattr(stack.supervisor.core, "on_tick", at_fault)
            await until(lambda: not stack.supervisor.children)

    with pytest.raises(ZeroDivisionError):
        await goes_wrong()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
async def test_only_our_own_processes_are_heard(tmp_path: Path) -> None:
    heard: list[str] = []
    notifications = Notifications(tmp_path, "web", heard.append)
    code = "from telemetry.notify import notify; import sys; notify(sys.argv[1])"
    ours = [sys.executable, "-c", code]
    somebody = Identity(65_534, 65_534, "dac_read_search")
    environment = {**os.environ, "NOTIFY_SOCKET": notifications.address}
    for command in ([*launcher(identity=somebody), *ours, "WATCHDOG=1"], [*ours, "READY=1"]):
        process = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, env=environment)
        assert await process.wait() == 0
    await until(lambda: bool(heard))
    notifications.close()
    assert heard == ["READY=1"]
