"""What is the same in all backends: which workloads there are, who works on their instances, and what is
answered about them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable
from typing import Final, Generic, Protocol, TypeVar

from cluster_server.backend import Conflict, Exhausted, NotFound
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.publisher import Publisher

INSTANCES_MAX: Final = 5000
ADOPT_SECONDS: Final = 5.0  # for managers to say how they are, before anybody else is told


class Desired(Protocol):
    @property
    def generation(self) -> int: ...


class Worker(Protocol):
    """Of one instance."""

    name: str
    workload: str
    status: pb.InstanceStatus
    is_known: asyncio.Event

    def end(self, seconds_max: float) -> None: ...


class Jobs(Protocol):
    async def submit(self, spec: pb.JobSpec) -> pb.Job: ...
    async def cancel(self, name: str) -> pb.Job: ...
    async def cancel_all(self) -> None: ...
    def job(self, name: str) -> pb.Job: ...
    def all(self) -> list[pb.Job]: ...
    def watch(self, name: str) -> AsyncGenerator[pb.Job, None]: ...
    def logs(self, name: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]: ...


D = TypeVar("D", bound=Desired)
W = TypeVar("W", bound=Worker)
J = TypeVar("J", bound=Jobs)


class WorkersBackend(ABC, Generic[D, W, J]):
    """See `Backend`. A subclass adds and removes `_desired`, adds workers with `_add`, and publishes."""

    _publisher: Publisher
    _jobs: J

    def __init__(self) -> None:
        self._desired: dict[str, D] = {}
        self._workers: dict[str, W] = {}
        self._of_workload: dict[str, dict[str, W]] = {}
        self._changing = asyncio.Lock()
        self._gone = asyncio.Event()
        self._is_ending = False

    async def end_all(self, seconds_max: float) -> None:
        self._is_ending = True
        async with self._changing:
            for worker in list(self._workers.values()):
                worker.end(seconds_max)
        await self._jobs.cancel_all()
        while self._workers:
            await self._gone.wait()

    def workload(self, name: str) -> pb.Workload:
        desired, workers = self._desired.get(name), self._of_workload.get(name, {})
        if desired is None and not workers:
            raise NotFound(f"There is no workload {name}.")
        statuses = [workers[one].status for one in sorted(workers)]
        return pb.Workload(
            name=name, generation=desired.generation if desired else 0, instances=statuses
        )

    def workloads(self) -> tuple[list[pb.Workload], int]:
        return list(self._all()), self._publisher.history.version

    def watch(self, since: int) -> AsyncGenerator[pb.Event, None]:
        return self._publisher.history.watch(since)

    def logs(self, instance: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        worker = self._workers.get(instance)
        if worker is None:
            raise NotFound(f"There is no instance {instance}.")
        return self._logs(worker, tail_lines, follow=follow)

    @abstractmethod
    def _logs(self, worker: W, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]: ...

    async def submit(self, spec: pb.JobSpec) -> pb.Job:
        self._check_open()
        return await self._jobs.submit(spec)

    async def cancel(self, name: str) -> pb.Job:
        return await self._jobs.cancel(name)

    def job(self, name: str) -> pb.Job:
        return self._jobs.job(name)

    def jobs(self) -> list[pb.Job]:
        return self._jobs.all()

    def watch_job(self, name: str) -> AsyncGenerator[pb.Job, None]:
        return self._jobs.watch(name)

    def job_logs(self, name: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        return self._jobs.logs(name, tail_lines, follow=follow)

    # What an Apply may change

    def _check_open(self) -> None:
        """Raises Conflict."""
        if self._is_ending:
            raise Conflict("The server is ending.")

    def _check_names(self, asked: Iterable[str], known: Collection[str]) -> None:
        """Of instances. `known`: what the workload has already. Raises Conflict, or Exhausted."""
        fresh = [name for name in asked if name not in known]
        for name in fresh:
            if name in self._workers:
                raise Conflict(
                    f"There is an instance {name} already, or it is just being ended. A new one needs "
                    "another name."
                )
        if len(self._workers) + len(fresh) > INSTANCES_MAX:
            raise Exhausted(f"There may be {INSTANCES_MAX} instances, and these would be more.")

    # Who works on what

    def _all(self) -> Iterable[pb.Workload]:
        return [self.workload(name) for name in sorted(self._desired.keys() | self._of_workload.keys())]

    def _add(self, worker: W) -> None:
        self._workers[worker.name] = worker
        self._of_workload.setdefault(worker.workload, {})[worker.name] = worker

    async def _adopted(self) -> None:
        waiting = [asyncio.create_task(worker.is_known.wait()) for worker in self._workers.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=ADOPT_SECONDS)
            for task in late:
                task.cancel()

    def _on_change(self, worker: W, is_minor: bool) -> None:  # noqa: FBT001 - a callback
        self._publisher.changed(worker.workload, is_minor=is_minor)

    def _on_gone(self, worker: W) -> None:
        del self._workers[worker.name]
        del self._of_workload[worker.workload][worker.name]
        self._publisher.changed(worker.workload)
        self._drop(worker.workload)
        self._gone.set()
        self._gone = asyncio.Event()

    def _drop(self, workload: str) -> None:
        """Of a workload that is forgotten, if nothing is left."""
        if not self._of_workload.get(workload):
            self._of_workload.pop(workload, None)
            if workload not in self._desired:
                self._publisher.deleted(workload)


def is_newer(workload: str, asked: Desired, current: Desired, *, is_same: bool) -> bool:
    """`is_same`: both want the same instances. Raises Conflict for what is neither newer nor same."""
    if asked.generation < current.generation:
        raise Conflict(f"Generation {current.generation} of {workload} is newer.")
    if asked.generation == current.generation and not is_same:
        raise Conflict(f"Generation {asked.generation} of {workload} has other contents.")
    return asked.generation > current.generation


def check_change(instance: str, *, is_same: bool, leaves_drain: bool) -> None:
    """`is_same`: but for its goal and grace period. Raises Conflict."""
    if not is_same:
        raise Conflict(
            f"Instance {instance} exists with another specification, boxes, resources or secrets: "
            "only its goal and grace period can change. Give the new one another name."
        )
    if leaves_drain:
        raise Conflict(f"Instance {instance} drains, which it does not come back from.")
