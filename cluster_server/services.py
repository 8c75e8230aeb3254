"""The services of `proto/cluster.proto`: requests are checked, handed to the backend, and what it
refuses becomes a status with its sentence."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from cluster_server import checks
from cluster_server.backend import Backend, Conflict, Exhausted, Exists, NotFound
from cluster_server.inventory import Inventory
from cluster_server.processes.log_file import LINES_MAX
from cluster_server.proto import cluster_pb2 as pb

log = logging.getLogger(__name__)

_Status = grpc.StatusCode
STATUSES: Final[dict[type[Exception], Any]] = {
    checks.Wrong: _Status.INVALID_ARGUMENT,
    NotFound: _Status.NOT_FOUND,
    Conflict: _Status.FAILED_PRECONDITION,
    Exists: _Status.ALREADY_EXISTS,
    Exhausted: _Status.RESOURCE_EXHAUSTED,
}


class Seats:
    """How many may do something that lasts, at once."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self.taken = 0

    def take(self, context: Any) -> None:
        """Until the call has ended, however it does. Raises Exhausted."""
        if self.taken >= self._most:
            raise Exhausted(f"There are {self._most} {self._what} already, which is as many as may be.")
        self.taken += 1
        context.add_done_callback(self._give_back)

    def _give_back(self, _context: Any) -> None:
        self.taken -= 1


@contextlib.asynccontextmanager
async def answering(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except tuple(STATUSES) as error:
        await context.abort(STATUSES[type(error)], str(error))
    except OSError as error:
        log.warning("A request has failed: %s", error)
        await context.abort(_Status.UNAVAILABLE, f"The server's disk or system refuses: {error}")


class Workloads:
    def __init__(self, backend: Backend, watchers: Seats, followers: Seats) -> None:
        self._backend = backend
        self._watchers = watchers
        self._followers = followers

    async def Apply(self, request: pb.ApplyRequest, context: Any) -> Any:  # noqa: N802 - gRPC's names
        async with answering(context):
            checks.check_apply(request)
            return await self._backend.apply(request)

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_name("workload", request.workload)
            await self._backend.delete(request.workload)
            return pb.DeleteResponse()

    async def Get(self, request: pb.GetRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_name("workload", request.workload)
            return self._backend.workload(request.workload)

    async def List(self, request: pb.ListRequest, context: Any) -> Any:  # noqa: N802, ARG002
        workloads, version = self._backend.workloads()
        return pb.ListResponse(workloads=workloads, version=version)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self._watchers.take(context)
            async for event in self._backend.watch(request.since_version):
                yield event

    async def Logs(self, request: pb.LogsRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_name("instance", request.name)
            _check_lines(request)
            self._followers.take(context)
            pieces = self._backend.logs(request.name, request.tail_lines, follow=request.follow)
            async for piece in pieces:
                yield pb.LogChunk(data=piece)


class Jobs:
    def __init__(self, backend: Backend, watchers: Seats, followers: Seats) -> None:
        self._backend = backend
        self._watchers = watchers
        self._followers = followers

    async def Submit(self, request: pb.JobSpec, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_job(request)
            return await self._backend.submit(request)

    async def Get(self, request: pb.JobRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_job_name(request.name)
            return self._backend.job(request.name)

    async def List(self, request: pb.ListJobsRequest, context: Any) -> Any:  # noqa: N802, ARG002
        return pb.ListJobsResponse(jobs=self._backend.jobs())

    async def Watch(self, request: pb.JobRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_job_name(request.name)
            self._watchers.take(context)
            async for job in self._backend.watch_job(request.name):
                yield job

    async def Logs(self, request: pb.LogsRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_job_name(request.name)
            _check_lines(request)
            self._followers.take(context)
            pieces = self._backend.job_logs(request.name, request.tail_lines, follow=request.follow)
            async for piece in pieces:
                yield pb.LogChunk(data=piece)

    async def Cancel(self, request: pb.JobRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_job_name(request.name)
            return await self._backend.cancel(request.name)


class InventoryService:
    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    async def ListBoxes(self, request: pb.ListBoxesRequest, context: Any) -> Any:  # noqa: N802, ARG002
        return pb.ListBoxesResponse(boxes=self._inventory.boxes())

    async def Lock(self, request: pb.LockRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_lock(request)
            boxes = await self._inventory.lock(request.holder, list(request.boxes))
            return pb.ListBoxesResponse(boxes=boxes)

    async def Unlock(self, request: pb.LockRequest, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            checks.check_lock(request)
            boxes = await self._inventory.unlock(request.holder, list(request.boxes))
            return pb.ListBoxesResponse(boxes=boxes)


def _check_lines(request: pb.LogsRequest) -> None:
    if request.tail_lines > LINES_MAX:
        raise checks.Wrong(f"There are at most {LINES_MAX} lines in an answer.")
