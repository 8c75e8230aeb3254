"""One wsjob: what is next, its worker, and what is shown of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from cluster_server.kubernetes import names, objects, runners
from cluster_server.kubernetes.api import (
    CONFIG_MAP,
    POD,
    SECRET,
    WSJOB,
    Document,
    Forbidden,
    Kind,
    Missing,
    Refused,
    Taken,
    Unavailable,
)
from cluster_server.kubernetes.core import PodSeen, how, read_pod
from cluster_server.kubernetes.instance import RETRY_SECONDS, RETRY_SECONDS_MAX, Cluster
from cluster_server.kubernetes.mirror import Mirror
from cluster_server.kubernetes.objects import WsJob
from cluster_server.pod.runner import RESULT_BYTES_MAX, TOO_LARGE, JobReport, Report
from cluster_server.processes.core import CANCEL_SECONDS
from cluster_server.processes.instance import ASK_AGAIN_SECONDS, ASK_AGAIN_SECONDS_MAX
from cluster_server.processes.job import CANCELLED, DEADLINE, SUCCEEDED
from cluster_server.processes.manager_status import ProgressStatus, is_own_fault
from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import Malformed, excerpt
from telemetry.units import size

log = logging.getLogger(__name__)

INPUTS_SECONDS: Final = 60.0  # from its creation until its ConfigMap and its Secret have to be there
INPUTS_AGAIN_SECONDS: Final = 5.0  # between two looks for them
LET_GO_SECONDS: Final = 60.0  # from its end until a pod whose runner does not answer is deleted
START_SECONDS: Final = 900.0  # from when its pod has a node until its container has to run
FORBIDDEN_SECONDS: Final = 60.0  # for which a result may be refused by rights, which change
STATES: Final = {
    "Pending": pb.JOB_PENDING,
    "Running": pb.JOB_RUNNING,
    "Succeeded": pb.JOB_SUCCEEDED,
    "Failed": pb.JOB_FAILED,
    "Cancelled": pb.JOB_CANCELLED,
}


class Step(StrEnum):
    HOLD = "hold"  # put the finalizer on: from then on something of it may run
    CREATE = "create"  # its pod
    BEGIN = "begin"  # write down that it runs: from then on it is not started again
    END = "end"  # delete its pod
    SETTLE = "settle"  # write down how it has ended
    LET_GO = "let go"  # its result is stored: its runner may exit
    RELEASE = "release"  # take the finalizer off: nothing of it runs
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Next:
    step: Step
    wake_at: float = float("inf")


def next_step(
    job: WsJob,
    pod: PodSeen | None,
    report: JobReport | None,
    now: float,
    *,
    may_start: bool,
    has_inputs: bool,
) -> Next:
    """`report`: what its runner says, while that answers. `has_inputs`: its ConfigMap and its Secret are
    there, and are ones that it may have."""
    if job.is_deleted:
        if pod is None:
            return Next(Step.RELEASE if job.has_finalizer else Step.WAIT)
        return Next(Step.WAIT if pod.is_deleted else Step.END)
    if job.has_ended:
        if pod is not None and pod.has_ended and pod.has_others:
            return Next(Step.WAIT if pod.is_deleted else Step.END)
        if pod is None or pod.has_ended:
            # Or else its namespace could not be deleted once there is no Cluster Server any more.
            return Next(Step.RELEASE if job.has_finalizer else Step.WAIT)
        return Next(Step.WAIT if pod.is_deleted else Step.LET_GO)
    has_reported = report is not None and report.exit_status is not None
    if has_reported:
        return Next(Step.SETTLE)
    has_begun = bool(job.status.get("startedAt"))
    deadline = deadline_of(job, pod)
    if job.is_cancelled or now >= deadline:
        if pod is None or pod.has_ended:
            return Next(Step.SETTLE)
        if not has_begun and not job.is_cancelled:  # without its pod it would be started again
            return Next(Step.BEGIN if pod.is_running else Step.SETTLE)
        return Next(Step.WAIT if pod.is_deleted else Step.END)
    if pod is None:
        if has_begun:
            return Next(Step.SETTLE)  # its pod is gone, and its result with it
        if not may_start:
            return Next(Step.WAIT)
        if has_inputs:
            return Next(Step.CREATE if job.has_finalizer else Step.HOLD)
        missing_at = job.submitted_at + INPUTS_SECONDS
        again_at = min(missing_at, now + INPUTS_AGAIN_SECONDS)
        return Next(Step.SETTLE if now >= missing_at else Step.WAIT, again_at)
    if pod.has_ended:
        return Next(Step.SETTLE)
    if has_begun:
        return Next(Step.WAIT, deadline)
    if pod.is_running or report is not None:
        return Next(Step.BEGIN)
    late_at = min(deadline, _late_at(pod))
    return Next(Step.SETTLE if now >= late_at else Step.WAIT, late_at)


def _late_at(pod: PodSeen) -> float:
    """When one that has a node has to run. One that waits for a node may wait; one whose volumes never
    come has a turn that others wait for."""
    return pod.scheduled_at + START_SECONDS if pod.scheduled_at else float("inf")


def deadline_of(job: WsJob, pod: PodSeen | None) -> float:
    """From when it runs, or its pod was made. While it waits for its turn it has none: others would use
    it up."""
    # Of when a pod was made Kubernetes says whole seconds, cut off.
    made_at = pod.created_at + 1.0 if pod and pod.created_at else 0.0
    started_at = _seconds(job.status.get("startedAt")) or made_at
    return started_at + job.deadline_seconds if started_at and job.deadline_seconds else float("inf")


@dataclass(frozen=True, slots=True)
class Ending:
    state: str
    reason: str
    sentence: str
    result: str | None = None


def ending(
    job: WsJob, pod: PodSeen | None, report: JobReport | None, now: float, *, lacks: str = ""
) -> Ending:
    """How one has ended that is to be settled. `lacks`: why it cannot be started."""
    status = report.exit_status if report else None
    if report and report.result is not None and status == 0:
        if len(report.result.encode()) <= RESULT_BYTES_MAX:
            return Ending("Succeeded", SUCCEEDED, "", report.result)
        return Ending("Failed", TOO_LARGE, f"Its result has more than {size(RESULT_BYTES_MAX)}.")
    if job.is_cancelled:
        return Ending("Cancelled", CANCELLED, "It was cancelled.")
    if now >= deadline_of(job, pod):
        return Ending("Failed", DEADLINE, f"It has not ended within {job.deadline_seconds} s.")
    if report and status is not None:
        if report.reason:
            return Ending("Failed", excerpt(report.reason, 100), excerpt(report.sentence, 500))
        if status == 0:
            return Ending("Failed", "NoResult", "It has ended without a result.")
        ended = how(status if status > 0 else 128 - status)
        last = f" It said last: {excerpt(report.said_last)}" if report.said_last else ""
        return Ending("Failed", "ExitStatus", f"It has ended{ended}.{last}")
    if pod and pod.has_ended:
        reason, sentence = pod.failed_for
        return Ending(
            "Failed", reason or "PodFailed", sentence or f"Its pod has ended{how(pod.exit_status)}."
        )
    if not job.status.get("startedAt"):
        if lacks:
            return Ending("Failed", "NoInputs", lacks)
        if pod:
            why = pod.waits_for[1] or "the kubelet gives no reason"
            sentence = f"It has not started within {START_SECONDS:g} s: {why}"
            return Ending("Failed", "NotStarted", excerpt(sentence, 500))
    return Ending("Failed", "PodGone", "Its pod was deleted by others, as a drain of a node does.")


class JobWorker:
    """`on_change(worker)`: it is shown in another way. `may_start`: whether it is its turn."""

    def __init__(
        self,
        document: Document,
        cluster: Cluster,
        wsjobs: Mirror,
        may_start: Callable[[JobWorker], bool],
        on_change: Callable[[JobWorker], None],
    ) -> None:
        self.wsjob = objects.read_wsjob(document, cluster.settings)
        self.job = pb.Job()
        self._cluster = cluster
        self._wsjobs = wsjobs
        self._may_start = may_start
        self._on_change = on_change
        self._pod: PodSeen | None = None
        self._report: JobReport | None = None
        self._has_let_go = False
        self._withheld_since = 0.0  # when its result was refused first
        self._lacks = ""
        self._refused = ""  # why its inputs could not be stored
        self._unasked = ""  # why its runner can't be asked
        self._problem = ""
        self._result = b""
        self._is_gone = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked = ""
        self._show()

    @property
    def name(self) -> str:
        return self.wsjob.name

    @property
    def has_ended(self) -> bool:
        return self.wsjob.has_ended or self.wsjob.is_deleted or self._is_gone

    @property
    def has_begun(self) -> bool:
        return not self.has_ended and (self._pod is not None or bool(self.wsjob.status.get("startedAt")))

    @property
    def submitted_at(self) -> float:
        return self.wsjob.submitted_at

    @property
    def ended_at(self) -> float:
        return _seconds(self.wsjob.status.get("endedAt"))

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.wsjob.object)

    def wake(self) -> None:
        self._wake.set()

    def refuse_inputs(self, sentence: str) -> None:
        self._refused = sentence
        self.wake()

    async def let_go(self) -> None:
        for task in (self._asking, self._task):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def see(self, document: Document | None) -> None:
        if document:
            self.wsjob = objects.read_wsjob(document, self._cluster.settings)
        else:
            self._is_gone = True
        self._show()
        self.wake()

    def see_pod(self, document: Document | None) -> None:
        if document and not objects.is_owned(document, self.wsjob.uid):
            document = None  # of another wsjob, which had this name
        self._pod = pod = read_pod(document) if document else None
        if pod and pod.is_running and pod.address and not pod.has_ended:
            if self._asked != pod.address:
                self._stop_asking()
                self._asked = pod.address
                self._asking = asyncio.create_task(self._ask(pod.address))
        else:
            self._stop_asking()
        self._show()
        self.wake()

    async def _run(self) -> None:
        pause = RETRY_SECONDS
        while not self._is_gone:
            self._wake.clear()
            now = time.time()
            try:
                decided = await self._next(now)
                if decided.step is Step.WAIT or (decided.step is Step.LET_GO and self._has_let_go):
                    self._show_problem("")
                    await self._note()
                    await self._wait(decided.wake_at - now)
                    continue
                await self._do(decided.step)
            except (Unavailable, Refused, Taken, Missing, OSError) as error:
                self._show_problem(str(error))
            except Exception as error:  # that nobody has foreseen: it is no end of its worker
                if repr(error) != self._problem:
                    log.exception("wsjob %s can't be looked after", self.name)
                self._show_problem(repr(error))
            else:
                pause = RETRY_SECONDS
                self._show_problem("")
                continue
            await self._wait(pause)
            pause = min(pause * 2, RETRY_SECONDS_MAX)
            await self._note_problem()
        self._stop_asking()
        self._on_change(self)

    async def _note_problem(self) -> None:
        try:
            with contextlib.suppress(Unavailable, Refused, Taken, Missing):
                await self._note()
        except Exception as error:
            if repr(error) != self._problem:
                log.exception("wsjob %s can't be told why it waits", self.name)
            self._show_problem(repr(error))

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if seconds == float("inf") else max(seconds, 0.0)):
                await self._wake.wait()

    async def _next(self, now: float) -> Next:
        """What its pod is made of is looked at just before that."""

        def step(*, has_inputs: bool) -> Next:
            may_start = self._may_start(self)
            return next_step(
                self.wsjob, self._pod, self._report, now, may_start=may_start, has_inputs=has_inputs
            )

        decided = step(has_inputs=True)
        if decided.step in (Step.CREATE, Step.HOLD):
            self._lacks = await self._find_inputs()
            decided = step(has_inputs=not self._lacks)
        return decided

    async def _find_inputs(self) -> str:
        """What it lacks, in a sentence."""
        wsjob = self.wsjob
        found = await self._found(CONFIG_MAP, wsjob.config_map)
        lacks = objects.why_no_inputs(wsjob, found, self._cluster.settings)
        if not lacks and wsjob.secret:
            lacks = objects.why_no_secret(wsjob, await self._found(SECRET, wsjob.secret))
        return excerpt(f"{lacks} {self._refused}".strip(), 500) if lacks else ""

    async def _found(self, kind: Kind, name: str) -> Document | None:
        if not names.is_object(name):  # it would be a part of a path
            return None
        try:
            return await self._cluster.api.get(kind, name)
        except Missing:
            return None

    async def _do(self, step: Step) -> None:
        api, job = self._cluster.api, self.wsjob
        pod = names.job_pod(job.object)
        match step:
            case Step.HOLD:
                await self._write_finalizers(*job.finalizers, names.FINALIZER)
            case Step.CREATE:
                await self._create()
            case Step.BEGIN:
                await self._write(state="Running", reason="", sentence="", startedAt=_when(time.time()))
            case Step.END:
                await api.delete(POD, pod, int(CANCEL_SECONDS))
                await self._pod_deleted(pod)
            case Step.SETTLE:
                await self._settle()
            case Step.LET_GO:
                await self._let_go_of(pod)
                self._has_let_go = True
            case Step.RELEASE:
                others = [one for one in job.finalizers if one != names.FINALIZER]
                await self._write_finalizers(*others)

    async def _create(self) -> None:
        api, job, settings = self._cluster.api, self.wsjob, self._cluster.settings
        key = objects.job_key_document(job, settings)
        try:
            await api.create(SECRET, key)
        except Taken:  # by an attempt before this one, or for a wsjob that had this name
            await api.delete(SECRET, key["metadata"]["name"])
            await api.create(SECRET, key)
        try:
            made = await api.create(POD, objects.job_pod_document(job, settings))
        except Taken:
            made = await api.get(POD, names.job_pod(job.object))
            if not objects.is_owned(made, job.uid):
                raise
        self._cluster.pods.take(made)

    async def _let_go_of(self, name: str) -> None:
        """Raises OSError where its runner has not heard of it yet, and Unavailable."""
        pod = self._pod
        if pod and pod.address and pod.is_running:
            key = self._cluster.settings.runner_key(f"wsjob/{self.wsjob.object}")
            try:
                await runners.let_go(pod.address, key)
            except (OSError, Malformed) as error:
                if time.time() < self.ended_at + LET_GO_SECONDS:
                    raise OSError(f"Its runner does not answer: {error}") from None
            else:
                return
        await self._cluster.api.delete(POD, name, int(CANCEL_SECONDS))

    async def _pod_deleted(self, name: str) -> None:
        try:
            self._cluster.pods.take(await self._cluster.api.get(POD, name))
        except Missing:
            self._cluster.pods.drop(name)

    async def _settle(self) -> None:
        now, job, api = time.time(), self.wsjob, self._cluster.api
        how_ended = ending(job, self._pod, self._report, now, lacks=self._lacks)
        status: dict[str, Any] = {}
        if (result := how_ended.result) is not None:
            document = objects.job_result_document(job, result)
            try:
                await api.apply(CONFIG_MAP, document)
            except Refused as error:  # the job has ended, and waits for nothing that will not come
                self._withheld_since = self._withheld_since or now
                if isinstance(error, Forbidden) and now < self._withheld_since + FORBIDDEN_SECONDS:
                    raise
                how_ended = Ending("Failed", "ResultRefused", excerpt(str(error), 500))
            else:
                self._result = result.encode()
                status["resultConfigMap"] = document["metadata"]["name"]
        await self._write(
            state=how_ended.state,
            reason=how_ended.reason,
            sentence=how_ended.sentence,
            endedAt=_when(now),
            **status,
        )
        log.info("wsjob %s: %s", job.name, how_ended.sentence or how_ended.state)

    async def _write_finalizers(self, *finalizers: str) -> None:
        metadata = {"resourceVersion": self.wsjob.version, "finalizers": list(finalizers) or None}
        await self._take(self._cluster.api.merge(WSJOB, self.wsjob.object, {"metadata": metadata}))

    async def _write(self, **status: Any) -> None:
        """Nothing is written over what this server has not seen: see `_take`."""
        job, now = self.wsjob, _when(time.time())
        if progress := self._progress():
            status["progress"] = progress
        # What says nothing is left out, or taken away by null where there is something.
        status = {name: value or None for name, value in status.items() if value or name in job.status}
        status["conditions"] = conditions(job.status.get("conditions", []), status, now)
        change = {"metadata": {"resourceVersion": job.version}, "status": status}
        await self._take(self._cluster.api.merge_status(WSJOB, job.object, change))

    async def _take(self, changing: Awaitable[Document]) -> None:
        """If it has changed meanwhile it is read, and what is next is decided anew."""
        try:
            made = await changing
        except Taken:
            made = await self._cluster.api.get(WSJOB, self.wsjob.object)
        self._wsjobs.take(made)

    async def _note(self) -> None:
        """Have the wsjob itself say why it waits. Raises as requests do."""
        job = self.wsjob
        state = "Running" if job.status.get("startedAt") else "Pending"
        reason, sentence = self._why_it_waits()
        said = tuple(job.status.get(one, "") for one in ("state", "reason", "sentence"))
        if not (job.has_ended or job.is_deleted or said == (state, reason, sentence)):
            await self._write(state=state, reason=reason, sentence=sentence)

    def _progress(self) -> Document | None:
        said = self._report.progress if self._report else None
        if said is None:
            return None
        message = said.message()
        return {
            "done": message.done,
            "total": message.total,
            "unit": message.unit,
            "seconds": message.seconds,
        }

    # What its runner says

    def _stop_asking(self) -> None:
        if self._asking:
            self._asking.cancel()
            self._asking, self._asked, self._unasked = None, "", ""

    async def _ask(self, address: str) -> None:
        key = self._cluster.settings.runner_key(f"wsjob/{self.wsjob.object}")
        runner = runners.Conversation(address, key, runners.RESULT_BYTES_MAX)
        pause = ASK_AGAIN_SECONDS
        while True:
            try:
                if self._take_report(await runner.ask()):
                    return
            except Exception as error:  # also what nobody has foreseen: it is asked again
                why = repr(error) if is_own_fault(error) else ""
                if why and why != self._unasked:
                    log.exception("wsjob %s: its runner can't be asked", self.name)
                self._show_unasked(why)
            else:
                pause = ASK_AGAIN_SECONDS
                continue
            await asyncio.sleep(pause)
            pause = min(pause * 2, ASK_AGAIN_SECONDS_MAX)

    def _take_report(self, report: Report) -> bool:
        """Whether it is the last one."""
        self._show_unasked("")
        if report.job:
            self._report = report.job
            self._show()
            self.wake()
        return report.job is not None and report.job.exit_status is not None

    # What is shown

    async def load_result(self) -> None:
        """Of one that has ended under a server before this one. Raises Unavailable."""
        name = self.wsjob.status.get("resultConfigMap")
        if name and not self._result:
            with contextlib.suppress(Missing):
                found = await self._cluster.api.get(CONFIG_MAP, name)
                self._result = found.get("data", {}).get(objects.RESULT, "").encode()
            self._show()

    def _show_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("wsjob %s: %s", self.name, problem)
        self._problem = problem
        self._try_to_show()

    def _show_unasked(self, why: str) -> None:
        if why != self._unasked:
            self._unasked = why
            self._try_to_show()
            self.wake()  # the wsjob itself says it, too

    def _try_to_show(self) -> None:
        try:
            self._show()
        except Exception:  # that nobody has foreseen: what is to be done is done all the same
            log.exception("wsjob %s: its status can't be shown", self.name)

    def _why_it_waits(self) -> tuple[str, str]:
        if self._problem:
            return "Refused", excerpt(self._problem, 500)
        if self._unasked:
            return "RunnerSilent", excerpt(f"Its runner can't be asked: {self._unasked}", 500)
        if self._pod:
            return self._pod.waits_for
        if self._lacks:
            return "WaitingForInputs", excerpt(self._lacks, 500)
        return "", ""

    def _show(self) -> None:
        wsjob, status = self.wsjob, self.wsjob.status
        job = pb.Job(
            name=wsjob.name,
            kind=wsjob.kind,
            state=STATES[status.get("state", "Pending")],
            submitted_at=wsjob.submitted_at,
            ended_at=_seconds(status.get("endedAt")),
        )
        if job.ended_at:
            job.reason, job.sentence = status.get("reason", ""), status.get("sentence", "")
        else:
            job.reason, job.sentence = self._why_it_waits()
            if self._report:
                job.state = pb.JOB_RUNNING
        if self._report and self._report.progress:
            job.progress.CopyFrom(self._report.progress.message())
        elif said := status.get("progress"):
            job.progress.CopyFrom(ProgressStatus(**said).message())
        if job.state == pb.JOB_SUCCEEDED:
            job.result = self._result
        if job != self.job:
            self.job = job
            self._on_change(self)


def conditions(before: list[Document], status: Document, now: str) -> list[Document]:
    """`Started` and `Complete`, as Kubernetes' conventions have them: each with a time of its last
    transition."""
    state = status["state"]
    wanted = {
        "Started": "Unknown" if state == "Pending" else "True",
        "Complete": "True" if status.get("endedAt") else "False",
    }
    known = {one["type"]: one for one in before}
    made = []
    for kind, value in wanted.items():
        old = known.get(kind)
        made.append(
            {
                "type": kind,
                "status": value,
                "reason": status.get("reason") or state,
                "message": status.get("sentence") or f"{state}.",
                "lastTransitionTime": (
                    old["lastTransitionTime"] if old and old["status"] == value else now
                ),
            }
        )
    return made


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _seconds(when: str | None) -> float:
    return datetime.fromisoformat(when).timestamp() if when else 0.0
