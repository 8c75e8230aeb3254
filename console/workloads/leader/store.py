"""A workload as the database and the fleet have it, and what the leader writes there."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.membership import tokens
from console.fleet.models import Driver
from console.operations.models import Operation
from console.operations.services import running_on
from console.placement.topology import State as BoxState
from console.routing.models import EndpointSource, Engine
from console.routing.models import Replica as Place
from console.sessions.models import Job, Session
from console.sessions.plans.snapshot import Snapshot
from console.sessions.services import boxes_to_leave
from console.workloads.leader import conditions, rendering, world
from console.workloads.leader.cluster import GOALS, Known, Status
from console.workloads.leader.verdicts import is_compared
from console.workloads.leader.world import (
    CompileSeen,
    Complete,
    Condition,
    Create,
    Failure,
    Goal,
    Home,
    HomeSeen,
    Intent,
    Published,
    Remove,
    Seen,
    SessionSeen,
    SetGoal,
    State,
    Traffic,
)
from console.workloads.models import (
    REASON_MAX,
    SEEN_SECONDS,
    SENTENCE_MAX,
    Instance,
    Revision,
    Rollout,
    Workload,
)
from console.workloads.models import Condition as ConditionRow
from telemetry.topics import of_session

FAILURES_SECONDS: Final = 600.0
SEEN: Final = timedelta(seconds=SEEN_SECONDS)
NO_ROOM: Final = frozenset({"WaitingForCapacity"})  # the cluster's reason, as long as it finds no place
ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"
START_JOB: Final = "session.start-job"
JOB_KINDS: Final = (START_JOB, "session.end-job")
ENDED: Final = "It ended by itself."  # where nobody has said more
ENDED_MEANWHILE: Final = "It had ended by the time at which lost changes were noticed."
ENGINES: Final = {"vllm": Engine.VLLM, "sglang": Engine.SGLANG}


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


# Reading


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
    room_at = _room_at(row, status, now)
    return _with(
        made,
        room_at=room_at.timestamp() if room_at else world.NEVER,
        state=status.state,
        acknowledged=status.goal,
        cache=status.cache,
        url=status.url,
        since=_since(row, status, now).timestamp(),
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


# Writing, in a transaction of the leader


def recover(loaded: Loaded, known: Known) -> None:
    """Make what is stored the cluster's next generation, where the cluster has a later one: transactions
    were lost, by a restored backup or a failover of PostgreSQL.

    An instance that it does not list was ended there after that. It is replaced: with its name and its
    join token, which may be used up, it could not be started again. One that was told to drain there
    can't be told anything else, and is drained here as well.
    """
    workload = loaded.workload
    for row in loaded.rows.values():
        status = known.statuses.get(row.name)
        if status is not None and status.goal is Goal.DRAIN and row.goal != Goal.DRAIN.value:
            _set_goal(row, Goal.DRAIN)
    if known.generation <= workload.cluster_generation:
        return
    for name in loaded.rows.keys() - known.statuses.keys():
        _end(loaded.rows.pop(name), ENDED_MEANWHILE, has_failed=False)
    sentence = (
        f"The console had lost its last changes of {workload.name}'s instances: the cluster had "
        f"generation {known.generation} of them, the console {workload.cluster_generation}. What the "
        "console has stored is applied."
    )
    loaded.news.append(("workload.recovered", sentence))
    workload.cluster_generation = known.generation + 1
    workload.save(update_fields=["cluster_generation"])


def perform(loaded: Loaded, actions: Iterable[object]) -> bool:
    """Write what was decided of instances. Returns whether the cluster has to be told."""
    has_changed = False
    for action in actions:
        match action:
            case Create():
                _create(loaded, action)
            case SetGoal(name, goal):
                _set_goal(loaded.rows[name], goal)
            case Remove(name, has_failed, sentence):
                row = loaded.rows.pop(name)
                _end(row, sentence, has_failed=has_failed)
                if has_failed:
                    loaded.news.append(("workload.instance-ended", f"{name} ended: {row.end_reason}"))
            case _:
                continue
        has_changed = True
    if has_changed:
        workload = loaded.workload
        workload.cluster_generation += 1
        workload.save(update_fields=["cluster_generation"])
    return has_changed


def _create(loaded: Loaded, action: Create) -> None:
    workload, now = loaded.workload, timezone.now()
    revision = workload.revisions.get(number=action.revision.number)
    replica = rendering.replica_name(workload, action.ordinal)
    tail = "".join(secrets.choice(ALPHABET) for _ in range(4))
    row = Instance(
        name=f"{replica}-r{revision.number}-{tail}",
        workload=workload,
        ordinal=action.ordinal,
        revision=revision,
        restart=action.restart,
        epoch=action.revision.epoch or 1,
        goal=Goal.RUN.value,
        boxes=boxes_of_session(loaded, action.ordinal, action.revision.epoch),
        created_at=now,
        goal_at=now,
        since=now,
    )
    place = Place.objects.get(model=workload.served_id, name=replica)  # it is decided on after that
    row.spec = rendering.instance_spec(workload, row)
    row.secrets = rendering.instance_secrets(row, str(place.api_key))
    row.save()
    loaded.rows[row.name] = row


def _set_goal(row: Instance, goal: Goal) -> None:
    row.goal, row.goal_at = goal.value, timezone.now()
    row.save(update_fields=["goal", "goal_at"])


def _end(row: Instance, sentence: str, *, has_failed: bool) -> None:
    row.ended_at, row.serving = timezone.now(), False
    row.state, row.failed = State.GONE.value, has_failed
    row.end_reason = sentence[:SENTENCE_MAX] or (ENDED if has_failed else "")
    _revoke(row)
    row.secrets = ""
    row.save(update_fields=["ended_at", "serving", "state", "failed", "end_reason", "secrets"])


def _revoke(row: Instance) -> None:
    """Its join token, if nobody has used it."""
    if public_id := rendering.join_token_id(str(row.secrets)):
        tokens.revoke(SYSTEM, public_id)


def observe(loaded: Loaded, known: Known, serving: Collection[str]) -> bool:
    """Write down what the cluster says of instances. Returns whether that is news for people."""
    changed, is_news, seen = [], False, []
    joined = {one.home for one in loaded.homes if one.has_joined}
    for row in loaded.rows.values():
        told = known.told.get(row.name)
        status = known.statuses.get(row.name)
        before, seen_before = _shown(row), row.seen_at
        row.serving = row.name in serving
        if told is not None and status is not None:
            _take(row, told, status)
            is_attached = row.cache == world.Cache.ATTACHED.value and before[5] != row.cache
            if is_attached and Home(row.epoch, row.ordinal) in joined:
                _revoke(row)  # its driver has joined before; a new one is about to use the token up
        if _shown(row) != before:
            is_news = True
            changed.append(row)
        elif row.seen_at and (not seen_before or row.seen_at - seen_before > SEEN):
            seen.append(row)
    # First who stops to serve: a replica has one at a time.
    for row in sorted(changed, key=lambda row: row.serving):
        row.save()
    if seen:
        Instance.objects.bulk_update(seen, ["seen_at", "room_at"])
    return is_news


def _shown(row: Instance) -> tuple[object, ...]:
    return (
        *(row.serving, row.state, row.reason, row.sentence, row.acknowledged_goal, row.cache, row.url),
        *(row.engine_restarts, row.host, row.progress_done * 20 // max(1, row.progress_total)),
    )


def _since(row: Instance, status: Status, now: datetime) -> datetime:
    """In its state, as its manager says: but never after it was first seen in it, for clocks of nodes
    may be ahead."""
    said = status.state.value, status.reason, status.restarts
    if said == (row.state, row.reason, row.engine_restarts):
        return row.since
    return max(row.since, min(_time(status.since), now))


def _room_at(row: Instance, status: Status, now: datetime) -> datetime | None:
    """Since when it has a place to run. A console of the version before has not written that down."""
    if status.reason in NO_ROOM:
        return None
    was_seen = row.seen_at is not None and row.reason not in NO_ROOM
    return row.room_at or (row.created_at if was_seen else now)


def _take(row: Instance, told: pb.InstanceStatus, status: Status) -> None:
    now = timezone.now()
    row.room_at, row.since = _room_at(row, status, now), _since(row, status, now)
    row.reason, row.sentence = status.reason, status.sentence
    if status.state is State.READY and row.ready_at is None:
        row.ready_at = row.since
    row.state, row.cache = status.state.value, status.cache.value
    row.acknowledged_goal, row.url = status.goal.value, status.url
    row.engine_restarts, row.host = status.restarts, told.host
    progress = told.progress
    row.progress_done, row.progress_total = progress.done, progress.total
    row.progress_unit, row.progress_seconds = progress.unit, progress.seconds
    row.running_requests, row.seen_at = told.running_requests, _time(told.seen_at)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def write_conditions(loaded: Loaded, made: Iterable[Condition]) -> bool:
    """Returns whether any has changed."""
    workload = loaded.workload
    rows = {row.type: row for row in ConditionRow.objects.filter(workload=workload)}
    now, has_changed = timezone.now(), False
    for one in made:
        status = "Unknown" if one.status is None else str(one.status)
        row = rows.get(one.type) or ConditionRow(workload=workload, type=one.type)
        said = (status, one.reason[:REASON_MAX], one.message[:SENTENCE_MAX])
        if said == (row.status, row.reason, row.message):
            continue
        if row.status != status:
            row.since = now
            if one.type == conditions.READY and "True" in (row.status, status):
                kind, word = ("ready", "ready") if one.status else ("not-ready", "not ready any more")
                sentence = f"{workload.name} is {word}. {one.message}"
                loaded.news.append((f"workload.{kind}", sentence))
        row.status, row.reason, row.message = said
        row.save()
        has_changed = True
    return has_changed


def advance_rollout(
    loaded: Loaded, actions: Iterable[object], serving: Collection[str], seen: Seen
) -> bool:
    """How far the roll-out is, and whether it is over. Returns whether that is news."""
    rollout, workload = loaded.rollout, loaded.workload
    is_complete = any(isinstance(one, Complete) for one in actions)
    if is_complete:
        workload.stable = workload.revision
        workload.save(update_fields=["stable"])
    if rollout is None:
        return is_complete
    template = loaded.intent.template
    new = [row for name, row in loaded.rows.items() if name in serving]
    switched = sum((row.revision.digest, row.restart) == template for row in new)
    before = (rollout.switched, rollout.total, rollout.phase, rollout.traffic)
    rollout.switched, rollout.total = switched, workload.replicas
    if seen.new.requests and is_compared(loaded.intent):
        rollout.traffic = {"new": _shown_traffic(seen.new), "old": _shown_traffic(seen.old)}
    if is_complete:
        rollout.phase, rollout.ended_at = "done", timezone.now()
        sentence = f"Revision {rollout.to_revision.number} of {workload.name} runs everywhere."
        loaded.news.append(("workload.rollout-complete", sentence))
    if before == (rollout.switched, rollout.total, rollout.phase, rollout.traffic):
        return False
    rollout.save(update_fields=["switched", "total", "traffic", "phase", "ended_at"])
    return True


def _shown_traffic(of: world.Traffic) -> dict[str, Any]:
    return {name: value for name, value in asdict(of).items() if name not in {"refused", "ttft_range"}}


def end_rollout(rollout: Rollout, phase: str, reason: str, sentence: str) -> None:
    rollout.phase = phase
    rollout.reason, rollout.sentence = reason[:REASON_MAX], sentence[:SENTENCE_MAX]
    if phase in ("failed", "undone"):
        rollout.ended_at = timezone.now()
    rollout.save(update_fields=["phase", "reason", "sentence", "ended_at"])


def take_artifact(
    loaded: Loaded, revision: Revision, artifact: str | None, layout: Mapping[str, Any] | None
) -> None:
    """What its compile job has made. Its epoch is that of the revision with the same cache: namespace
    and layout; else a new one."""
    revision.artifact, revision.layout = artifact, dict(layout) if layout else None
    revision.compiled_at = timezone.now()
    if revision.template_read().cache.enabled:
        known = revision.workload.revisions.exclude(epoch=None).order_by("-number")
        found = {one.epoch: _namespace(one) for one in known}
        ours = _namespace(revision)
        same = (epoch for epoch, of in found.items() if epoch and of == ours)
        revision.epoch = next(same, None) or max((epoch or 0 for epoch in found), default=0) + 1
    revision.save(update_fields=["artifact", "layout", "epoch", "compiled_at"])
    name = loaded.workload.name
    loaded.news.append(("workload.compiled", f"Revision {revision.number} of {name} is compiled."))


def _namespace(revision: Revision) -> tuple[object, ...]:
    """Whose columns can be used by each other: of the same model revision, in the same layout."""
    template = revision.template_read()
    weights = template.weights
    return revision.layout, weights.revision if weights else "", template.engine.kind


def boxes_of_session(loaded: Loaded, ordinal: int, epoch: int | None) -> list[str]:
    """For a new instance: those of its home, unless they are to be left, or without a cache those of its
    replica that are not to be left; else some that nobody has."""
    workload = loaded.workload
    if workload.session is None:
        return []
    if epoch is None:
        kept = _boxes_of_replica(loaded, ordinal)
    elif kept := boxes_of_home(loaded, Home(epoch, ordinal)):
        return kept
    taken: Counter[str] = Counter(box for row in loaded.rows.values() for box in row.boxes)
    taken.update(box for one in loaded.homes for box in one.boxes)
    others = sorted({*loaded.takes_jobs} - {*kept}, key=lambda name: (taken[name], name))
    return [*kept, *others][: workload.boxes_per_replica]


def boxes_of_home(loaded: Loaded, home: Home) -> list[str]:
    """Where its newest instance is that need not leave, else its job; none if all have to."""
    found: list[Sequence[str]] = [
        row.boxes for row in loaded.rows.values() if (row.epoch, row.ordinal) == home
    ]
    found = [*(one.boxes for one in loaded.homes if one.home == home), *found]
    return next((list(one) for one in reversed(found) if one and _to_leave(loaded).isdisjoint(one)), [])


def _boxes_of_replica(loaded: Loaded, ordinal: int) -> list[str]:
    """On which its instance stays that has to leave the fewest, the newest of such."""
    found = [row.boxes for row in loaded.rows.values() if row.ordinal == ordinal and row.boxes]
    to_leave = _to_leave(loaded)
    its = min(reversed(found), key=lambda boxes: len(to_leave.intersection(boxes)), default=())
    return [box for box in its if box not in to_leave]


def _to_leave(loaded: Loaded) -> frozenset[str]:
    return loaded.session.to_leave if loaded.session else frozenset()


def fit_place(loaded: Loaded, ordinal: int, epoch: int | None) -> dict[str, Any]:
    """What brains are to know of a replica."""
    workload = loaded.workload
    template = workload.revision.template_read() if workload.revision else None
    kind = template.engine.kind if template else "other"
    home = rendering.home_name(workload, epoch, ordinal) if epoch is not None else None
    return {
        "url": "",
        "endpoint": EndpointSource.REDIS,
        "engine": ENGINES.get(kind, Engine.OTHER),
        "driver": Driver.objects.filter(name=home, workload=workload.name).first() if home else None,
    }
