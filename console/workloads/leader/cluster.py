"""The Cluster Server as the leader sees it: a copy of what it reports, kept by a watch, and requests.

The watch runs in a thread of its own and wakes the leader when something has changed that decisions look
at. How many requests an instance serves just now is none of that: it is read with the next decision.

Nobody waits for the answer to a request. It wakes the leader, who sees what has become so and decides
again; what got no answer is asked for again. So a slow Cluster Server holds neither rounds nor rows.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
import msgspec
from django.conf import settings

from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc
from console.workloads.leader.world import Cache, Goal, State
from console.workloads.models import HOST_MAX, REASON_MAX, SENTENCE_MAX, UNIT_MAX
from inference_brain.endpoints import ADDRESS, ADDRESS_MAX
from telemetry.decoder import Malformed, decode, excerpt
from workload_manager.spec import Sha256

log = logging.getLogger(__name__)

CALL_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
JOBS_REMEMBERED: Final = 1000
STALE_SECONDS: Final = 15.0  # without a watch, after which what it said is not known to be so
WORKLOADS_MAX: Final = 10_000  # that are known; more are left out
COUNT_MAX: Final = (1 << 31) - 1
BYTES_MAX: Final = 1 << 62
GENERATION_MAX: Final = 1 << 62
MOMENT_MAX: Final = float(1 << 33)  # the year 2242
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
WORKLOAD: Final = "workload"  # the kind of requests of which one is under way for each
# It says so of what it is told, and says it again unless something else changes.
REFUSES: Final = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_GOALS_TOLD: Final = {number: goal for goal, number in GOALS.items()}
RUNNING: Final = (pb.JOB_PENDING, pb.JOB_RUNNING)  # states of jobs that have not ended
# Why a job has ended that says nothing of what it was told: its node, its pod or its bucket went away,
# it found no place, or somebody has cancelled it.
INTERRUPTED: Final = frozenset(
    {
        *("Cancelled", "Evicted", "NotStarted", "PodGone", "Preempting"),
        *("NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Unreachable"),
    }
)
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
    """Of a workload. `refusal`: why the Cluster Server does not take what it is told of it, in a
    sentence."""

    generation: int = 0
    refusal: str = ""
    statuses: dict[str, Status] = field(default_factory=dict)
    told: dict[str, pb.InstanceStatus] = field(default_factory=dict)


class Compiled(msgspec.Struct, frozen=True):
    """What a compile job has made, as far as the console looks at it."""

    sha256: Sha256
    layout: dict[str, Any] | None = None


def was_interrupted(job: pb.Job) -> bool:
    """Whether a job that has ended may go well another time."""
    return job.state == pb.JOB_CANCELLED or (job.state == pb.JOB_FAILED and job.reason in INTERRUPTED)


def compiled(result: bytes) -> Compiled:
    """Raises Malformed."""
    found = decode(result, Compiled)
    if b"\\u0000" in result:  # which PostgreSQL takes for no text
        raise Malformed("It has a text with a character 0 in it")
    return found


def storable(told: pb.InstanceStatus) -> pb.InstanceStatus:
    """The same within the bounds of what is stored. It is what a manager has said, beside which engines
    run: what is wrong with one instance must not stop the leader for all others."""
    progress = told.progress
    return pb.InstanceStatus(
        name=told.name,
        state=told.state,
        reason=excerpt(told.reason, REASON_MAX),
        sentence=excerpt(told.sentence, SENTENCE_MAX),
        since=_moment(told.since),
        goal=told.goal,
        url=_address(told.url),
        cache=told.cache,
        progress=pb.Progress(
            done=min(max(progress.done, 0), BYTES_MAX),
            total=min(max(progress.total, 0), BYTES_MAX),
            unit=excerpt(progress.unit, UNIT_MAX),
            seconds=_moment(progress.seconds),
        ),
        restarts=min(told.restarts, COUNT_MAX),
        running_requests=min(told.running_requests, COUNT_MAX),
        seen_at=_moment(told.seen_at),
        host=excerpt(told.host, HOST_MAX),
    )


def _moment(seconds: float) -> float:
    return min(max(seconds, 0.0), MOMENT_MAX) if math.isfinite(seconds) else 0.0


def _address(url: str) -> str:
    """Nothing instead of what brains would refuse, and with it the addresses of all other replicas."""
    is_one = len(url) <= ADDRESS_MAX and url.isascii() and url.isprintable() and re.match(ADDRESS, url)
    return url if is_one else ""


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
        self._workloads = rpc.stub("Workloads", opened)
        self._jobs = rpc.stub("Jobs", opened)
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        self._jobs_seen: dict[str, pb.Job] = {}
        self._asked: set[tuple[str, str]] = set()
        self._faults = 0
        self._refusals: dict[str, str] = {}  # by workload
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
            refusal = self._refusals.get(workload, "")
            found = self._known.get(workload)
            if found is None:
                return Known(refusal=refusal)
            return Known(found.generation, refusal, dict(found.statuses), dict(found.told))

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
            # With a snapshot: to who goes on where it was a quiet cluster says nothing, not even that it
            # is there.
            self._is_watching, self._version = False, 0
            self._ends.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        self._call = self._workloads.Watch(pb.WatchRequest(since_version=self._version))
        snapshot: dict[str, Known] | None = None
        for event in self._call:
            self._is_watching, self._watched_at = True, time.monotonic()
            if event.kind != pb.Event.SNAPSHOT:  # one that breaks off begins again
                self._version = event.version
            if event.kind == pb.Event.SNAPSHOT:
                snapshot = snapshot if snapshot is not None else {}
                if len(snapshot) < WORKLOADS_MAX:
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
            elif before is None and len(self._known) >= WORKLOADS_MAX:
                return
            else:
                after = self._known[name] = _known(event.workload)
        is_news = before is None or after is None or before.generation != after.generation
        if is_news or (before and after and before.statuses != after.statuses):
            self._changed(name)

    # Requests. All return at once. About one workload or job there is one at a time: what comes
    # meanwhile is left to the next decision.

    def apply(self, workload: str, generation: int, instances: list[pb.Instance]) -> None:
        """Have these instances, and no others. They are `known` then."""
        request = pb.ApplyRequest(workload=workload, generation=generation, instances=instances)

        def take(made: pb.Workload) -> bool:
            with self._lock:
                known = self._known.get(workload)
                if known is None or known.generation < made.generation:
                    self._known[workload] = _known(made)
            return True

        self._ask((WORKLOAD, workload), workload, self._workloads.Apply, request, take)

    def delete(self, workload: str) -> None:
        """Have nothing of it. It is not among `names` any more once nothing is left."""

        def take(_: object) -> bool:
            return False  # the watch tells when it is gone

        def forget() -> bool:
            with self._lock:
                self._known.pop(workload, None)
            return True

        request = pb.DeleteRequest(workload=workload)
        self._ask((WORKLOAD, workload), workload, self._workloads.Delete, request, take, forget)

    def submit(self, workload: str, job: pb.JobSpec) -> None:
        """Start a job of a workload, unless there is one of this name already. See `job`."""

        def start() -> bool:
            self._ask(key, workload, self._jobs.Submit, job, self._take_job)
            return False

        key, request = ("job", job.name), pb.JobRequest(name=job.name)
        self._ask(key, workload, self._jobs.Get, request, self._take_job, start)

    def job(self, workload: str, name: str) -> pb.Job | None:
        """As it was last heard of. None: not yet, or it is not known there. One that has not ended is
        asked for anew."""
        with self._lock:
            found = self._jobs_seen.get(name)
        if found is not None and found.state in RUNNING:
            request, key = pb.JobRequest(name=name), ("job", name)
            self._ask(
                key, workload, self._jobs.Get, request, self._take_job, partial(self._drop_job, name)
            )
        return found

    def cancel(self, workload: str, name: str) -> bool:
        """End a job, whose result nobody waits for. Returns whether it is known to have ended."""
        with self._lock:
            found = self._jobs_seen.get(name)
            is_asked = ("job", name) in self._asked  # it may be being submitted
        if is_asked or (found is not None and found.state not in RUNNING):
            return not is_asked

        def miss() -> bool:
            return self._take_job(pb.Job(name=name, state=pb.JOB_CANCELLED))

        key, request = ("cancellation", name), pb.JobRequest(name=name)
        self._ask(key, workload, self._jobs.Cancel, request, self._take_job, miss)
        return False

    def take_faults(self) -> int:
        """How many requests have failed since this was last called."""
        with self._lock:
            found, self._faults = self._faults, 0
        return found

    def _take_job(self, job: pb.Job) -> bool:
        with self._lock:
            before = self._jobs_seen.pop(job.name, None)
            self._jobs_seen[job.name] = job
            while len(self._jobs_seen) > JOBS_REMEMBERED:
                del self._jobs_seen[next(iter(self._jobs_seen))]
        return before is None or before.state != job.state

    def _drop_job(self, name: str) -> bool:
        with self._lock:
            self._jobs_seen.pop(name, None)
        return True

    def _ask(
        self,
        key: tuple[str, str],
        workload: str,
        method: Any,
        request: Any,
        take: Callable[[Any], bool],
        miss: Callable[[], bool] | None = None,
    ) -> None:
        """`take` gets the answer, and `miss` is called where it is that there is none, both in a thread
        of gRPC's. The leader is woken if they say that it is news."""
        with self._lock:
            if key in self._asked:
                return
            self._asked.add(key)

        def answered(call: Any) -> None:
            with self._lock:
                self._asked.discard(key)
            if self._ends.is_set():
                return
            code = call.code()
            is_new_refusal = key[0] == WORKLOAD and self._note_refusal(workload, call)
            if code is grpc.StatusCode.OK:
                is_news = take(call.result())
            elif code is grpc.StatusCode.NOT_FOUND and miss is not None:
                is_news = miss()
            else:  # it is asked for again, by the next decision
                is_news = is_new_refusal
                log.warning("The Cluster Server did not do it (%s %s): %s", *key, _why(call))
                with self._lock:
                    self._faults += 1
            if is_news:
                self._changed(workload)

        method.future(request, timeout=CALL_SECONDS).add_done_callback(answered)

    def _note_refusal(self, workload: str, call: Any) -> bool:
        """Returns whether it is refused for another reason than before."""
        with self._lock:
            before = self._refusals.pop(workload, "")
            if call.code() not in REFUSES:
                return False
            why = excerpt(call.details() or call.code().name)
            self._refusals[workload] = f"The Cluster Server refuses it: {why}"
            return self._refusals[workload] != before


def _known(told: pb.Workload) -> Known:
    found = {one.name: storable(one) for one in told.instances}
    generation = min(told.generation, GENERATION_MAX)
    statuses = {name: status_of(one) for name, one in found.items()}
    return Known(generation, statuses=statuses, told=found)


def _why(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
