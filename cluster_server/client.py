"""The client of a Cluster Server.

    async with ClusterClient("unix:/run/tidegate/cluster.sock") as cluster:
        await cluster.apply("chat", 7, instances)
        async for event in cluster.watch():
            ...

Messages are those of the interface (`cluster_server.proto`). What the server refuses is raised as
`Refused`, with its sentence; what does not come back in time, or at all, as `Away`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self

import grpc
from grpc import aio

from cluster_server.checks import MESSAGE_BYTES_MAX
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc

log = logging.getLogger(__name__)

CALL_SECONDS: Final = 15.0
AGAIN_SECONDS: Final = 0.1  # after the first failure of a watch; then twice as long each time, up to
AGAIN_SECONDS_MAX: Final = 5.0
ANSWER_BYTES_MAX: Final = 8 * MESSAGE_BYTES_MAX
# Another attempt may find the server there again.
_AWAY: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),  # a new client need not wait because another one does
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class Refused(Exception):
    """The server has answered no, in a sentence. `reason`: the name of the status, such as NOT_FOUND."""

    def __init__(self, status: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status

    @property
    def reason(self) -> str:
        return str(self.status.name)


class Away(Exception):
    """The server has not answered."""


class ClusterClient:
    """`credentials`: of TLS, with the console's certificate; without, only a Unix socket or loopback.
    `server_name`: which certificate it has to show, where that is not the host of the target.
    `token`: a JWT, instead of a certificate."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        server_name: str = "",
        token: str = "",
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self._call_seconds = call_seconds
        options: list[tuple[str, str | int]] = [*_OPTIONS]
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        if credentials:
            self._channel = aio.secure_channel(target, credentials, options)
        else:
            self._channel = aio.insecure_channel(target, options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._workloads = rpc.stub("Workloads", self._channel)
        self._jobs = rpc.stub("Jobs", self._channel)
        self._inventory = rpc.stub("Inventory", self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def apply(
        self, workload: str, generation: int, instances: Iterable[pb.Instance]
    ) -> pb.Workload:
        request = pb.ApplyRequest(workload=workload, generation=generation, instances=list(instances))
        answer: pb.Workload = await self._ask(self._workloads.Apply, request)
        return answer

    async def delete(self, workload: str) -> None:
        """Raises Refused with NOT_FOUND for one that is not there."""
        await self._ask(self._workloads.Delete, pb.DeleteRequest(workload=workload))

    async def get(self, workload: str) -> pb.Workload:
        answer: pb.Workload = await self._ask(self._workloads.Get, pb.GetRequest(workload=workload))
        return answer

    async def list(self) -> tuple[list[pb.Workload], int]:
        """All workloads, and the version to watch from."""
        answer = await self._ask(self._workloads.List, pb.ListRequest())
        return list(answer.workloads), answer.version

    async def watch(self, since: int = 0) -> AsyncGenerator[pb.Event, None]:
        """Changes, for as long as somebody reads. Where the connection breaks it goes on after the last
        event; a snapshot may come at any time, and replaces all that was told before. Raises Refused."""
        async with aclosing(
            self._watched(self._workloads.Watch, lambda: pb.WatchRequest(since_version=since))
        ) as events:
            async for event in events:
                yield event
                if event.kind != pb.Event.SNAPSHOT:  # one that is not complete begins again
                    since = event.version

    def logs(
        self, instance: str, *, tail_lines: int = 0, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """As they come. Raises Refused and Away."""
        return self._read_logs(self._workloads.Logs, instance, tail_lines, is_followed=follow)

    async def submit(self, spec: pb.JobSpec) -> pb.Job:
        """Start the job, or find the one that this is."""
        answer: pb.Job = await self._ask(self._jobs.Submit, spec)
        return answer

    async def job(self, name: str) -> pb.Job:
        answer: pb.Job = await self._ask(self._jobs.Get, pb.JobRequest(name=name))
        return answer

    async def jobs(self) -> Sequence[pb.Job]:
        return list((await self._ask(self._jobs.List, pb.ListJobsRequest())).jobs)

    async def cancel(self, name: str) -> pb.Job:
        answer: pb.Job = await self._ask(self._jobs.Cancel, pb.JobRequest(name=name))
        return answer

    async def watch_job(self, name: str) -> AsyncGenerator[pb.Job, None]:
        """The job now and after each change, until it has ended. Where the connection breaks it begins
        again with how the job is then. Raises Refused."""
        async with aclosing(self._watched(self._jobs.Watch, lambda: pb.JobRequest(name=name))) as jobs:
            async for job in jobs:
                yield job
                if job.ended_at:
                    return

    def job_logs(
        self, name: str, *, tail_lines: int = 0, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        return self._read_logs(self._jobs.Logs, name, tail_lines, is_followed=follow)

    async def boxes(self) -> Sequence[pb.Box]:
        return list((await self._ask(self._inventory.ListBoxes, pb.ListBoxesRequest())).boxes)

    async def lock(self, holder: str, boxes: Iterable[str]) -> Sequence[pb.Box]:
        """All of them, or Refused with FAILED_PRECONDITION."""
        request = pb.LockRequest(holder=holder, boxes=list(boxes))
        return list((await self._ask(self._inventory.Lock, request)).boxes)

    async def unlock(self, holder: str, boxes: Iterable[str]) -> Sequence[pb.Box]:
        request = pb.LockRequest(holder=holder, boxes=list(boxes))
        return list((await self._ask(self._inventory.Unlock, request)).boxes)

    async def _read_logs(
        self, method: Any, name: str, tail_lines: int, *, is_followed: bool
    ) -> AsyncGenerator[bytes, None]:
        request = pb.LogsRequest(name=name, tail_lines=tail_lines, follow=is_followed)
        try:
            async with aclosing(self._stream(method, request)) as chunks:
                async for chunk in chunks:
                    yield chunk.data
        except aio.AioRpcError as error:
            raise _raised(error) from None

    async def _watched(self, method: Any, request: Callable[[], Any]) -> AsyncGenerator[Any, None]:
        """What comes, without end: asked for again when the connection breaks. Raises Refused."""
        pause = AGAIN_SECONDS
        while True:
            try:
                async with aclosing(self._stream(method, request())) as answers:
                    async for answer in answers:
                        pause = AGAIN_SECONDS
                        yield answer
            except aio.AioRpcError as error:
                if error.code() not in (*_AWAY, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    raise Refused(error.code(), error.details() or "") from None
                log.info("Watching goes on after %.1f s: %s", pause, error.details())
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, AGAIN_SECONDS_MAX)

    async def _stream(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        """The call ends with who reads it."""
        call = method(request, metadata=self._metadata)
        try:
            async for answer in call:
                yield answer
        finally:
            call.cancel()

    async def _ask(self, method: Any, request: Any) -> Any:
        try:
            # A server that is just being restarted is waited for.
            return await method(
                request, timeout=self._call_seconds, metadata=self._metadata, wait_for_ready=True
            )
        except aio.AioRpcError as error:
            raise _raised(error) from None


def _raised(error: aio.AioRpcError) -> Exception:
    sentence = error.details() or error.code().name
    return Away(sentence) if error.code() in _AWAY else Refused(error.code(), sentence)
