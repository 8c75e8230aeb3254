"""One job: its worker, and what is shown of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from cluster_server.processes.core import Memory, Next, Running, Seen, Step, next_for_job
from cluster_server.processes.folder import About
from cluster_server.processes.keeper import Keeper, Launch
from cluster_server.processes.kernel import BEGUN
from cluster_server.processes.log_file import LogFile, last_line
from cluster_server.processes.manager_status import ProgressStatus
from cluster_server.processes.surroundings import Surroundings
from cluster_server.processes.worker import Worker
from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import MESSAGE, Malformed, decode, excerpt

RESULT_BYTES_MAX: Final = 1 << 20
NOTE_BYTES_MAX: Final = 64 << 10
PROGRESS_SECONDS: Final = 0.5  # between two looks at it
CANCELLED_FILE: Final = "cancelled"
CANCELLED: Final = "Cancelled"
SUCCEEDED: Final = "Succeeded"
DEADLINE: Final = "DeadlineExceeded"


class _Error(msgspec.Struct, frozen=True):
    reason: str = ""
    sentence: str = ""


class JobWorker(Worker):
    """Its folder is there, so it was submitted. `may_start`: whether it is its turn."""

    def __init__(
        self,
        keeper: Keeper,
        around: Surroundings,
        may_start: Callable[[JobWorker], bool],
        on_change: Callable[[JobWorker], None],
    ) -> None:
        super().__init__(keeper.folder.name, keeper, around)
        self.about = keeper.folder.about()
        self.spec = pb.JobSpec.FromString(self.about.request)
        self.log = LogFile(keeper.folder.log)
        self.is_cancelled = keeper.folder.read(CANCELLED_FILE, 1) is not None
        self._may_start = may_start
        self._on_change = on_change
        self._is_running = False
        self.job = pb.Job()
        self.show()

    @property
    def is_done(self) -> bool:
        return self.keeper.memory.is_over

    @property
    def has_ended(self) -> bool:
        return self.keeper.memory.is_over

    @property
    def has_begun(self) -> bool:
        return self.keeper.process is not None and not self.has_ended

    @property
    def submitted_at(self) -> float:
        return self.about.submitted_at

    @property
    def ended_at(self) -> float:
        return self.keeper.memory.ended_at

    def last_seen(self) -> float:
        return 0.0

    def decide(self, seen: Seen) -> Next:
        self._is_running = seen.process is Running.YES
        self.show()
        now = self.around.clock.now()
        decided = next_for_job(
            seen,
            self.keeper.memory,
            now,
            is_unwanted=self.is_cancelled or self._is_late(),
            may_start=self._may_start(self),
        )
        if decided.step is not Step.WAIT:
            return decided
        wake_at = min(decided.wake_at, self._deadline())
        if self._is_running:
            wake_at = min(wake_at, now + PROGRESS_SECONDS)
        return replace(decided, wake_at=wake_at)

    def do(self, step: Step, seen: Seen) -> None:
        now = self.around.clock.now()
        match step:
            case Step.START:
                self.keeper.start(self._launch(), now)
            case Step.TERMINATE:
                self.keeper.terminate(now)
            case Step.KILL:
                self.keeper.kill()
            case Step.SETTLE:
                self.keeper.settle(self._settled(seen, now))

    def finish(self) -> None:
        self._is_running = False
        self.show()

    def _launch(self) -> Launch:
        kind = pb.JobKind.Name(self.spec.kind).lower()
        return Launch(
            [*self.around.command, kind, "--folder", str(self.keeper.folder.path)],
            self.around.environment_of_processes(),
        )

    def _deadline(self) -> float:
        """While it waits for its turn it has none: others would use it up."""
        process, seconds = self.keeper.process, self.spec.deadline_seconds
        return process.started_at + seconds if process and seconds else float("inf")

    def _is_late(self) -> bool:
        return self.around.clock.now() >= self._deadline()

    def _settled(self, seen: Seen, now: float) -> Memory:
        """How it has ended. One that never began begins again."""
        memory, folder = self.keeper.memory, self.keeper.folder
        is_unwanted = self.is_cancelled or self._is_late()
        if not is_unwanted and folder.read(BEGUN, 0) is None:
            return memory
        reason, sentence = self._outcome(seen.exit_status)
        return replace(memory, is_over=True, reason=reason, sentence=sentence, ended_at=now)

    def _outcome(self, exit_status: int | None) -> tuple[str, str]:
        folder = self.keeper.folder
        has_result = folder.read("result.json", RESULT_BYTES_MAX) is not None
        if has_result and exit_status in (0, None):  # not known: but it is written last
            return SUCCEEDED, ""
        if self.is_cancelled:
            return CANCELLED, "It was cancelled."
        if self._is_late():
            return DEADLINE, f"It has not ended within {self.spec.deadline_seconds} s."
        error = self._read("error.json", _Error)
        if error and error.reason:
            return excerpt(error.reason, 100), excerpt(error.sentence, 500)
        if exit_status == 0:
            return "NoResult", "It has ended without a result."
        how = "" if exit_status is None else f" with exit status {exit_status}"
        said = excerpt(last_line(folder.log), 300)
        return "ExitStatus", f"It has ended{how}." + (f" It said last: {said}" if said else "")

    def _read(self, name: str, kind: type[msgspec.Struct]) -> Any:
        raw = self.keeper.folder.read(name, NOTE_BYTES_MAX)
        try:
            return decode(raw, kind, MESSAGE) if raw else None
        except Malformed:
            return None

    def show(self) -> None:
        memory = self.keeper.memory
        job = pb.Job(
            name=self.name,
            kind=self.spec.kind,
            state=_state(memory, is_running=self._is_running),
            reason=memory.reason,
            sentence=memory.sentence,
            submitted_at=self.about.submitted_at,
            ended_at=memory.ended_at,
        )
        if self.problem and not memory.is_over:
            job.reason, job.sentence = "Refused", excerpt(self.problem, 500)
        if progress := self._read("progress.json", ProgressStatus):
            job.progress.CopyFrom(progress.message())
        if job.state == pb.JOB_SUCCEEDED:
            job.result = self.keeper.folder.read("result.json", RESULT_BYTES_MAX) or b""
        if job != self.job:
            self.job = job
            self._on_change(self)


def _state(memory: Memory, *, is_running: bool) -> pb.JobState:
    if not memory.is_over:
        return pb.JOB_RUNNING if is_running else pb.JOB_PENDING
    return {SUCCEEDED: pb.JOB_SUCCEEDED, CANCELLED: pb.JOB_CANCELLED}.get(memory.reason, pb.JOB_FAILED)


def about_job(spec: pb.JobSpec, now: float) -> About:
    """What is stored of it: not its secrets, but by what they are known again."""
    bare = pb.JobSpec()
    bare.CopyFrom(spec)
    bare.ClearField("secrets")
    return About(
        submitted_at=now,
        request=bare.SerializeToString(deterministic=True),
        secrets_digest=_digest(spec.secrets),
    )


def is_same(spec: pb.JobSpec, about: About) -> bool:
    fresh = about_job(spec, 0.0)
    return (fresh.request, fresh.secrets_digest) == (about.request, about.secrets_digest)


def _digest(secrets: Mapping[str, bytes]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(sorted(secrets.items()))).hexdigest()
