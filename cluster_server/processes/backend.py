"""The backend `processes`. On disk, in its state directory:

workloads/NAME.pb       what is desired of a workload, secrets included: one file, so that it changes
                        as a whole
instances/NAME/         see `folder`
jobs/NAME/
shared/                 of all processes: weights, artifacts, state of drivers
life                    how often the server was started
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from cluster_server.processes.core import Limits
from cluster_server.processes.folder import Folder, sweep
from cluster_server.processes.instance import InstanceWorker
from cluster_server.processes.jobs import Jobs
from cluster_server.processes.keeper import Keeper
from cluster_server.processes.kernel import Kernel, LinuxKernel
from cluster_server.processes.spares import Spares
from cluster_server.processes.surroundings import Surroundings
from cluster_server.processes.worker import as_a_whole, in_thread, rotate
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.publisher import Publisher
from cluster_server.workers_backend import WorkersBackend, check_change, is_newer
from kvss_agent.process.durable_file import remove_drafts, sync_directory, write_durably

log = logging.getLogger(__name__)

# -P: what lies in a folder that an engine can write to is nothing to import.
COMMAND: Final[tuple[str, ...]] = (sys.executable, "-P", "-m", "workload_manager")
TIDY_SECONDS: Final = 5.0
BEAT_SECONDS: Final = 1.0
STOOD_STILL_SECONDS: Final = 5.0  # between two beats: the server was stopped, or its machine was
LEFT_DRIVERS_SECONDS: Final = 60.0
# Of the server, and not of what it starts.
NOT_INHERITED: Final = (
    *("NOTIFY_SOCKET", "NOTIFY_FILE", "WATCHDOG_USEC", "WATCHDOG_PID"),
    *("LISTEN_FDS", "LISTEN_PID"),
)
PREFIX: Final = "CLUSTER_SERVER_"
PACKAGES: Final = Path(__file__).resolve().parent.parent.parent  # where this package lies


@dataclass(frozen=True)
class ProcessOptions:
    state_dir: Path
    command: Sequence[str] = COMMAND
    environment: Mapping[str, str] = field(default_factory=lambda: inherited(os.environ))
    host: str = field(default_factory=socket.gethostname)
    jobs_at_once: int = 4
    jobs_kept: int = 200
    limits: Limits = field(default_factory=Limits)


class ProcessBackend(WorkersBackend[pb.ApplyRequest, InstanceWorker, Jobs]):
    """See `Backend`."""

    def __init__(
        self, options: ProcessOptions, kernel: Kernel | None = None, spares: Spares | None = None
    ) -> None:
        super().__init__()
        state = options.state_dir
        self._workloads = state / "workloads"
        self._instances = state / "instances"
        self._state_dir = state
        self._around = Surroundings(
            kernel or LinuxKernel(),
            options.command,
            options.environment,
            state / "shared",
            options.host,
            options.limits,
        )
        self._jobs = Jobs(state / "jobs", self._around, options.jobs_at_once, options.jobs_kept)
        self._publisher = Publisher(0, self._all, self.workload)
        self._chores: list[asyncio.Task[None]] = []
        self._spares = spares
        self._has_no_spares = False
        self._tidier: subprocess.Popen[bytes] | None = None
        self._tidy_at = 0.0

    async def start(self) -> None:
        for folder in (self._state_dir, self._workloads, self._instances, self._around.shared):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        life = _next_life(self._state_dir / "life")
        self._publisher = Publisher(life, self._all, self.workload)
        sweep(self._instances)
        remove_drafts(self._workloads)
        for path in sorted(self._workloads.glob("*.pb")):
            request = _read(path)
            self._desired[request.workload] = request
            for instance in request.instances:
                self._new_worker(request.workload, instance.name, instance)
        for path in sorted(self._instances.iterdir()):
            if path.name not in self._workers:
                self._new_worker(Folder(path).about().workload, path.name, None)
        for worker in list(self._workers.values()):
            worker.begin()
        await self._jobs.start()
        await self._adopted()
        self._publisher.start()
        self._chores = [asyncio.create_task(self._tidy()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        await self._publisher.stop()
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        if self._tidier:
            await asyncio.to_thread(_end, self._tidier)
        if self._spares:
            await asyncio.to_thread(self._spares.close)
        await asyncio.gather(*(worker.let_go() for worker in list(self._workers.values())))
        await self._jobs.stop()

    async def apply(self, request: pb.ApplyRequest) -> pb.Workload:
        return await as_a_whole(self._apply(request))

    async def _apply(self, request: pb.ApplyRequest) -> pb.Workload:
        async with self._changing:
            asked = _in_order(request)
            current = self._desired.get(asked.workload)
            if current and not is_newer(
                asked.workload, asked, current, is_same=asked.instances == current.instances
            ):
                return self.workload(asked.workload)
            self._check(asked, current)
            self._check_open()
            raw = asked.SerializeToString(deterministic=True)
            await in_thread(write_durably, self._workloads / f"{asked.workload}.pb", raw)
            self._take(asked)
            return self.workload(asked.workload)

    async def delete(self, workload: str) -> None:
        await as_a_whole(self._delete(workload))

    async def _delete(self, workload: str) -> None:
        async with self._changing:
            if workload not in self._desired:
                self.workload(workload)  # or NotFound
                return
            await in_thread(_unlink, self._workloads / f"{workload}.pb")
            del self._desired[workload]
            for worker in list(self._of_workload.get(workload, {}).values()):
                worker.want(None)
            self._publisher.changed(workload)
            self._drop(workload)

    def _check(self, asked: pb.ApplyRequest, current: pb.ApplyRequest | None) -> None:
        """Raises Conflict, or Exhausted."""
        known = {one.name: one for one in current.instances} if current else {}
        for one in asked.instances:
            if before := known.get(one.name):
                _check_change(before, one)
        self._check_names((one.name for one in asked.instances), known)

    def _logs(self, worker: InstanceWorker, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        return worker.log.stream(tail_lines, follow=follow, has_ended=lambda: worker.has_ended)

    def _take(self, asked: pb.ApplyRequest) -> None:
        """It is on disk. From here on nothing fails."""
        self._desired[asked.workload] = asked
        wanted = {one.name: one for one in asked.instances}
        for name, worker in list(self._of_workload.get(asked.workload, {}).items()):
            if name not in wanted:
                worker.want(None)
            elif worker.wanted != wanted[name]:
                worker.want(wanted[name])
        for name, instance in wanted.items():
            if name not in self._workers:
                self._new_worker(asked.workload, name, instance).begin()
        self._publisher.changed(asked.workload)

    def _new_worker(self, workload: str, name: str, wanted: pb.Instance | None) -> InstanceWorker:
        keeper = Keeper(Folder(self._instances / name), self._around.kernel, self._around.clock.now())
        worker = InstanceWorker(
            workload, name, wanted, keeper, self._around, self._on_change, self._on_gone
        )
        self._add(worker)
        return worker

    async def _beat(self) -> None:
        """Of a server that stood still no manager has been silent, whatever the time is."""
        clock = self._around.clock
        at = clock.now()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            before, at = at, clock.now()
            if at - before > STOOD_STILL_SECONDS:
                log.warning("The server stood still for %.0f s", at - before)
                for worker in self._workers.values():
                    worker.give_time()

    async def _tidy(self) -> None:
        while True:
            await in_thread(self._tidy_once, list(self._workers.values()))
            await asyncio.sleep(TIDY_SECONDS)

    def _tidy_once(self, workers: Iterable[InstanceWorker]) -> None:
        """In a thread. Spares are started here, and not when one is taken: what has begun goes first."""
        if self._spares:
            try:
                self._spares.fill()
                self._has_no_spares = False
            except OSError as error:
                if not self._has_no_spares:
                    log.warning("No manager can be kept as a spare: %s", error)
                self._has_no_spares = True
        for worker in workers:
            if worker.keeper.folder.exists():
                rotate(worker)
        self._delete_left_drivers()
        self._jobs.rotate()

    def _delete_left_drivers(self) -> None:
        """Managers do so, too; but the last one on this machine may have ended."""
        if self._tidier is not None and self._tidier.poll() is None:
            return
        drivers = self._around.shared / "drivers"
        now = self._around.clock.now()
        if now < self._tidy_at or not any(drivers.glob("*/token")):
            return
        self._tidy_at = now + LEFT_DRIVERS_SECONDS
        try:
            self._tidier = subprocess.Popen(
                [*self._around.command, "tidy"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=self._around.environment_of_processes(),
                start_new_session=True,
            )
        except OSError as error:
            log.warning("What drivers have left is not deleted: %s", error)


def _end(tidier: subprocess.Popen[bytes]) -> None:
    """What it has not done yet the next one does."""
    tidier.kill()
    tidier.wait()


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What processes get of the environment of the server. In a checkout they find its packages, which
    are installed nowhere, in folders of their own too."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in NOT_INHERITED and not name.startswith(PREFIX)
    }
    if not PACKAGES.is_relative_to(sys.prefix):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGES), kept.get("PYTHONPATH")]))
    return kept


def _check_change(before: pb.Instance, after: pb.Instance) -> None:
    same = pb.Instance()
    same.CopyFrom(after)
    same.goal, same.grace_seconds = before.goal, before.grace_seconds
    leaves_drain = before.goal == pb.DRAIN != after.goal
    check_change(after.name, is_same=same == before, leaves_drain=leaves_drain)


def _in_order(request: pb.ApplyRequest) -> pb.ApplyRequest:
    instances = sorted(request.instances, key=lambda one: one.name)
    return pb.ApplyRequest(workload=request.workload, generation=request.generation, instances=instances)


def _read(path: Path) -> pb.ApplyRequest:
    """Raises OSError."""
    try:
        request: pb.ApplyRequest = pb.ApplyRequest.FromString(path.read_bytes())
    except DecodeError as error:
        raise OSError(f"{path} is damaged: {error}") from None
    return request


def _next_life(path: Path) -> int:
    try:
        before = int(path.read_text())
    except FileNotFoundError:
        before = 0
    except ValueError as error:
        raise OSError(f"{path} is damaged: {error}") from None
    write_durably(path, str(before + 1).encode())
    return before + 1


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync_directory(path.parent)
