"""A workload as the database and the fleet have it, which the leader decides by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.fleet.models import Driver
from console.operations.models import Operation
from console.operations.services import running_on
from console.placement.topology import State as BoxState
from console.routing.models import Replica as Place
from console.sessions.models import Job, Session
from console.sessions.plans.snapshot import Snapshot
from console.sessions.services import boxes_to_leave
from console.workloads.leader import rendering, world
from console.workloads.leader.cluster import GOALS, Known, Status
from console.workloads.leader.world import (
    CompileSeen,
    Failure,
    Goal,
    Home,
    HomeSeen,
    Intent,
    Published,
    Seen,
    SessionSeen,
    State,
    Traffic,
)
from console.workloads.models import (
    Instance,
    Revision,
    Rollout,
    Workload,
)
from telemetry.topics import of_session

FAILURES_SECONDS: Final = 600.0
NO_ROOM: Final = frozenset({"WaitingForCapacity"})  # the cluster's reason, as long as it finds no place
START_JOB: Final = "session.start-job"
JOB_KINDS: Final = (START_JOB, "session.end-job")


@dataclass(slots=True)
class Loaded:
    """One workload, with everything that is decided from."""

    workload: Workload
    intent: Intent
    rows: dict[str, Instance]
    rollout: Rollout | None
    ended: list[Failure]
    homes: tuple[HomeSeen, ...] = ()
    takes_jobs: tuple[str, ...] = ()  # boxes of its session, without those that are to be left
    session: SessionSeen | None = None
    places: dict[int, int | None] = field(default_factory=dict)
    news: list[tuple[str, str]] = field(default_factory=list)  # kinds and sentences of events

    def seen(
        self,
        known: Known,
        published: Mapping[str, Published],
        compiled: CompileSeen,
        traffic: tuple[Traffic, Traffic],
        *,
        is_stale: bool,
        can_publish: bool,
        refusal: str,
    ) -> Seen:
        """`known`: of the cluster. An instance that it has been told of and does not list is gone. As
        long as nothing is known, an instance is as the database has it."""
        names = {
            rendering.replica_name(self.workload, ordinal): ordinal
            for ordinal in {one.ordinal for one in self.rows.values()} | set(range(self.intent.replicas))
        }
        return Seen(
            instances=tuple(
                instance_of(row, known, is_stale=is_stale, is_lost=self._is_lost(row, known))
                for row in self.rows.values()
            ),
            failures=tuple(self.ended),
            homes=self.homes,
            session=self.session,
            compile=compiled,
            new=traffic[0],
            old=traffic[1],
            published={names[name]: one for name, one in published.items() if name in names},
            places=self.places,
            is_stale=is_stale,
            can_publish=can_publish,
            refusal=refusal,
        )

    def _is_lost(self, row: Instance, known: Known) -> bool:
        is_told = known.generation == self.workload.cluster_generation > 0
        return is_told and row.name not in known.statuses

    def apply_request(self) -> list[pb.Instance]:
        """All instances that are to be there."""
        return [
            pb.Instance(
                name=row.name,
                spec=bytes(row.spec),
                secrets=rendering.secrets_by_name(str(row.secrets)),
                boxes=row.boxes,
                goal=GOALS[Goal(row.goal)],
                grace_seconds=rendering.GRACE_SECONDS,
                resources=rendering.resources(row.revision),
            )
            for row in sorted(self.rows.values(), key=lambda row: row.pk)
        ]

    def boxes_of_session(self, ordinal: int, epoch: int | None) -> list[str]:
        """For a new instance: those of its home, unless they are to be left, or without a cache those of
        its replica that are not to be left; else some that nobody has."""
        workload = self.workload
        if workload.session is None:
            return []
        if epoch is None:
            kept = self._boxes_of_replica(ordinal)
        elif kept := self.boxes_of_home(Home(epoch, ordinal)):
            return kept
        taken: Counter[str] = Counter(box for row in self.rows.values() for box in row.boxes)
        taken.update(box for one in self.homes for box in one.boxes)
        others = sorted({*self.takes_jobs} - {*kept}, key=lambda name: (taken[name], name))
        return [*kept, *others][: workload.boxes_per_replica]

    def boxes_of_home(self, home: Home) -> list[str]:
        """Where its newest instance is that need not leave, else its job; none if all have to."""
        found: list[Sequence[str]] = [
            row.boxes for row in self.rows.values() if (row.epoch, row.ordinal) == home
        ]
        found = [*(one.boxes for one in self.homes if one.home == home), *found]
        return next(
            (list(one) for one in reversed(found) if one and self._to_leave().isdisjoint(one)), []
        )

    def _boxes_of_replica(self, ordinal: int) -> list[str]:
        """On which its instance stays that has to leave the fewest, the newest of such."""
        found = [row.boxes for row in self.rows.values() if row.ordinal == ordinal and row.boxes]
        to_leave = self._to_leave()
        its = min(reversed(found), key=lambda boxes: len(to_leave.intersection(boxes)), default=())
        return [box for box in its if box not in to_leave]

    def _to_leave(self) -> frozenset[str]:
        return self.session.to_leave if self.session else frozenset()


def load(name: str) -> Loaded | None:
    """None for one that there is not, or that has no revision yet. In the leader's transaction: a
    roll-out that has been asked for is noted."""
    related = ("revision", "stable", "session", "served", "org")
    workload = Workload.objects.select_related(*related).filter(name=name).first()
    if workload is None or workload.revision is None:
        return None
    live = Instance.objects.filter(workload=workload, ended_at=None).select_related("revision")
    rows = {row.name: row for row in live.order_by("pk")}
    for row in rows.values():
        row.workload = workload
    news: list[tuple[str, str]] = []
    rollout = _rollout(workload, rows.values(), news)
    loaded = Loaded(
        workload=workload,
        intent=_intent(workload, rollout),
        rows=rows,
        rollout=rollout,
        ended=list(_failures(workload)),
        news=news,
    )
    _add_surroundings(loaded)
    return loaded


def revision_of(row: Revision) -> world.Revision:
    has_cache = row.template_read().cache.enabled
    is_compiled = row.compiled_at is not None
    return world.Revision(
        number=row.number,
        digest=row.digest,
        same_as=row.same_as,
        epoch=row.epoch,
        has_cache=has_cache,
        is_compiled=is_compiled,
    )


def _intent(workload: Workload, rollout: Rollout | None) -> Intent:
    assert workload.revision is not None  # noqa: S101 - `load` has looked
    begun = (rollout.resumed_at or rollout.started_at) if rollout else workload.created_at
    return Intent(
        name=workload.name,
        replicas=workload.replicas,
        revision=revision_of(workload.revision),
        stable=revision_of(workload.stable) if workload.stable else None,
        rules=workload.rollout,
        boxes_per_replica=workload.boxes_per_replica,
        restarts=workload.restarts,
        paused=workload.paused,
        deleting=workload.deleting,
        is_rolling=rollout is not None,
        begun_at=begun.timestamp(),
    )


def _rollout(
    workload: Workload, live: Collection[Instance], news: list[tuple[str, str]]
) -> Rollout | None:
    """The one that is under way. What was asked for meanwhile supersedes it."""
    target = workload.revision
    assert target is not None  # noqa: S101 - `load` has looked
    now = timezone.now()
    deadline = now + timedelta(seconds=workload.rollout.deadline_seconds)
    rollouts = workload.rollouts.select_related("to_revision")
    found = rollouts.filter(ended_at=None).first()
    if found is not None and (found.to_revision_id, found.restart) == (target.pk, workload.restarts):
        if found.phase == "paused" and not workload.paused:
            found.phase, found.reason, found.sentence = "running", "", ""
            found.deadline_at, found.resumed_at = deadline, now
            found.save(update_fields=["phase", "reason", "sentence", "deadline_at", "resumed_at"])
        elif found.phase == "running" and workload.paused:
            found.phase = "paused"
            found.save(update_fields=["phase"])
        return found
    if found is not None:
        found.phase, found.ended_at = "superseded", now
        found.save(update_fields=["phase", "ended_at"])
        sentence = f"The rollout of revision {found.to_revision.number} is superseded."
        news.append(("workload.rollout-superseded", sentence))
    is_same = workload.stable_id == target.pk and all(one.restart == workload.restarts for one in live)
    if is_same or workload.deleting:
        return None
    sentence = f"The rollout of revision {target.number} of {workload.name} has begun."
    news.append(("workload.rollout-begun", sentence))
    return Rollout.objects.create(
        workload=workload,
        from_revision=workload.stable,
        to_revision=target,
        restart=workload.restarts,
        total=workload.replicas,
        deadline_at=deadline,
    )


def _failures(workload: Workload) -> Iterable[Failure]:
    since = timezone.now() - timedelta(seconds=FAILURES_SECONDS)
    rows = Instance.objects.filter(workload=workload, ended_at__gte=since, failed=True)
    for ordinal, digest, restart, at, sentence in rows.order_by("ended_at").values_list(
        "ordinal", "revision__digest", "restart", "ended_at", "end_reason"
    ):
        template = world.Template(digest, restart)
        if at is not None:
            yield Failure(ordinal=ordinal, template=template, at=at.timestamp(), sentence=str(sentence))


def _add_surroundings(loaded: Loaded) -> None:
    workload = loaded.workload
    session = workload.session
    is_busy = False
    if session is not None:
        is_busy = running_on(of_session(session.name)) is not None
        loaded.session = SessionSeen(
            boxes=session.boxes_desired,
            is_busy=is_busy,
            is_deleting=session.deleting,
            cause=session.cause,
            cause_sentence=session.cause_sentence,
            refused=session.cause_sentence if session.is_never else "",
            refused_boxes=session.boxes_desired if session.is_never else 0,
        )
    loaded.homes = tuple(_homes(workload, is_going=session is not None and session.deleting))
    if session is not None and loaded.session is not None:
        loaded.session = _with_boxes(loaded, session, loaded.session)
    served = (
        Place.objects.filter(model=workload.served_id) if workload.served_id else Place.objects.none()
    )
    for name, driver in served.values_list("name", "driver__name"):
        ordinal = _ordinal(workload, name)
        if ordinal is not None:
            home = _home(workload, driver or "")
            loaded.places[ordinal] = home.epoch if home else None


def _with_boxes(loaded: Loaded, session: Session, seen: SessionSeen) -> SessionSeen:
    """What it has of boxes, and which of them are to be left."""
    used = {box for row in loaded.rows.values() for box in row.boxes}
    used |= {box for one in loaded.homes for box in one.boxes}
    own = {one.box.name: one for one in session.boxes.select_related("box")}
    # Those that a resize has only reserved are given to nobody yet: jobs can't be started there.
    there = [name for name, one in sorted(own.items()) if one.ready and not one.leaving]
    loaded.takes_jobs = tuple(name for name in there if own[name].box.state == BoxState.READY.value)
    seen = replace(seen, granted=len({*loaded.takes_jobs, *used.intersection(there)}))
    placed = {one.home for one in loaded.homes if one.boxes}
    unplaced = {
        box
        for row in loaded.rows.values()
        if row.revision.epoch is not None and (row.epoch, row.ordinal) not in placed
        for box in row.boxes
    }
    cordoned = session.boxes.filter(box__state=BoxState.CORDONED.value, box__name__in=unplaced)
    to_leave = frozenset(boxes_to_leave(session)) | (used - own.keys())
    to_leave |= set(cordoned.values_list("box__name", flat=True))  # their jobs can't be started there
    if not to_leave:
        return seen
    return replace(
        seen,
        to_leave=to_leave,
        spare=len(set(loaded.takes_jobs) - used),
        free=len(Snapshot.now().free_boxes),
    )


def _homes(workload: Workload, *, is_going: bool) -> Iterable[HomeSeen]:
    """Of its own instances, now or before: others may have drivers with such names, too."""
    drivers = Driver.objects.filter(workload=workload.name).order_by("name")
    found = {home: driver for driver in drivers if (home := _home(workload, driver.name))}
    if not found:
        return
    ours = set(workload.instances.values_list("epoch", "ordinal").distinct())
    found_jobs = Job.objects.filter(session=workload.session_id).prefetch_related(
        "boxes__session_box__box"
    )
    jobs = {
        job.driver_id: tuple(sorted(one.session_box.box.name for one in job.boxes.all()))
        for job in found_jobs
    }
    running = Operation.objects.filter(done=False, kind__in=JOB_KINDS)
    changing = {
        job: kind == START_JOB and not is_cancelled
        for job, kind, is_cancelled in running.values_list("plan__job", "kind", "cancel_requested")
    }
    for home, driver in found.items():
        if home not in ours:
            continue
        has_joined = driver.joined_at is not None and driver.model is not None
        has_job = driver.pk in jobs
        waits = driver.name in changing or (is_going and not has_job)
        boxes = jobs.get(driver.pk, ())
        yield HomeSeen(
            home=home,
            has_joined=has_joined,
            has_job=has_job,
            is_busy=waits,
            is_starting=changing.get(driver.name, False),
            boxes=boxes,
        )


def _home(workload: Workload, name: str) -> Home | None:
    found = re.fullmatch(rf"{re.escape(workload.name)}-(\d+)-(\d+)", name)
    return Home(int(found[1]), int(found[2])) if found else None


def _ordinal(workload: Workload, name: str) -> int | None:
    found = re.fullmatch(rf"{re.escape(workload.name)}-(\d+)", name)
    return int(found[1]) if found else None


def instance_of(row: Instance, known: Known, *, is_stale: bool, is_lost: bool) -> world.Instance:
    status, now = known.statuses.get(row.name), timezone.now()
    made = world.Instance(
        name=row.name,
        ordinal=row.ordinal,
        revision=revision_of(row.revision),
        restart=row.restart,
        goal=Goal(row.goal),
        goal_at=row.goal_at.timestamp(),
        created_at=row.created_at.timestamp(),
        since=row.since.timestamp(),
        boxes=tuple(row.boxes),
        is_outdated=rendering.is_outdated(row),
        was_ready=row.ready_at is not None,
    )
    if status is None and is_stale:
        return _as_stored(made, row)
    if status is None and is_lost:
        return _with(made, state=State.GONE)
    if status is None:
        why = known.refusal and "ClusterRefuses"
        return _with(made, room_at=world.NEVER, reason=why, sentence=known.refusal)
    room_at = room_since(row, status, now)
    return _with(
        made,
        room_at=room_at.timestamp() if room_at else world.NEVER,
        state=status.state,
        acknowledged=status.goal,
        cache=status.cache,
        url=status.url,
        since=since_of(row, status, now).timestamp(),
        restarts=status.restarts,
        reason=status.reason,
        sentence=status.sentence,
    )


def _as_stored(made: world.Instance, row: Instance) -> world.Instance:
    """As the cluster had it when it was last seen."""
    return _with(
        made,
        room_at=row.room_at.timestamp() if row.room_at else world.NEVER,
        state=State(row.state),
        acknowledged=Goal(row.acknowledged_goal or Goal.RUN),
        cache=world.Cache(row.cache),
        url=row.url,
        restarts=row.engine_restarts,
        reason=row.reason,
        sentence=row.sentence,
    )


def _with(of: world.Instance, **more: Any) -> world.Instance:
    return replace(of, **more)


def since_of(row: Instance, status: Status, now: datetime) -> datetime:
    """In its state, as its manager says: but never after it was first seen in it, for clocks of nodes
    may be ahead."""
    said = status.state.value, status.reason, status.restarts
    if said == (row.state, row.reason, row.engine_restarts):
        return row.since
    return max(row.since, min(time_of(status.since), now))


def room_since(row: Instance, status: Status, now: datetime) -> datetime | None:
    """Since when it has a place to run. A console of the version before has not written that down."""
    if status.reason in NO_ROOM:
        return None
    was_seen = row.seen_at is not None and row.reason not in NO_ROOM
    return row.room_at or (row.created_at if was_seen else now)


def time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
