"""The orchestrator's acting half: one of any number leads, looks at workloads and acts on decisions.

What wakes it: the cluster's watch, hints of PostgreSQL that intent has changed, and the time at which a
decision said that it would be another one. What it misses is found by a slow look at all workloads.
Whatever it was doing when it was killed, the next leader sees what has been done, and decides.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import psycopg
import redis
from django.conf import settings
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import Error as DatabaseError
from django.db import connection
from django.http import Http404

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.database_address import conninfo
from console.fleet.models import ProcessKind
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.services import Busy, StalePlan
from console.placement.rules import Cause
from console.placement.topology import Misconfigured
from console.placement.topology import State as BoxState
from console.routing import services as routing
from console.sessions import services as sessions
from console.sessions.changes import driver_removal, jobs, sizes
from console.sessions.changes.requests import of_job
from console.sessions.models import WAIT_SECONDS_MAX
from console.sessions.plans.proposals import CannotPlan
from console.workloads import changes, lifecycle, plans
from console.workloads import services as workloads
from console.workloads.leader import health, rendering, store
from console.workloads.leader.cluster import RUNNING, ClusterLink, compiled, was_interrupted
from console.workloads.leader.decisions import decide
from console.workloads.leader.election import ORCHESTRATORS, TRY_SECONDS, Election, NotLeader
from console.workloads.leader.endpoints import EndpointWriter
from console.workloads.leader.figures import Figures
from console.workloads.leader.store import Loaded
from console.workloads.leader.world import (
    CancelJob,
    Compile,
    CompileSeen,
    CompileState,
    Complete,
    Decision,
    DeleteSession,
    EndJob,
    Forget,
    Home,
    Pause,
    RemoveHome,
    RemovePlace,
    RollBack,
    SetPlace,
    SizeSession,
    StartJob,
    Traffic,
)
from console.workloads.models import SENTENCE_MAX, Revision, Workload
from telemetry import hints
from telemetry.decoder import Malformed, excerpt
from telemetry.events import NewEvent, note_all
from telemetry.notify import notify
from telemetry.queries import Unanswerable
from telemetry.topics import SESSION, WORKLOAD

log = logging.getLogger(__name__)

LOCK: Final = ORCHESTRATORS
IDLE_SECONDS: Final = 0.5  # between two rounds without news
POLL_SECONDS: Final = 5.0  # between two looks at which workloads there are, and whether they changed
UNSETTLED_SECONDS: Final = 5.0  # until one is looked at again that is not what it is to be
RESYNC_SECONDS: Final = 180.0  # until each workload has been looked at, whether there was news or not
REFRESH_SECONDS: Final = 10.0  # between two looks at whose endpoints have to be written again
AGAIN_SECONDS: Final = 1.0  # until something is tried again, or asked for again, that takes its time
HEALTH_SECONDS: Final = 10.0
BROKEN_SECONDS: Final = 30.0  # until one is looked at again with which something is wrong
COMPILE_SECONDS_MAX: Final = 3600
COMPILE_ATTEMPTS_MAX: Final = 5  # of jobs that others have ended; after that the revision counts as bad
COMPILE_AGAIN_SECONDS: Final = 15.0  # before the second attempt; then twice as long each time
ORPHANS_AT_ONCE: Final = 20  # workloads of the cluster that nobody knows, ended in one look
ARTIFACTS_MAX: Final = 1000  # remembered
KEY_BYTES: Final = 32
NO_TRAFFIC: Final = (Traffic(), Traffic())
HOME: Final = re.compile(r"(.+)-\d+-\d+")  # the name of a driver
ALL: Final = ""  # in the queue of news: every workload
# What a service of the console says where it can't be done, or not now.
REFUSALS: Final = (
    *(Busy, StalePlan, CannotPlan, Misconfigured, Impossible, ValidationError),
    *(PermissionDenied, Http404, sizes.JobsRun),
)


class News:
    """What has to be looked at, from any thread, in the order in which it came."""

    def __init__(self) -> None:
        self._names: deque[str] = deque()
        self._lock = threading.Lock()
        self._there = threading.Event()

    def add(self, name: str | None) -> None:
        with self._lock:
            if (name or ALL) not in self._names:
                self._names.append(name or ALL)
        self._there.set()

    def take(self, seconds: float) -> list[str]:
        """Wait so long for some."""
        self._there.wait(seconds)
        with self._lock:
            found = list(self._names)
            self._names.clear()
            self._there.clear()
        return found


class Orchestrator:
    """Used by one thread. `link`: to the Cluster Server, opened by whoever made it."""

    def __init__(
        self,
        election: Election,
        writer: EndpointWriter,
        make_link: Callable[[Callable[[str | None], None]], ClusterLink],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.figures = Figures()
        self.news = News()
        self._election = election
        self._writer = writer
        self._make_link = make_link
        self._link: ClusterLink | None = None
        self._clock = clock
        self._refused: dict[str, dict[Home, str]] = {}  # jobs that could not be started, by workload
        self._due: list[tuple[float, str]] = []
        self._due_at: dict[str, float] = {}
        self._looked_at: dict[str, float] = {}
        self._generations: dict[str, int] = {}
        self._models: dict[str, str] = {}
        self._traffic: dict[str, tuple[int, float, tuple[Traffic, Traffic]]] = {}  # with its rollout
        self._compiling: dict[str, list[str]] = {}  # by workload, jobs that may run
        self._artifacts: dict[str, Any] = {}  # the layouts of those that were made, by their address
        self._poll_at = self._refresh_at = 0.0
        self._round_at = 0.0
        # What brains of a workload's model were told; None: by whoever led before.
        self._last: dict[str, tuple[str, list[tuple[str, Any]] | None]] = {}
        self._was_stale = True

    # Rounds

    def round(self) -> float:
        """Do what is due. Returns after how many seconds to come again."""
        try:
            return self._round()
        except (NotLeader, DatabaseError) as error:
            log.warning("It leads no more: %s", str(error) or "its connection has ended")
            self._step_down()
            return TRY_SECONDS
        finally:
            self.figures.leads = self._election.is_leader

    def _round(self) -> float:
        if not self._election.is_leader:
            if not self._election.run():
                return TRY_SECONDS
            self._take_over()
        self._election.check()
        now = self._clock()
        if now < self._round_at:  # it was set back: all that waits for a time would wait as much longer
            self._poll_at = self._refresh_at = 0.0
            self._looked_at.clear()
            self._traffic.clear()
            self._soon(ALL)
        self._round_at = now
        if now >= self._poll_at:
            self._poll(now)
        for name in self._wanted(now):
            self._look_at(name)
            notify("WATCHDOG=1")
        if now >= self._refresh_at:
            self._refresh(now)
        self._note_links()
        return 0.0

    def wait(self, seconds_max: float = IDLE_SECONDS) -> None:
        """Until there is news, or something is due."""
        if not self._election.is_leader:
            return
        left = self._due[0][0] - self._clock() if self._due else seconds_max
        for name in self.news.take(max(0.0, min(left, seconds_max))):
            self._soon(name)

    def stop(self) -> None:
        """Let another one lead at once."""
        self._step_down()
        self._writer.close()

    def _take_over(self) -> None:
        """From nothing: what was told to brains, and what the cluster says."""
        self.figures.led += 1
        self._due, self._due_at = [], {}
        self._looked_at.clear()
        self._generations.clear()
        self._last.clear()
        self._poll_at = self._refresh_at = 0.0
        models = list(Workload.objects.exclude(served=None).values_list("model", flat=True))
        try:
            self._writer.read(models)
        except redis.RedisError as error:
            self._fault("redis", error)
        self._link = self._make_link(self.news.add)
        self._link.open()

    def _step_down(self) -> None:
        self._election.lose()
        if self._link is not None:
            self._link.close()
            self._link = None

    # What is due

    def _soon(self, name: str, at: float = 0.0) -> None:
        names = list(self._generations) if name == ALL else [name]
        for one in names:
            if at < self._due_at.get(one, float("inf")):
                self._due_at[one] = at
                heapq.heappush(self._due, (at, one))

    def _wanted(self, now: float) -> list[str]:
        found = []
        while self._due and self._due[0][0] <= now:
            at, name = heapq.heappop(self._due)
            if self._due_at.get(name) == at:
                del self._due_at[name]
                found.append(name)
        return found

    def _poll(self, now: float) -> None:
        """Which workloads there are; of whom a hint was missed, and at whom nobody looked for long."""
        self._poll_at = now + POLL_SECONDS
        found = dict(Workload.objects.values_list("name", "generation"))
        for name, generation in found.items():
            if self._generations.get(name) != generation:
                self._generations[name] = generation
                self._soon(name)
        for name in self._longest_left(now):
            self._soon(name)
        draining = Workload.objects.filter(session__boxes__box__state=BoxState.DRAINING.value)
        for name in draining.values_list("name", flat=True).distinct():
            self._soon(name)
        for name in self._generations.keys() - found.keys():
            self._forget(name)
        self.figures.workloads = len(found)
        if self._link is not None and not self._link.is_stale:
            for name in list(self._link.names() - found.keys())[:ORPHANS_AT_ONCE]:
                self._end_orphan(name)

    def _longest_left(self, now: float) -> list[str]:
        """A few at a time: all at once would hold up who has news."""
        before = now - RESYNC_SECONDS / 2
        left = [name for name in self._generations if self._looked_at.get(name, 0.0) < before]
        count = math.ceil(len(self._generations) * POLL_SECONDS / RESYNC_SECONDS)
        return heapq.nsmallest(count, left, key=lambda name: self._looked_at.get(name, 0.0))

    def _end_orphan(self, name: str) -> None:
        """The cluster runs a workload that nobody knows: its deletion was interrupted."""
        assert self._link is not None  # noqa: S101 - the leader has one
        if not Workload.objects.filter(name=name).exists():
            self._link.delete(name)
            self.figures.actions["DeleteOrphan"] += 1

    def _forget(self, name: str) -> None:
        self._generations.pop(name, None)
        self._looked_at.pop(name, None)
        self._traffic.pop(name, None)
        self._last.pop(name, None)
        self._refused.pop(name, None)
        self._compiling.pop(name, None)
        self._due_at.pop(name, None)
        model = self._models.pop(name, None)
        if model and model not in self._models.values():  # or it is another's by now
            with suppress(redis.RedisError):  # it is gone by itself after a while
                self._writer.forget(model)

    def _refresh(self, now: float) -> None:
        """Keys of workloads without news live on."""
        self._refresh_at = now + REFRESH_SECONDS
        decided_at = self._clock()
        self._election.check()
        try:
            for model, endpoints in self._last.values():
                self._writer.write(model, endpoints, decided_at)
        except redis.RedisError as error:
            self._fault("redis", error)

    def _note_links(self) -> None:
        is_stale = self._link is None or self._link.is_stale
        if self._link is not None:
            self.figures.faults["cluster"] += self._link.take_faults()
        self.figures.is_cluster_there = not is_stale
        self.figures.is_redis_there = self._writer.is_connected
        if is_stale is not self._was_stale:
            self._was_stale = is_stale
            self._soon(ALL)

    # One workload

    def _look_at(self, name: str) -> None:
        try:
            self._decide(name)
        except REFUSALS as error:  # of a session, say
            self._fault("console", error)
            self._again(name)
        except (NotLeader, DatabaseError):
            raise
        except Exception as error:
            # One workload that can't be looked after is no reason not to look after all others.
            log.exception("%s can't be looked after", name)
            self._fault("workload", error)
            self._soon(name, self._clock() + BROKEN_SECONDS)

    def _decide(self, name: str) -> None:
        began = time.perf_counter()
        self._looked_at[name] = self._clock()
        assert self._link is not None  # noqa: S101 - the leader has one
        is_stale, known = self._link.is_stale, self._link.known(name)
        decided_at = self._clock()
        with self._election.acting():
            loaded = store.load(name)
            if loaded is None:
                return
            if not is_stale:
                store.recover(loaded, known)
            refused = self._refused.get(name, {})
            loaded.homes = tuple(replace(one, refused=refused.get(one.home, "")) for one in loaded.homes)
            self._models[name] = loaded.workload.model
            self._generations[name] = loaded.workload.generation
            seen = loaded.seen(
                known,
                self._writer.published(loaded.workload.model),
                self._compiled(loaded),
                self._traffic_of(loaded),
                is_stale=is_stale,
                can_publish=self._writer.is_connected,
                refusal=self._writer.refusal,
            )
            decision = decide(loaded.intent, seen, self._clock())
            serving = {one.instance for one in decision.endpoints if not one.is_draining}
            store.perform(loaded, decision.actions)
            is_news = store.observe(loaded, known, serving)
            is_news |= store.write_conditions(loaded, decision.conditions)
            is_news |= store.advance_rollout(loaded, decision.actions, serving, seen)
            workload = loaded.workload
            if workload.observed_generation != workload.generation:
                workload.observed_generation = workload.generation
                workload.save(update_fields=["observed_generation"])
            if is_news:
                changes.tell(workload, changes.OBSERVED)
            # Late: who adds to the log holds it until the end of the transaction.
            note_all([NewEvent(kind, [workload.topic], said) for kind, said in loaded.news])
        self._publish(loaded, decision, decided_at, is_stale=is_stale)
        self._apply(loaded)
        self._cancel_superseded(loaded)
        self._act(loaded, decision)
        for action in decision.actions:
            self.figures.actions[type(action).__name__] += 1
        if decision.look_at < float("inf"):
            self._soon(name, decision.look_at)
        if not all(one.status for one in decision.conditions):
            self._soon(name, self._clock() + UNSETTLED_SECONDS)
        self.figures.decisions.record(time.perf_counter() - began)

    def _publish(self, loaded: Loaded, decision: Decision, decided_at: float, *, is_stale: bool) -> None:
        """Tell brains. While nobody has heard of the cluster they are told again what they were told."""
        workload = loaded.workload
        if workload.served is None and self._is_of_another(workload):
            self._last.pop(workload.name, None)
            return
        told = [
            (rendering.replica_name(workload, one.ordinal), one) for one in decision.endpoints if one.url
        ]
        last = self._last[workload.name] = (workload.model, None if is_stale else told)
        before = self._writer.published(workload.model)
        try:
            is_news = self._writer.write(*last, decided_at)
        except redis.RedisError as error:
            self._fault("redis", error)
            self._again(workload.name)
            return
        if not is_news:
            return
        now = self._clock()
        for name, one in told:
            known = before.get(name)
            if not one.is_draining and (known is None or known.instance != one.instance):
                self.figures.lag.record(max(0.0, now - one.since))
        self._again(workload.name)  # what follows from brains' knowing

    @staticmethod
    def _is_of_another(workload: Workload) -> bool:
        """Whether another workload serves its model, which one that is being deleted has let go."""
        others = Workload.objects.exclude(pk=workload.pk)
        return others.filter(model=workload.model).exclude(served=None).exists()

    def _apply(self, loaded: Loaded) -> None:
        """Tell the cluster, unless it has been told."""
        workload = loaded.workload
        assert self._link is not None  # noqa: S101 - the leader has one
        if not workload.cluster_generation or self._link.is_stale:
            return
        if workload.deleting and not loaded.rows:
            return  # it is deleted there as a whole
        if self._link.known(workload.name).generation >= workload.cluster_generation:
            return
        self._link.apply(workload.name, workload.cluster_generation, loaded.apply_request())
        self._again(workload.name)

    def _cancel_superseded(self, loaded: Loaded) -> None:
        """Compile jobs whose result nobody waits for: of the workload's jobs one runs at a time."""
        workload, revision = loaded.workload, loaded.workload.revision
        known, wanted = self._compiling.setdefault(workload.name, []), ""
        assert self._link is not None  # noqa: S101 - the leader has one
        if revision is not None and not workload.deleting and not loaded.intent.revision.is_compiled:
            wanted = rendering.compile_name(revision, self._attempt(workload, revision))
            if wanted not in known:
                known.append(wanted)
        known[:] = [one for one in known if one == wanted or not self._link.cancel(workload.name, one)]
        if any(one != wanted for one in known):
            self._again(workload.name)

    def _again(self, name: str) -> None:
        self._soon(name, self._clock() + AGAIN_SECONDS)

    def _fault(self, whom: str, error: BaseException) -> None:
        self.figures.faults[whom] += 1
        log.warning("%s did not do it: %s", whom, str(error)[:300])

    # What the cluster does, and what other parts of the console do

    def _act(self, loaded: Loaded, decision: Decision) -> None:
        refused = self._refused.setdefault(loaded.workload.name, {})
        for action in decision.actions:
            if self._asks_cluster(action, loaded):
                self._again(loaded.workload.name)
                continue
            handler = self._handler(action)
            if handler is None:
                continue
            self._again(loaded.workload.name)  # it takes its time
            notify("WATCHDOG=1")
            try:
                with self._election.acting():
                    handler(loaded)
                if isinstance(action, StartJob):
                    refused.pop(action.home, None)
                if isinstance(action, SetPlace):
                    self._soon(loaded.workload.name)  # it is done, and others wait for it
            except REFUSALS as error:
                self._fault("console", error)
                if isinstance(action, StartJob):
                    refused[action.home] = str(error)[:SENTENCE_MAX]

    def _asks_cluster(self, action: object, loaded: Loaded) -> bool:
        """Whether the Cluster Server is what does this, or has to do something before it. It is asked
        outside of transactions."""
        workload = loaded.workload
        assert self._link is not None  # noqa: S101 - the leader has one
        match action:
            case Compile() if workload.revision is not None:
                attempt = self._attempt(workload, workload.revision)
                self._link.submit(workload.name, _compile_job(workload, workload.revision, attempt))
            case Forget() if workload.name in self._link.names():
                self._link.delete(workload.name)
            case _:
                return False
        return True

    def _handler(self, action: object) -> Callable[[Loaded], object] | None:
        match action:
            case SizeSession(boxes):
                return lambda loaded: _size_session(loaded, boxes)
            case DeleteSession():
                return lambda loaded: lifecycle.release(loaded.workload)
            case StartJob(home):
                return lambda loaded: _start_job(loaded, home)
            case CancelJob(home):
                return lambda loaded: _cancel_job(loaded, home)
            case EndJob(home):
                return lambda loaded: _end_job(loaded, home)
            case RemoveHome(home):
                return lambda loaded: driver_removal.remove(
                    SYSTEM,
                    rendering.home_name(loaded.workload, home.epoch, home.ordinal),
                    reason=f"Workload {loaded.workload.name}.",
                )
            case SetPlace(ordinal, epoch):
                return lambda loaded: _set_place(loaded, ordinal, epoch)
            case RemovePlace(ordinal):
                return lambda loaded: _remove_place(loaded, ordinal)
            case Complete():
                return _fit_model
            case RollBack(to, reason, sentence):
                return lambda loaded: _roll_back(loaded, to, reason, sentence)
            case Pause(reason, sentence):
                return lambda loaded: _pause(loaded, reason, sentence)
            case Forget():
                return lambda loaded: _let_go(loaded.workload)
            case _:
                return None

    def _compiled(self, loaded: Loaded) -> CompileSeen:
        """How the target's compile job is, as far as is known. What it has made is written down."""
        revision = loaded.workload.revision
        if revision is None or loaded.intent.revision.is_compiled or loaded.intent.deleting:
            return CompileSeen()
        address = rendering.artifact_address(loaded.workload, revision)
        if address in self._artifacts:  # the same inputs never compile twice
            store.take_artifact(loaded, revision, address, self._artifacts[address])
            self._soon(loaded.workload.name)
            return CompileSeen(state=CompileState.RUNNING)
        assert self._link is not None  # noqa: S101 - the leader has one
        attempt = self._attempt(loaded.workload, revision)
        job = self._link.job(loaded.workload.name, rendering.compile_name(revision, attempt))
        if job is None:
            return self._before_compiling(loaded.workload, revision, attempt)
        if job.state in RUNNING:
            self._soon(loaded.workload.name, self._clock() + AGAIN_SECONDS / 4)
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
        self._soon(loaded.workload.name)
        return CompileSeen(state=CompileState.RUNNING)

    def _attempt(self, workload: Workload, revision: Revision) -> int:
        """Which compile job of a revision counts: those before it were ended by others."""
        assert self._link is not None  # noqa: S101 - the leader has one
        for attempt in range(1, COMPILE_ATTEMPTS_MAX):
            job = self._link.job(workload.name, rendering.compile_name(revision, attempt))
            if job is None or not was_interrupted(job):
                return attempt
        return COMPILE_ATTEMPTS_MAX

    def _before_compiling(self, workload: Workload, revision: Revision, attempt: int) -> CompileSeen:
        """Nothing, unless a job was ended just before: a node or a bucket may be away for a while."""
        assert self._link is not None  # noqa: S101 - the leader has one
        name = rendering.compile_name(revision, attempt - 1)
        before = self._link.job(workload.name, name) if attempt > 1 else None
        seconds = COMPILE_AGAIN_SECONDS * 2 ** max(attempt - 2, 0)
        # The clock of another machine that is ahead says nothing of when it ended.
        if before is None or not 0 <= self._clock() - before.ended_at < seconds:
            return CompileSeen()
        self._soon(workload.name, before.ended_at + seconds)
        said = excerpt(before.sentence or before.reason, SENTENCE_MAX)
        return CompileSeen(state=CompileState.RUNNING, sentence=said)

    def _remember(self, address: str | None, layout: Any) -> None:
        if address is not None:
            self._artifacts[address] = layout
            if len(self._artifacts) > ARTIFACTS_MAX:
                del self._artifacts[next(iter(self._artifacts))]

    # How requests fare

    def _traffic_of(self, loaded: Loaded) -> tuple[Traffic, Traffic]:
        workload, now = loaded.workload, self._clock()
        if loaded.rollout is None or loaded.intent.stable is None:
            return NO_TRAFFIC
        of, at, known = self._traffic.get(workload.name, (0, 0.0, NO_TRAFFIC))
        if of == loaded.rollout.pk and now - at < HEALTH_SECONDS:
            return known
        template = loaded.intent.template
        published = self._writer.published(workload.model)
        switched = {
            name: told.at
            for name, told in published.items()
            if (row := loaded.rows.get(told.instance)) is not None
            and (row.revision.digest, row.restart) == template
        }
        known = NO_TRAFFIC
        if switched:
            needed, replicas = loaded.intent.rules.requests_min, frozenset(published)
            try:
                known = health.traffic(workload.model, switched, replicas, needed)
            except Unanswerable as error:  # of more series than an answer has: no verdict
                self._fault("telemetry", error)
        self._traffic[workload.name] = loaded.rollout.pk, now, known
        self._soon(workload.name, now + HEALTH_SECONDS)
        return known


# Services of the console, in a transaction of the leader


def _let_go(workload: Workload) -> None:
    if lifecycle.release(workload):
        lifecycle.forget(workload)


def _fit_model(loaded: Loaded) -> None:
    """As the workload is by now: somebody may have changed it since it was looked at."""
    changes.fit_model(workloads.for_change(SYSTEM, loaded.workload.name))


def _size_session(loaded: Loaded, boxes: int) -> None:
    """Make it anew if it has gone: because it waited in vain for boxes, or somebody cancelled it."""
    workload = loaded.workload
    why = f"Workload {workload.name}."
    if workload.session is None:
        workload = workloads.for_change(SYSTEM, workload.name)
        made = plans.session_for(workload.spec(), workload.org)
        if made is not None and workload.session is None:
            sizes.create(SYSTEM, made, wait_seconds=WAIT_SECONDS_MAX, reason=why)
            Workload.objects.filter(pk=workload.pk).update(session=made)
        return
    session = sessions.for_change(SYSTEM, workload.session.name)
    if session.boxes_desired != boxes:
        sizes.resize(SYSTEM, session, boxes, wait_seconds=WAIT_SECONDS_MAX, reason=why)


def _start_job(loaded: Loaded, home: Home) -> None:
    workload = loaded.workload
    if workload.session is None:
        return
    name = rendering.home_name(workload, home.epoch, home.ordinal)
    session = sessions.for_change(SYSTEM, workload.session.name)
    boxes = store.boxes_of_home(loaded, home)
    if len(boxes) < workload.boxes_per_replica:  # a job without boxes would take what others need
        raise CannotPlan(Cause.WAITING_FOR_CAPACITY, f"Replica {home.ordinal} has no boxes yet.")
    jobs.start_job(
        SYSTEM,
        session,
        name,
        sessions.get_driver(SYSTEM, name),
        boxes,
        orgs=sessions.orgs_said(session),
        wait_seconds=WAIT_SECONDS_MAX,
        reason=f"Workload {workload.name}.",
    )


def _cancel_job(loaded: Loaded, home: Home) -> None:
    """It would wait for minutes until it gives up, and the home can't be removed meanwhile."""
    workload = loaded.workload
    if workload.session is None:
        return
    name = rendering.home_name(workload, home.epoch, home.ordinal)
    running = operations.running_on(of_job(workload.session.name, name))
    if running is not None and running.kind == store.START_JOB:
        why = f"Workload {workload.name} has no instance for it any more."
        with contextlib.suppress(operations.CannotCancel):  # a person has to look at it
            operations.cancel(SYSTEM, running.pk, why)


def _end_job(loaded: Loaded, home: Home) -> None:
    """Its instances are somewhere else by now."""
    workload = loaded.workload
    if workload.session is None:
        return
    name = rendering.home_name(workload, home.epoch, home.ordinal)
    session = sessions.for_change(SYSTEM, workload.session.name)
    jobs.end_job(SYSTEM, session, name, reason=f"Workload {workload.name} moves it to other boxes.")


def _set_place(loaded: Loaded, ordinal: int, epoch: int | None) -> None:
    workload = loaded.workload
    if workload.served is None:
        return
    model = routing.for_change(SYSTEM, workload.served.name)
    name, why = rendering.replica_name(workload, ordinal), f"Workload {workload.name}."
    values = store.fit_place(loaded, ordinal, epoch)
    known = model.replicas.filter(name=name).first()
    if known is None:
        values["api_key"] = secrets.token_urlsafe(KEY_BYTES)
        routing.add_replica(SYSTEM, model, name=name, values=values, reason=why)
    else:
        routing.update_replica(SYSTEM, known, values=values, reason=why)


def _remove_place(loaded: Loaded, ordinal: int) -> None:
    workload = loaded.workload
    if workload.served is None:
        return
    model = routing.for_change(SYSTEM, workload.served.name)
    replica = routing.get_replica(model, rendering.replica_name(workload, ordinal))
    routing.remove_replica(SYSTEM, replica, reason=f"Workload {workload.name}.")


def _roll_back(loaded: Loaded, to: int, reason: str, sentence: str) -> None:
    workload = workloads.for_change(SYSTEM, loaded.workload.name)
    if workload.generation != loaded.workload.generation:  # what was judged is not what is wanted now
        return
    if loaded.rollout is not None:
        store.end_rollout(loaded.rollout, "undone", reason, sentence)
    undone = workload.revision
    why = f"Revision {undone.number} was undone: {sentence}" if undone else sentence
    changes.roll_back(SYSTEM, workload, to, reason=why)


def _pause(loaded: Loaded, reason: str, sentence: str) -> None:
    workload = workloads.for_change(SYSTEM, loaded.workload.name)
    if workload.generation != loaded.workload.generation:
        return
    if loaded.rollout is not None:
        store.end_rollout(loaded.rollout, "paused", reason, sentence)
    changes.pause(SYSTEM, workload, reason=sentence)


def _compile_job(workload: Workload, revision: Revision, attempt: int) -> pb.JobSpec:
    return pb.JobSpec(
        name=rendering.compile_name(revision, attempt),
        kind=pb.COMPILE,
        spec=rendering.compile_spec(workload, revision),
        secrets=rendering.compile_secrets(revision),
        deadline_seconds=COMPILE_SECONDS_MAX,
    )


class HintListener:
    """Hears of changed intent, and of what becomes of sessions and drivers, from PostgreSQL, on a
    connection of its own, in a thread of its own."""

    def __init__(self, heard: Callable[[str | None], None]) -> None:
        self._heard = heard
        self._ends = threading.Event()
        self._name = connection.settings_dict["NAME"]
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(IDLE_SECONDS * 4)

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                self._listen()
            except psycopg.Error as error:
                log.warning("Hints do not come in: %s", error)
                self._ends.wait(AGAIN_SECONDS)

    def _listen(self) -> None:
        with psycopg.connect(
            conninfo(settings.LISTEN_URL, dbname=self._name), autocommit=True
        ) as listening:
            listening.execute(f"LISTEN {hints.CHANNEL}")
            self._heard(None)  # what came meanwhile
            while not self._ends.is_set():
                for notice in listening.notifies(timeout=IDLE_SECONDS):
                    self._take(notice.payload)

    def _take(self, payload: str) -> None:
        topic, kind = hints.read(payload)
        what, _, name = topic.partition(":")
        if what == WORKLOAD:
            if kind == changes.INTENT:
                self._heard(name)
        elif what == SESSION:  # it has boxes now, or a job has started or ended
            self._heard(name)
        elif what == ProcessKind.DRIVER and (home := HOME.fullmatch(name)):  # it has joined, say
            self._heard(home[1])
