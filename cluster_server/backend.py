"""What a Cluster Server needs of the machines that it runs instances on: one small interface.

`tests/cluster_server/conformance` holds every backend to it. Requests have passed `checks` before they
come here; who asks was decided before that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from cluster_server.proto import cluster_pb2 as pb


class NotFound(Exception):
    """There is no such workload, instance or job. A sentence."""


class Conflict(Exception):
    """It does not fit what is there. A sentence."""


class Exists(Exception):
    """There is another one of this name. A sentence."""


class Exhausted(Exception):
    """A bound is reached. A sentence that says which."""


class Backend(Protocol):
    """Runs instances and jobs. All that it has answered survives its end, whatever that is: `start`
    goes on from there.

    Of one instance there is never more than one manager, and of one that is gone there is no process.
    Secrets go to the processes that they are for, and are in no answer, event or log.
    """

    async def start(self) -> None:
        """Adopt what runs, end what should not, start what is missing. Call once, before all others.

        Returns when the status of what runs is known, or has not been told in time. Raises OSError."""

    async def stop(self) -> None:
        """Let go of everything: what runs goes on without us, for the next `start`. The last call."""

    async def end_all(self, seconds_max: float) -> None:
        """End all instances and jobs, each within its grace period and this time, and wait for that.
        What is desired stays desired: the next `start` starts it again; jobs count as cancelled."""

    async def apply(self, request: pb.ApplyRequest) -> pb.Workload:
        """Make this the desired state of the workload. It is durable when this returns; what has to be
        done for it goes on afterwards.

        The same generation with the same instances changes nothing. Raises Conflict for an older
        generation; for the current one with other contents; for an instance that exists with another
        specification, with other secrets, boxes or resources, in another workload, or that is being
        ended; and for one that should leave DRAIN. Nothing is changed then. Exhausted: too many
        instances.

        An instance that is left out is terminated: its manager gets SIGTERM, and after its grace period
        everything of it is killed. It is listed until it is gone."""

    async def delete(self, workload: str) -> None:
        """Apply it without instances, and forget it. A workload is listed until its instances are gone.
        Deleting it once more changes nothing. Raises NotFound."""

    def workload(self, name: str) -> pb.Workload:
        """Raises NotFound."""

    def workloads(self) -> tuple[list[pb.Workload], int]:
        """All of them, by name, and the version of this answer: watch from there."""

    def watch(self, since: int) -> AsyncGenerator[pb.Event, None]:
        """Changes after this version, in order, for as long as somebody reads.

        0, or a version of which not all changes are known any more, begins with a snapshot: SNAPSHOT for
        each workload, then COMPLETE. What is not in it is not there. That also happens later on, to
        those that read too slowly. Several changes of a workload may come as one."""

    def logs(self, instance: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        """What its processes have written, as far as it is kept: all, or the last lines. With `follow`
        until it is gone. Raises NotFound at once."""

    async def submit(self, spec: pb.JobSpec) -> pb.Job:
        """Start a job, once. It is durable when this returns. A job with this name and the same contents
        is answered as it is now. Raises Exists for one with other contents; Exhausted."""

    async def cancel(self, name: str) -> pb.Job:
        """End it, if it has not ended. Its state says so when its process has ended. Raises NotFound."""

    def job(self, name: str) -> pb.Job:
        """Raises NotFound. Jobs that have ended are kept, but not all of them for ever."""

    def jobs(self) -> list[pb.Job]:
        """By time of submission."""

    def watch_job(self, name: str) -> AsyncGenerator[pb.Job, None]:
        """The job now, and after each change until it has ended. Raises NotFound at once."""

    def job_logs(self, name: str, tail_lines: int, *, follow: bool) -> AsyncIterator[bytes]:
        """As `logs`."""
