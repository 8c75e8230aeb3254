"""What a backend runs on, as tests see it. A backend that is to be held to the suite gets a world
here."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from cluster_server.backend import Backend
from cluster_server.processes import cgroups
from cluster_server.processes.backend import ProcessBackend, ProcessOptions
from cluster_server.processes.core import Limits
from cluster_server.processes.instance import InstanceWorker
from cluster_server.processes.kernel import MARK, LinuxKernel
from cluster_server.processes.spares import Spares
from cluster_server.proto import cluster_pb2 as pb
from tests.cluster_server.requests import FAKE_MANAGER

SECONDS_MAX = 60.0


class World(ABC):
    """Machines, with one server at a time."""

    backend: Backend
    seconds_max = SECONDS_MAX

    @abstractmethod
    async def open(self) -> None:
        """Begin with a fresh server on machines where nothing runs."""

    @abstractmethod
    async def restart(self) -> None:
        """Another server, on the same machines."""

    @abstractmethod
    def processes(self, name: str) -> list[int]:
        """What runs of an instance or job."""

    @abstractmethod
    def starts(self, name: str) -> int:
        """How often it was started."""

    @abstractmethod
    def write(self, name: str, file: str) -> None:
        """An empty file in its folder, which the fake manager waits for."""

    @abstractmethod
    def kill_manager(self, name: str) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """End all that runs."""

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until it holds."""
        try:
            async with asyncio.timeout(self.seconds_max):
                while not holds():  # noqa: ASYNC110 - of processes, which tell nobody
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not within {self.seconds_max:g} s: {what}") from None

    def status(self, workload: str, name: str) -> pb.InstanceStatus | None:
        found = [one for one in self.backend.workload(workload).instances if one.name == name]
        return found[0] if found else None

    async def until_state(self, workload: str, name: str, state: pb.State) -> pb.InstanceStatus:
        def holds() -> bool:
            status = self.status(workload, name)
            return status is not None and status.state == state

        await self.until(f"{name} is {pb.State.Name(state)}", holds)
        status = self.status(workload, name)
        assert status is not None
        return status


class Processes(World):
    def __init__(self, state_dir: Path, *, has_cgroups: bool, spares: int) -> None:
        self._groups = cgroups.find(state_dir) if has_cgroups else None
        self._options = ProcessOptions(
            state_dir, FAKE_MANAGER, host="machine", jobs_at_once=2, jobs_kept=5, limits=Limits()
        )
        self._spares = spares

    async def open(self) -> None:
        spares = Spares(FAKE_MANAGER, self._options.environment, self._spares)
        self.backend = ProcessBackend(self._options, LinuxKernel(self._groups, spares), spares)
        await self.backend.start()

    async def restart(self) -> None:
        await self.backend.stop()
        await self.open()

    def worker(self, name: str) -> InstanceWorker:
        assert isinstance(self.backend, ProcessBackend)
        return self.backend._workers[name]

    def folder(self, name: str) -> Path:
        state_dir = self._options.state_dir
        instance = state_dir / "instances" / name
        return instance if instance.exists() else state_dir / "jobs" / name

    def processes(self, name: str) -> list[int]:
        """One that was a spare has its folder in its environment, but not where the kernel shows it."""
        folders = {self._options.state_dir / kind / name for kind in ("instances", "jobs")}
        marks = {f"{MARK}={folder}".encode() for folder in folders}
        return [pid for pid in _alive() if marks & _environment(pid) or _works_in(pid) in folders]

    def starts(self, name: str) -> int:
        try:
            return len((self.folder(name) / "started").read_text().splitlines())
        except FileNotFoundError:
            return 0

    def write(self, name: str, file: str) -> None:
        (self.folder(name) / file).touch()

    def kill_manager(self, name: str) -> None:
        os.kill(int((self.folder(name) / "started").read_text().splitlines()[-1]), 9)

    async def close(self) -> None:
        for workload in self.backend.workloads()[0]:
            if workload.generation:
                await self.backend.delete(workload.name)
        await self.backend.end_all(0.2)
        await self.backend.stop()
        if self._groups:
            cgroups.remove(self._groups.folder)


def _alive() -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found.append(int(path.name))
    return found


def _works_in(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
