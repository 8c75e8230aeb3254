"""One instance or job as it is on disk and in the kernel: looking at it, and doing one step. Nothing is
decided here; see `core`.

A keeper is used by one task at a time. Its methods block for as long as a disk takes; run them in a
thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from cluster_server.processes.core import Goal, Memory, Running, Seen, clamped
from cluster_server.processes.folder import Folder, ProcessIdentity
from cluster_server.processes.kernel import Kernel, Order


@dataclass(frozen=True, slots=True)
class Launch:
    """How its process is started."""

    command: Sequence[str]
    environment: Mapping[str, str]
    memory_bytes: int = 0
    cpu_millis: int = 0


class Keeper:
    """Raises OSError where the disk or the kernel refuses. What is on disk is then as it was, or as
    it was to be, and looking again says which."""

    def __init__(self, folder: Folder, kernel: Kernel, now: float) -> None:
        self.folder = folder
        self.memory = clamped(folder.memory(), now) if folder.exists() else Memory()
        self.process = _recorded(folder, now) if folder.exists() else None
        self.told: Goal | None = folder.goal() if folder.exists() else None
        self._kernel = kernel
        self._is_signalled = False
        self._exit_status: int | None = None
        self._is_empty = not folder.exists()  # nothing of it runs, so there is nobody who could start it

    def look(self, last_seen: float) -> Seen:
        """`last_seen`: when its manager has said something, if it has."""
        running = self._running()
        # While it runs, what belongs to it is its own affair.
        has_others = running is not Running.YES and self._has_others()
        if running is Running.ENDED and not has_others:
            self._collect()
        started_at = self.process.started_at if self.process else 0.0
        return Seen(
            has_folder=self.folder.exists(),
            process=running,
            has_others=has_others,
            told=self.told,
            is_signalled=self._is_signalled,
            exit_status=self._exit_status,
            started_at=started_at,
            last_seen=max(last_seen, started_at),
        )

    def start(self, launch: Launch, now: float) -> None:
        """Nothing of it may run. It is on disk before it begins."""
        order = Order(
            self.folder.path, launch.command, launch.environment, launch.memory_bytes, launch.cpu_millis
        )
        self._is_empty = False
        started = self._kernel.start(order)
        process = structs.replace(started.identity, started_at=now)
        try:
            self.folder.record(process)
        except BaseException:
            started.abandon()
            raise
        self.process, self._exit_status = process, None
        started.release()

    def tell(self, goal: Goal) -> None:
        self.folder.tell(goal)
        self.told = goal

    def terminate(self, now: float) -> None:
        if self.memory.terminated_at is None:
            self.remember(replace(self.memory, terminated_at=now))
        if self.process:
            self._kernel.terminate(self.process)
        self._is_signalled = True

    def kill(self) -> None:
        self._kernel.kill(self.folder.path, self.process)

    def settle(self, memory: Memory) -> None:
        """Its process has ended, and nothing else of it runs."""
        self.folder.settle(memory)
        self.memory, self.process = memory, None

    def forget(self) -> None:
        """Nothing of it runs."""
        self._kernel.forget(self.folder.path, self.process)
        self.folder.remove()
        self.process, self.told = None, None

    def remember(self, memory: Memory) -> None:
        self.folder.remember(memory)
        self.memory = memory

    def _has_others(self) -> bool:
        if not self._is_empty:
            self._is_empty = not self._kernel.others(self.folder.path, self.process)
        return not self._is_empty

    def _collect(self) -> None:
        """Last of all that belongs to it: until then nobody else gets its number."""
        if self.process and self._exit_status is None:
            self._exit_status = self._kernel.exit_status(self.process)

    def _running(self) -> Running:
        if self.process is None:
            return Running.NEVER
        return Running.YES if self._kernel.is_running(self.process) else Running.ENDED


def _recorded(folder: Folder, now: float) -> ProcessIdentity | None:
    """The clock of the server that recorded it may have been ahead of ours."""
    if (process := folder.process()) is None:
        return None
    return structs.replace(process, started_at=min(process.started_at, now))
