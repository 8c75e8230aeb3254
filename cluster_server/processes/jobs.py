"""The jobs of a process backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Final

from cluster_server.backend import Exhausted, Exists, NotFound
from cluster_server.processes.folder import Folder, sweep
from cluster_server.processes.job import CANCELLED_FILE, JobWorker, about_job, is_same
from cluster_server.processes.keeper import Keeper
from cluster_server.processes.surroundings import Surroundings
from cluster_server.processes.worker import as_a_whole, in_thread, rotate
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.turns import may_run

log = logging.getLogger(__name__)

WAITING_MAX: Final = 1000  # jobs that have not ended


class Jobs:
    """`at_once`: how many run, one of a workload; the others wait for their turn. `kept`: how many that
    have ended."""

    def __init__(self, folder: Path, around: Surroundings, at_once: int, kept: int) -> None:
        self._folder = folder
        self._around = around
        self._at_once = at_once
        self._kept = kept
        self._workers: dict[str, JobWorker] = {}
        self._changed = asyncio.Event()
        self._submitting = asyncio.Lock()  # and forgetting: each changes what there is on disk
        self._forgetting: asyncio.Task[None] | None = None
        self._has_ended = asyncio.Event()

    async def start(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        sweep(self._folder)
        found = [self._worker(Folder(path)) for path in self._folder.iterdir()]
        for worker in sorted(found, key=lambda one: one.about.submitted_at):
            self._workers[worker.name] = worker
        for worker in list(self._workers.values()):
            worker.begin()
        self._forgetting = asyncio.create_task(self._forget_old())

    async def stop(self) -> None:
        if self._forgetting:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        await asyncio.gather(*(worker.let_go() for worker in self._workers.values()))

    async def submit(self, spec: pb.JobSpec) -> pb.Job:
        return await as_a_whole(self._submit(spec))

    async def _submit(self, spec: pb.JobSpec) -> pb.Job:
        async with self._submitting:
            if known := self._workers.get(spec.name):
                if is_same(spec, known.about):
                    return known.job
                raise _other(spec)
            if len(self._running()) >= WAITING_MAX:
                raise Exhausted(f"There are {WAITING_MAX} jobs that have not ended. Try again later.")
            folder = Folder(self._folder / spec.name)
            about = about_job(spec, self._around.clock.now())
            await in_thread(folder.make, about, spec.spec, dict(spec.secrets))
            worker = self._workers[spec.name] = self._worker(folder)
        worker.begin()
        if not is_same(spec, worker.about):  # its folder was there, after an error of the disk
            raise _other(spec)
        return worker.job

    async def cancel(self, name: str) -> pb.Job:
        worker = self._of(name)
        if not worker.has_ended and not worker.is_cancelled:
            await as_a_whole(self._cancel(worker))
        return worker.job

    @staticmethod
    async def _cancel(worker: JobWorker) -> None:
        await in_thread(worker.keeper.folder.write, CANCELLED_FILE, b"")
        worker.is_cancelled = True
        worker.wake()

    async def cancel_all(self) -> None:
        """And wait until all have ended."""
        for worker in self._running():
            await self.cancel(worker.name)
        while self._running():
            await self._changed.wait()

    def job(self, name: str) -> pb.Job:
        return self._of(name).job

    def all(self) -> list[pb.Job]:
        return [worker.job for worker in self._workers.values()]

    def watch(self, name: str) -> AsyncGenerator[pb.Job, None]:
        return self._watch(self._of(name))

    async def _watch(self, worker: JobWorker) -> AsyncGenerator[pb.Job, None]:
        shown = None
        while True:
            changed = self._changed
            if worker.job is not shown:
                shown = worker.job
                yield shown
                continue
            if worker.has_ended and shown.ended_at:
                return
            await changed.wait()

    def logs(self, name: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        worker = self._of(name)
        return worker.log.stream(tail_lines, follow=follow, has_ended=lambda: worker.has_ended)

    def rotate(self) -> None:
        """In a thread."""
        for worker in list(self._workers.values()):
            if not worker.has_ended:
                rotate(worker)

    def _running(self) -> list[JobWorker]:
        return [worker for worker in self._workers.values() if not worker.has_ended]

    def _may_start(self, worker: JobWorker) -> bool:
        return worker in self._turns()

    def _turns(self) -> list[JobWorker]:
        return may_run(list(self._workers.values()), self._at_once)

    def _worker(self, folder: Folder) -> JobWorker:
        keeper = Keeper(folder, self._around.kernel, self._around.clock.now())
        return JobWorker(keeper, self._around, self._may_start, self._on_change)

    def _on_change(self, worker: JobWorker) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if worker.has_ended:
            self._has_ended.set()
            for waiting in self._turns():
                waiting.wake()

    async def _forget_old(self) -> None:
        """One whose folder can't be deleted stays, and is tried again when the next one has ended."""
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            async with self._submitting:
                ended = [worker for worker in self._workers.values() if worker.has_ended]
                ended.sort(key=lambda worker: worker.keeper.memory.ended_at)
                for worker in ended[: max(len(ended) - self._kept, 0)]:
                    try:
                        await in_thread(worker.keeper.forget)
                    except OSError as error:
                        log.warning("Job %s can't be forgotten: %s", worker.name, error)
                    else:
                        del self._workers[worker.name]

    def _of(self, name: str) -> JobWorker:
        if worker := self._workers.get(name):
            return worker
        raise NotFound(f"There is no job {name}.")


def _other(spec: pb.JobSpec) -> Exists:
    return Exists(f"There is a job {spec.name} with other contents.")
