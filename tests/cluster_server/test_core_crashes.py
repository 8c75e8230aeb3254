"""Instances in a machine that crashes between any two moves: never two managers, and never an orphan.

Core, keeper and folder are the real ones, on a real disk. Processes are simulated, so that a server
can be killed before and after each call to the kernel and each write."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster_server.processes.core import Goal, Limits, Running, Seen, Step, next_for_instance, settled
from cluster_server.processes.folder import About, Folder, ProcessIdentity, sweep
from cluster_server.processes.keeper import Keeper, Launch
from cluster_server.processes.kernel import Order

GRACE_SECONDS = 10.0
STEPS_MAX = 60


class Killed(BaseException):
    """The server, by signal 9."""


@dataclass
class Process:
    pid: int
    is_manager: bool
    is_waiting: bool = False  # the shell, which nobody has released
    is_deaf: bool = False
    status: int | None = None


@dataclass
class Machine:
    """Simulated processes of one instance. `dies_after`: how many moves the server still does."""

    processes: list[Process] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    pids: int = 0
    dies_after: int | None = None

    def move(self) -> None:
        if self.dies_after is not None:
            if self.dies_after == 0:
                raise Killed
            self.dies_after -= 1

    @property
    def managers(self) -> list[Process]:
        return [one for one in self.processes if one.is_manager and not one.is_waiting]

    def end(self, process: Process, status: int) -> None:
        if process in self.processes:
            self.processes.remove(process)
            self.statuses[process.pid] = status

    # Of `Kernel`

    def start(self, _order: Order) -> Started:
        self.move()
        assert not self.processes, "started beside others"
        self.pids += 1
        process = Process(self.pids, is_manager=True, is_waiting=True)
        self.processes.append(process)
        self.move()
        return Started(self, process)

    def is_running(self, process: ProcessIdentity) -> bool:
        return any(one.pid == process.pid for one in self.processes)

    def exit_status(self, process: ProcessIdentity) -> int | None:
        return self.statuses.pop(process.pid, None)

    def others(self, _folder: Path, process: ProcessIdentity | None) -> list[int]:
        return [one.pid for one in self.processes if not process or one.pid != process.pid]

    def terminate(self, process: ProcessIdentity) -> None:
        self.move()
        for one in self.managers:
            if one.pid == process.pid and not one.is_deaf:
                self.end(one, 0)
        self.move()

    def kill(self, _folder: Path, _process: ProcessIdentity | None) -> None:
        for one in sorted(self.processes, key=lambda one: one.is_manager):
            self.move()
            self.end(one, -9)

    def forget(self, _folder: Path, _process: ProcessIdentity | None) -> None:
        self.move()


@dataclass
class Started:
    machine: Machine
    process: Process

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.process.pid, self.process.pid, "boot")

    def release(self) -> None:
        self.machine.move()
        self.process.is_waiting = False
        self.machine.move()

    def abandon(self) -> None:
        self.machine.end(self.process, -9)


@contextmanager
def writes_that_crash(machine: Machine) -> Iterator[None]:
    """A server may die before and after each write."""
    durable = Folder.write

    def write(folder: Folder, name: str, raw: bytes) -> None:
        machine.move()
        durable(folder, name, raw)
        machine.move()

    with patch.object(Folder, "write", write):
        yield


class Crashes(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.machine = Machine()
        self.now = 1000.0
        self.wanted: Goal | None = Goal.RUN
        self.has_drained = False
        self.keeper: Keeper | None = None

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    @rule(steps=st.integers(1, 6), dies_after=st.none() | st.integers(0, 12))
    def serve(self, steps: int, dies_after: int | None) -> None:
        self.machine.dies_after = dies_after
        try:
            with writes_that_crash(self.machine):
                for _ in range(steps):
                    self._step()
        except Killed:
            self._lose_server()
        self.machine.dies_after = None

    @rule()
    def restart_server(self) -> None:
        self._lose_server()

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: bool(self.machine.managers))
    @rule(status=st.sampled_from([0, 1, -9]), leaves=st.booleans())
    def manager_ends(self, status: int, *, leaves: bool) -> None:
        self.machine.end(self.machine.managers[0], status)
        if not leaves:
            self.machine.processes.clear()

    @precondition(lambda self: bool(self.machine.managers))
    @rule(is_deaf=st.booleans())
    def manager_starts_engine(self, *, is_deaf: bool) -> None:
        self.machine.managers[0].is_deaf = is_deaf
        self.machine.pids += 1
        self.machine.processes.append(Process(self.machine.pids, is_manager=False))

    @precondition(lambda self: self.wanted is not None)
    @rule(goal=st.sampled_from([*Goal, None]))
    def want(self, goal: Goal | None) -> None:
        if self.wanted is not Goal.DRAIN or goal is None:
            self.wanted = goal

    @invariant()
    def there_are_never_two(self) -> None:
        if hasattr(self, "machine"):
            assert len([one for one in self.machine.processes if one.is_manager]) <= 1

    @rule()
    def in_the_end(self) -> None:
        """Left alone, it becomes what is wanted."""
        for _ in range(STEPS_MAX):
            if self._step() is Step.WAIT:
                self.now += 100.0
        if self.wanted is None:
            assert self.machine.processes == []
            assert not (self.directory / "one").exists()
        elif self.wanted is Goal.DRAIN:
            for one in list(self.machine.managers):
                self.machine.end(one, 0)
            for _ in range(STEPS_MAX):
                self._step()
            assert self.machine.processes == []
        else:
            is_over = self.keeper is not None and self.keeper.memory.is_over
            assert len(self.machine.managers) == (0 if is_over else 1)
            assert is_over or (self.directory / "one" / "goal").read_text() == self.wanted

    def _step(self) -> Step:
        if self.keeper is None:
            sweep(self.directory)
            self.keeper = Keeper(Folder(self.directory / "one"), self.machine, self.now)
        keeper = self.keeper
        seen = keeper.look(self.now)  # which is never silent
        step = next_for_instance(
            self.wanted, GRACE_SECONDS, seen, keeper.memory, self.now, Limits()
        ).step
        self._do(keeper, step, seen)
        return step

    def _do(self, keeper: Keeper, step: Step, seen: Seen) -> None:
        goal = self.wanted
        deeds: dict[Step, Callable[[], None]] = {
            Step.MAKE: lambda: keeper.folder.make(About("w"), b"{}", {"key": b"1"}),
            Step.START: lambda: keeper.start(Launch(["manager"], {}), self.now),
            Step.TERMINATE: lambda: keeper.terminate(self.now),
            Step.KILL: keeper.kill,
            Step.FORGET: keeper.forget,
            Step.WAIT: lambda: None,
        }
        if goal is not None:
            deeds[Step.TELL] = lambda: keeper.tell(goal)
            deeds[Step.SETTLE] = lambda: keeper.settle(settled(goal, seen, keeper.memory, self.now))
        if step is Step.FORGET:
            assert not self.machine.processes, "forgotten while it runs"
        if step is Step.START:
            assert seen.process is Running.NEVER
        deeds[step]()

    def _lose_server(self) -> None:
        """Its memory is gone, and the shells that it has not released read the end of their input."""
        self.keeper = None
        self.machine.statuses.clear()
        for one in [one for one in self.machine.processes if one.is_waiting]:
            self.machine.processes.remove(one)


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
