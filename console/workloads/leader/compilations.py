"""Compile jobs of a revision: their attempts, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cluster_server.proto import cluster_pb2 as pb
from console.workloads.leader import rendering, store
from console.workloads.leader.cluster import RUNNING, ClusterLink, compiled, was_interrupted
from console.workloads.leader.loaded import Loaded
from console.workloads.leader.world import CompileSeen, CompileState
from console.workloads.models import SENTENCE_MAX, Revision, Workload
from telemetry.decoder import Malformed, excerpt

SECONDS_MAX: Final = 3600
ATTEMPTS_MAX: Final = 5  # of jobs that others have ended; after that the revision counts as bad
AGAIN_SECONDS: Final = 15.0  # before the second attempt; then twice as long each time
LOOK_SECONDS: Final = 0.25  # until a job that runs is looked at again
ARTIFACTS_MAX: Final = 1000  # remembered


class Compilations:
    """`look_at`: asks for another look at a workload, at a time."""

    def __init__(self, look_at: Callable[[str, float], None], clock: Callable[[], float]) -> None:
        self._look_at = look_at
        self._clock = clock
        self._running: dict[str, list[str]] = {}  # by workload, jobs that may run
        self._artifacts: dict[str, Any] = {}  # the layouts of those that were made, by their address

    def forget(self, name: str) -> None:
        self._running.pop(name, None)

    def seen(self, loaded: Loaded, link: ClusterLink) -> CompileSeen:
        """How the target's compile job is, as far as is known. What it has made is written down."""
        revision = loaded.workload.revision
        if revision is None or loaded.intent.revision.is_compiled or loaded.intent.deleting:
            return CompileSeen()
        address = rendering.artifact_address(loaded.workload, revision)
        if address in self._artifacts:  # the same inputs never compile twice
            store.take_artifact(loaded, revision, address, self._artifacts[address])
            self._look_at(loaded.workload.name, 0.0)
            return CompileSeen(state=CompileState.RUNNING)
        attempt = self._attempt(loaded.workload, revision, link)
        job = link.job(loaded.workload.name, rendering.compile_name(revision, attempt))
        if job is None:
            return self._before(loaded, link, revision, attempt)
        if job.state in RUNNING:
            self._look_at(loaded.workload.name, self._clock() + LOOK_SECONDS)
            return CompileSeen(state=CompileState.RUNNING)
        if job.state != pb.JOB_SUCCEEDED:
            said = excerpt(job.sentence or job.reason, SENTENCE_MAX)
            return CompileSeen(state=CompileState.FAILED, sentence=said)
        try:
            result = compiled(job.result)
        except Malformed as error:
            return CompileSeen(state=CompileState.FAILED, sentence=f"Its result is none: {error}.")
        store.take_artifact(loaded, revision, result.sha256, result.layout)
        if result.sha256 == address:
            self._remember(address, result.layout)
        self._look_at(loaded.workload.name, 0.0)
        return CompileSeen(state=CompileState.RUNNING)

    def submit(self, workload: Workload, revision: Revision, link: ClusterLink) -> None:
        attempt = self._attempt(workload, revision, link)
        link.submit(workload.name, _compile_job(workload, revision, attempt))

    def cancel_superseded(self, loaded: Loaded, link: ClusterLink) -> bool:
        """Jobs whose result nobody waits for: of the workload's jobs one runs at a time. Whether some
        could not be cancelled yet."""
        workload, revision = loaded.workload, loaded.workload.revision
        known, wanted = self._running.setdefault(workload.name, []), ""
        if revision is not None and not workload.deleting and not loaded.intent.revision.is_compiled:
            wanted = rendering.compile_name(revision, self._attempt(workload, revision, link))
            if wanted not in known:
                known.append(wanted)
        known[:] = [one for one in known if one == wanted or not link.cancel(workload.name, one)]
        return any(one != wanted for one in known)

    @staticmethod
    def _attempt(workload: Workload, revision: Revision, link: ClusterLink) -> int:
        """Which compile job of a revision counts: those before it were ended by others."""
        for attempt in range(1, ATTEMPTS_MAX):
            job = link.job(workload.name, rendering.compile_name(revision, attempt))
            if job is None or not was_interrupted(job):
                return attempt
        return ATTEMPTS_MAX

    def _before(
        self, loaded: Loaded, link: ClusterLink, revision: Revision, attempt: int
    ) -> CompileSeen:
        """Nothing, unless a job was ended just before: a node or a bucket may be away for a while."""
        workload = loaded.workload
        name = rendering.compile_name(revision, attempt - 1)
        before = link.job(workload.name, name) if attempt > 1 else None
        seconds = AGAIN_SECONDS * 2 ** max(attempt - 2, 0)
        # The clock of another machine that is ahead says nothing of when it ended.
        if before is None or not 0 <= self._clock() - before.ended_at < seconds:
            return CompileSeen()
        self._look_at(workload.name, before.ended_at + seconds)
        said = excerpt(before.sentence or before.reason, SENTENCE_MAX)
        return CompileSeen(state=CompileState.RUNNING, sentence=said)

    def _remember(self, address: str | None, layout: Any) -> None:
        if address is not None:
            self._artifacts[address] = layout
            if len(self._artifacts) > ARTIFACTS_MAX:
                del self._artifacts[next(iter(self._artifacts))]


def _compile_job(workload: Workload, revision: Revision, attempt: int) -> pb.JobSpec:
    return pb.JobSpec(
        name=rendering.compile_name(revision, attempt),
        kind=pb.COMPILE,
        spec=rendering.compile_spec(workload, revision),
        secrets=rendering.compile_secrets(revision),
        deadline_seconds=SECONDS_MAX,
    )
