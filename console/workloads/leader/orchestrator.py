"""The orchestrator: one of any number leads, looks at workloads and has decisions carried out.

What wakes it: the cluster's watch, hints of PostgreSQL that intent has changed, and the time at which a
decision said that it would be another one. What it misses is found by a slow look at all workloads.
Whatever it was doing when it was killed, the next leader sees what has been done, and decides.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import redis
from django.contrib.postgres.aggregates import JSONBAgg
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import Error as DatabaseError
from django.db.models import F, JSONField, OuterRef, Subquery, Value
from django.db.models.functions import Coalesce
from django.http import Http404

from console.fleet.models import Box
from console.fleet.nodes import Impossible
from console.operations.services import Busy, StalePlan
from console.placement.topology import Misconfigured
from console.placement.topology import State as BoxState
from console.sessions.models import SessionBox
from console.sessions.plans.proposals import CannotPlan
from console.workloads import changes
from console.workloads.leader import health, rendering, store
from console.workloads.leader.actions import handler_of
from console.workloads.leader.agenda import ALL, Agenda, News
from console.workloads.leader.cluster import ClusterLink
from console.workloads.leader.compilations import Compilations
from console.workloads.leader.decisions import decide
from console.workloads.leader.election import ORCHESTRATORS, TRY_SECONDS, Election, NotLeader
from console.workloads.leader.endpoints import EndpointWriter
from console.workloads.leader.figures import Figures
from console.workloads.leader.loaded import Loaded, load
from console.workloads.leader.world import (
    Compile,
    Decision,
    Forget,
    Home,
    SetPlace,
    StartJob,
    Traffic,
)
from console.workloads.models import SENTENCE_MAX, Instance, Workload
from telemetry.events import NewEvent, note_all
from telemetry.notify import notify
from telemetry.queries import Unanswerable

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
ORPHANS_AT_ONCE: Final = 20  # workloads of the cluster that nobody knows, ended in one look
NO_TRAFFIC: Final = (Traffic(), Traffic())
# What a service of the console says where it can't be done, or not now.
REFUSALS: Final = (
    *(Busy, StalePlan, CannotPlan, Misconfigured, Impossible, ValidationError, PermissionDenied),
    Http404,
)


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
        self._agenda = Agenda()
        self._looked_at: dict[str, float] = {}
        self._generations: dict[str, int] = {}
        self._models: dict[str, str] = {}
        self._traffic: dict[str, tuple[int, float, tuple[Traffic, Traffic]]] = {}  # with its rollout
        self._compilations = Compilations(self._soon, clock)
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
        for name in self._agenda.take(now):
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
        for name in self.news.take(self._agenda.seconds_left(self._clock(), seconds_max)):
            self._soon(name)

    def stop(self) -> None:
        """Let another one lead at once."""
        self._election.resign()
        self._step_down()
        self._writer.close()

    def _take_over(self) -> None:
        """From nothing: what was told to brains, and what the cluster says."""
        self.figures.led += 1
        self._agenda.clear()
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
        self._agenda.add(list(self._generations) if name == ALL else [name], at)

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
        for name in self._with_boxes_to_leave():
            self._soon(name)
        for name in self._generations.keys() - found.keys():
            self._forget(name)
        self.figures.workloads = len(found)
        if self._link is not None and not self._link.is_stale:
            for name in list(self._link.names() - found.keys())[:ORPHANS_AT_ONCE]:
                self._end_orphan(name)

    @staticmethod
    def _with_boxes_to_leave() -> set[str]:
        """Their sessions have boxes that are drained; or have had others instead since, and instances
        without a cache are still on those, even if the drain was cancelled."""
        draining = Box.objects.filter(state=BoxState.DRAINING.value)
        of_sessions = Workload.objects.filter(session__boxes__box__in=draining)
        its = SessionBox.objects.filter(session=OuterRef("workload__session")).order_by()
        names = Subquery(its.values("session").annotate(names=JSONBAgg("box__name")).values("names"))
        elsewhere = (
            Instance.objects.filter(ended_at=None, workload__session__isnull=False)
            .annotate(held=Coalesce(names, Value([], JSONField())))
            .exclude(boxes__contained_by=F("held"))
        )
        return {
            *of_sessions.values_list("name", flat=True),
            *elsewhere.values_list("workload__name", flat=True),
        }

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
        self._compilations.forget(name)
        self._agenda.forget(name)
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
            loaded = load(name)
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
                self._compilations.seen(loaded, self._link),
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
        if self._compilations.cancel_superseded(loaded, self._link):
            self._again(name)
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
            handler = handler_of(action)
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
                self._compilations.submit(workload, workload.revision, self._link)
            case Forget() if workload.name in self._link.names():
                self._link.delete(workload.name)
            case _:
                return False
        return True

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
