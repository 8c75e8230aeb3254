"""One instance: its worker, what its runner reports, and what is shown of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from cluster_server.kubernetes import names, objects, runners
from cluster_server.kubernetes.api import (
    CONFIG_MAP,
    POD,
    SECRET,
    Api,
    Document,
    Missing,
    Refused,
    Taken,
    Unavailable,
)
from cluster_server.kubernetes.core import (
    Outcome,
    PodSeen,
    RecordSeen,
    Step,
    next_step,
    outcome,
    own_word,
    read_pod,
    read_record,
)
from cluster_server.kubernetes.mirror import Mirror
from cluster_server.kubernetes.objects import About, Known, PodSettings
from cluster_server.pod.runner import Report
from cluster_server.processes.core import Goal
from cluster_server.processes.instance import ASK_AGAIN_SECONDS, ASK_AGAIN_SECONDS_MAX, but_minor
from cluster_server.processes.manager_status import is_own_fault
from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import Malformed, excerpt

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.5  # after the API server has refused; then twice as long each time, up to
RETRY_SECONDS_MAX: Final = 30.0
FIRST_ANSWER_SECONDS: Final = 60.0  # that a manager has to answer this server for the first time


class Cluster:
    """What all instances share."""

    def __init__(self, api: Api, maps: Mirror, pods: Mirror, settings: PodSettings) -> None:
        self.api = api
        self.maps = maps
        self.pods = pods
        self.settings = settings


class InstanceWorker:
    """`on_change(worker, is_minor)`: its status is another one. `about`: None where its ConfigMap was
    lost."""

    def __init__(
        self,
        name: str,
        wanted: Known | None,
        about: About,
        cluster: Cluster,
        on_change: Callable[[InstanceWorker, bool], None],
        on_gone: Callable[[InstanceWorker], None],
    ) -> None:
        self.name = name
        self.workload = about.workload
        self.wanted = wanted
        self.status = pb.InstanceStatus()
        self.is_known = asyncio.Event()  # its status is what its manager has told this server, if it can
        self._about = about
        self._cluster = cluster
        self._on_change = on_change
        self._on_gone = on_gone
        self._record: RecordSeen | None = None
        self._grace_seconds = wanted.grace_seconds if wanted else 30
        self._pod: PodSeen | None = None
        self._last: PodSeen | None = None  # its pod, as it was before it was gone
        self._told: Report | None = None
        self._told_at = 0.0
        self._is_overdue = False
        self._unasked = ""  # why its runner can't be asked
        self._problem = ""
        self._is_met = False
        self._lost_at = 0.0  # when its ConfigMap was found to be gone
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked = ("", 0, "", "")
        self._show()

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def let_go(self) -> None:
        for task in (self._asking, self._task):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def want(self, wanted: Known | None) -> None:
        """None: it should end, and be forgotten."""
        self.wanted = wanted
        if wanted:
            self._grace_seconds = wanted.grace_seconds
        self._look()

    def end(self, seconds_max: float) -> None:
        """End it within a shorter time than it has at other times."""
        self._grace_seconds = max(1, min(self._grace_seconds, int(seconds_max)))
        self.want(None)

    def meet(self, record: Document | None, pod: Document | None) -> None:
        """What there is of it. The first call, before `begin`."""
        self._is_met = True
        self._pod = read_pod(pod) if pod else None
        self.see_record(record)

    def see_record(self, document: Document | None) -> None:
        self._record = read_record(document) if document else None
        self._lost_at = 0.0 if document else self._lost_at or time.time()
        if self._record and not self.wanted:
            self._grace_seconds = self._record.grace_seconds or self._grace_seconds
        self._look()

    def see_pod(self, document: Document | None) -> None:
        self._last = self._pod or self._last
        self._pod = read_pod(document) if document else None
        self._look()

    @property
    def is_done(self) -> bool:
        return self.wanted is None and self._record is None and self._pod is None

    # Its steps

    async def _run(self) -> None:
        pause = RETRY_SECONDS
        while not self.is_done:
            self._wake.clear()
            try:
                step = next_step(self._goal(), self._record, self._pod)
                if step is Step.WAIT:
                    await self._wake.wait()
                    continue
                await self._do(step)
            except (Unavailable, Refused, Taken, Missing) as error:
                self._show_problem(str(error))
            except Exception as error:  # that nobody has foreseen: it is no end of its worker
                if repr(error) != self._problem:
                    log.exception("%s can't be looked after", self.name)
                self._show_problem(repr(error))
            else:
                pause = RETRY_SECONDS
                self._show_problem("")
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            pause = min(pause * 2, RETRY_SECONDS_MAX)
        self._stop_asking()
        self._on_gone(self)

    async def _do(self, step: Step) -> None:
        api, maps = self._cluster.api, self._cluster.maps
        record = names.instance_map(self.name)
        match step:
            case Step.CREATE if self.wanted and self._record:
                await self._create(self.wanted, self._record)
            case Step.NOTE if self._pod:
                maps.take(await api.merge(CONFIG_MAP, record, _annotated(names.POD_UID, self._pod.uid)))
            case Step.SETTLE if goal := self._goal():
                how = outcome(goal, self._pod, self._last, time.time())
                said = msgspec.json.encode(how).decode()
                maps.take(await api.merge(CONFIG_MAP, record, _annotated(names.OUTCOME, said)))
                log.info("%s: %s", self.name, how.sentence)
            case Step.END:
                await api.delete(POD, self.name, self._grace_seconds)
                await self._deleted()
            case Step.FORGET:
                # The garbage collector would do it as well, a while later.
                await api.delete(SECRET, record)
                await api.delete(CONFIG_MAP, record)
                maps.drop(record)
                log.info("%s: gone", self.name)

    async def _create(self, wanted: Known, record: RecordSeen) -> None:
        document = objects.instance_pod_document(wanted, self._about, record.uid, self._cluster.settings)
        try:
            made = await self._cluster.api.create(POD, document)
        except Taken:
            # By a server before this one, and not reported yet; or by somebody else.
            made = await self._cluster.api.get(POD, self.name)
            if not objects.is_owned(made, record.uid):
                raise Refused(f"There is a pod {self.name} already, which is not ours.") from None
        self._cluster.pods.take(made)

    async def _deleted(self) -> None:
        """Take what has become of its pod, before the watch reports it."""
        try:
            self._cluster.pods.take(await self._cluster.api.get(POD, self.name))
        except Missing:
            self._cluster.pods.drop(self.name)

    def _goal(self) -> Goal | None:
        return self.wanted.goal if self.wanted else None

    def _look(self) -> None:
        """Something is new."""
        pod = self._pod
        if pod and pod.is_running and pod.address and not pod.has_ended:
            asked = (pod.uid, pod.restarts, pod.address, self.wanted.goal if self.wanted else "")
            if self._asking is None or asked != self._asked:
                if asked[:3] != self._asked[:3]:
                    self._told, self._is_overdue = None, False
                self._stop_asking()
                self._asked = asked
                self._asking = asyncio.create_task(self._ask(pod.address, asked[3]))
        else:
            self._stop_asking()
            self._told, self._is_overdue = None, False
            self.is_known.set()
        self._show()
        self._wake.set()

    # What its manager says

    def _stop_asking(self) -> None:
        if self._asking:
            self._asking.cancel()
            self._asking, self._unasked = None, ""

    async def _ask(self, address: str, goal: str) -> None:
        runner = runners.Conversation(address, self._cluster.settings.runner_key(self.name))
        pause, before, began = ASK_AGAIN_SECONDS, "", time.monotonic()
        while True:
            try:
                self._take(await runner.ask(goal))
            except Exception as error:  # also what nobody has foreseen: it is asked again
                if is_own_fault(error):
                    if repr(error) != self._unasked:
                        log.exception("%s: its runner can't be asked", self.name)
                    self._unasked = repr(error)
                else:
                    is_late = isinstance(error, TimeoutError) or pause > ASK_AGAIN_SECONDS * 8
                    if self._told is None:  # it may be starting
                        is_late = time.monotonic() - began >= FIRST_ANSWER_SECONDS
                    self._is_overdue = self._is_overdue or is_late
                    if isinstance(error, Malformed) and str(error) != before:
                        before = str(error)
                        log.warning("%s: the report of its runner is unusable: %s", self.name, error)
                    self._unasked = ""
            else:
                pause = ASK_AGAIN_SECONDS
                continue
            self._try_to_show()
            await asyncio.sleep(pause)
            pause = min(pause * 2, ASK_AGAIN_SECONDS_MAX)

    def _take(self, report: Report) -> None:
        self._is_overdue, self._unasked = False, ""
        if report.manager:
            self._told, self._told_at = report, time.time()
            self.is_known.set()
        self._show()

    # What is shown

    def _show_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("%s: %s", self.name, problem)
        self._problem = problem
        self._try_to_show()

    def _try_to_show(self) -> None:
        try:
            self._show()
        except Exception:  # that nobody has foreseen: what is to be done is done all the same
            log.exception("%s: its status can't be shown", self.name)

    def _show(self) -> None:
        before, self.status = self.status, self._shown()
        if before != self.status:
            self._on_change(self, but_minor(before) == but_minor(self.status))

    def _shown(self) -> pb.InstanceStatus:
        """Its status: the manager's word while it runs, else ours."""
        pod = self._pod
        over = self._outcome() if self.wanted else None
        if self._told and self._told.manager and not over:
            status = self._told.manager.message(self.name)
        else:
            status = pb.InstanceStatus(name=self.name, state=pb.PENDING)
            status.reason, status.sentence = own_word(pod)
            status.since = self._since(status)
        if over:
            status.state, status.since = pb.GONE, over.ended_at
            status.reason, status.sentence = over.reason, over.sentence
        elif self.wanted is None or (pod and pod.is_deleted):
            status.state = pb.DRAINING
            status.reason = "Terminating" if self.wanted is None else "Evicted"
            status.sentence = (
                f"It is terminated: what runs {self._grace_seconds:g} s after that is killed."
                if self.wanted is None
                else f"Its pod on {pod.node if pod else ''} is being ended by others, as a drain does."
            )
            status.since = (pod.deleted_at if pod else 0.0) or self._since(status)
        elif self._problem:
            status.reason, status.sentence = "Refused", excerpt(self._problem, 500)
        elif self._unasked:
            status.reason = "ManagerSilent"
            status.sentence = excerpt(f"Its manager can't be asked: {self._unasked}", 500)
        elif self._is_overdue:
            status.reason = "ManagerSilent"
            status.sentence = (
                "Its manager does not answer. What is shown is what it has said last."
                if self._told
                else "Its manager runs, and has never answered this server: can it reach the pod?"
            )
        status.host = pod.node if pod else ""
        status.seen_at = self._told_at
        status.boxes.extend(self._about.boxes)
        return status

    def _outcome(self) -> Outcome | None:
        if self._record:
            return self._record.outcome
        if self._is_met and self._pod is None:
            return Outcome("RecordLost", "Its ConfigMap was deleted by others.", self._lost_at)
        return None

    def _since(self, status: pb.InstanceStatus) -> float:
        same = (self.status.state, self.status.reason) == (status.state, status.reason)
        return self.status.since if same and self.status.since else time.time()


def _annotated(name: str, value: str) -> Document:
    return {"metadata": {"annotations": {name: value}}}
