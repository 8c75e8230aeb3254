"""The Cluster Server as the leader sees it: a copy of what it reports, kept by a watch, and requests.

The watch runs in a thread of its own and wakes the leader when something has changed that decisions look
at. How many requests an instance serves just now is none of that: it is read with the next decision.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from django.conf import settings

from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import cluster_pb2_grpc
from console.workloads.leader.world import Cache, Goal, State

log = logging.getLogger(__name__)

CALL_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
JOBS_FOLLOWED_MAX: Final = 32  # at once; the end of others is found by looking
STALE_SECONDS: Final = 15.0  # without a watch, after which what it said is not known to be so
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 << 20),
)
GOALS: Final = {
    Goal.RUN: pb.RUN,
    Goal.RELEASE_CACHE: pb.RELEASE_CACHE,
    Goal.DRAIN: pb.DRAIN,
}
_GOALS_TOLD: Final = {number: goal for goal, number in GOALS.items()}
_STATES: Final = {getattr(pb, one.name): one for one in State}
_CACHES: Final = {
    pb.NO_CACHE: Cache.NONE,
    pb.WAITING: Cache.WAITING,
    pb.ATTACHED: Cache.ATTACHED,
    pb.RELEASED: Cache.RELEASED,
}


class NoCluster(Exception):
    """There is no Cluster Server in the settings."""


def channel() -> grpc.Channel:
    """To the Cluster Server of the settings. Raises NoCluster, and OSError for unreadable files."""
    target = settings.CLUSTER_URL
    if not target:
        raise NoCluster("TIDEGATE_CLUSTER_URL is not set.")
    if target.startswith("unix:"):
        return grpc.insecure_channel(target, options=_OPTIONS)
    return grpc.secure_channel(target.removeprefix("https://"), credentials(), options=_OPTIONS)


def credentials() -> grpc.ChannelCredentials | None:
    """Of TLS, by the settings; None for a Unix socket. Raises OSError for unreadable files."""
    if settings.CLUSTER_URL.startswith("unix:"):
        return None
    return grpc.ssl_channel_credentials(
        _read(settings.CLUSTER_CA), _read(settings.CLUSTER_KEY), _read(settings.CLUSTER_CERTIFICATE)
    )


def _read(path: Any) -> bytes | None:
    return path.read_bytes() if path else None


@dataclass(frozen=True, slots=True)
class Status:
    """Of an instance: what decisions look at."""

    state: State
    reason: str
    sentence: str
    since: float
    goal: Goal
    url: str
    cache: Cache
    restarts: int


@dataclass(slots=True)
class Known:
    """Of a workload."""

    generation: int = 0
    statuses: dict[str, Status] = field(default_factory=dict)
    told: dict[str, pb.InstanceStatus] = field(default_factory=dict)


def status_of(told: pb.InstanceStatus) -> Status:
    return Status(
        state=_STATES.get(told.state, State.PENDING),
        reason=told.reason,
        sentence=told.sentence,
        since=told.since,
        goal=_GOALS_TOLD.get(told.goal, Goal.RUN),
        url=told.url,
        cache=_CACHES.get(told.cache, Cache.UNKNOWN),
        restarts=told.restarts,
    )


class ClusterLink:
    """Follows the Cluster Server while it is open. `changed` is called from its thread, with the name of
    a workload; None: all may have changed."""

    def __init__(self, opened: grpc.Channel, changed: Callable[[str | None], None]) -> None:
        self._channel = opened
        self._changed = changed
        self._workloads = cluster_pb2_grpc.WorkloadsStub(opened)
        self._jobs = cluster_pb2_grpc.JobsStub(opened)
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        self._followed: set[str] = set()  # jobs
        self._version = 0
        self._watched_at = 0.0  # when the watch was last known to stand
        self._is_whole = False
        self._is_watching = False
        self._ends = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._watch, name="cluster", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        if self._call is not None:
            self._call.cancel()
        self._channel.close()
        self._thread.join(CALL_SECONDS)

    # What it reports

    @property
    def is_stale(self) -> bool:
        """Whether nothing is known, or nothing has been heard for a while."""
        if not self._is_whole:
            return True
        return not self._is_watching and time.monotonic() - self._watched_at > STALE_SECONDS

    def known(self, workload: str) -> Known:
        with self._lock:
            found = self._known.get(workload)
            if found is None:
                return Known()
            return Known(found.generation, dict(found.statuses), dict(found.told))

    def names(self) -> set[str]:
        with self._lock:
            return set(self._known)

    def _watch(self) -> None:
        while not self._ends.is_set():
            try:
                self._follow()
            except grpc.RpcError as error:
                if not self._ends.is_set():
                    log.warning("The Cluster Server is not there: %s", _why(error))
            self._is_watching = False
            self._ends.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        self._call = self._workloads.Watch(pb.WatchRequest(since_version=self._version))
        snapshot: dict[str, Known] | None = None
        for event in self._call:
            self._is_watching, self._watched_at = True, time.monotonic()
            self._version = event.version
            if event.kind == pb.Event.SNAPSHOT:
                snapshot = snapshot if snapshot is not None else {}
                snapshot[event.workload.name] = _known(event.workload)
            elif event.kind == pb.Event.COMPLETE:
                with self._lock:
                    self._known = snapshot or {}
                snapshot, self._is_whole = None, True
                self._changed(None)
            else:
                self._take(event)

    def _take(self, event: pb.Event) -> None:
        name = event.workload.name
        with self._lock:
            before = self._known.get(name)
            if event.kind == pb.Event.DELETED:
                self._known.pop(name, None)
                after = None
            else:
                after = self._known[name] = _known(event.workload)
        is_news = before is None or after is None or before.generation != after.generation
        if is_news or (before and after and before.statuses != after.statuses):
            self._changed(name)

    # Requests. All raise grpc.RpcError.

    def apply(self, workload: str, generation: int, instances: list[pb.Instance]) -> None:
        request = pb.ApplyRequest(workload=workload, generation=generation, instances=instances)
        made = self._workloads.Apply(request, timeout=CALL_SECONDS)
        with self._lock:
            known = self._known.get(workload)
            if known is None or known.generation < made.generation:
                self._known[workload] = _known(made)

    def delete(self, workload: str) -> None:
        try:
            self._workloads.Delete(pb.DeleteRequest(workload=workload), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            if _code(error) is not grpc.StatusCode.NOT_FOUND:
                raise

    def submit(self, job: pb.JobSpec) -> pb.Job:
        made: pb.Job = self._jobs.Submit(job, timeout=CALL_SECONDS)
        return made

    def job(self, name: str) -> pb.Job | None:
        try:
            found: pb.Job = self._jobs.Get(pb.JobRequest(name=name), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            if _code(error) is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        return found

    def follow_job(self, name: str, workload: str) -> None:
        """Have `changed` called with this workload once the job has ended. It may not be: whoever waits
        for it looks from time to time."""
        with self._lock:
            if name in self._followed or len(self._followed) >= JOBS_FOLLOWED_MAX:
                return
            self._followed.add(name)
        threading.Thread(target=self._follow_job, args=(name, workload), daemon=True).start()

    def _follow_job(self, name: str, workload: str) -> None:
        try:
            for _ in self._jobs.Watch(pb.JobRequest(name=name)):
                """How far it is, until it has ended."""
            self._changed(workload)
        except (grpc.RpcError, ValueError) as error:  # the latter: of a channel that is closed
            log.info("The job %s is not followed: %s", name, str(error)[:300])
        finally:
            with self._lock:
                self._followed.discard(name)


def _known(told: pb.Workload) -> Known:
    return Known(
        told.generation,
        {one.name: status_of(one) for one in told.instances},
        {one.name: one for one in told.instances},
    )


def _code(error: grpc.RpcError) -> Any:
    return error.code() if isinstance(error, grpc.Call) else None


def _why(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
