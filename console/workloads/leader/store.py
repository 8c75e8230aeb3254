"""What the leader writes of a workload, in its transaction."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

from django.utils import timezone

from cluster_server.proto import cluster_pb2 as pb
from console.accounts.principal import SYSTEM
from console.fleet.membership import tokens
from console.routing.models import Replica as Place
from console.workloads.leader import conditions, rendering, world
from console.workloads.leader.cluster import Known, Status
from console.workloads.leader.loaded import Loaded, room_since, since_of, time_of
from console.workloads.leader.verdicts import is_compared
from console.workloads.leader.world import (
    Complete,
    Condition,
    Create,
    Goal,
    Home,
    Remove,
    Seen,
    SetGoal,
    State,
)
from console.workloads.models import (
    REASON_MAX,
    SEEN_SECONDS,
    SENTENCE_MAX,
    Instance,
    Revision,
    Rollout,
)
from console.workloads.models import Condition as ConditionRow

SEEN: Final = timedelta(seconds=SEEN_SECONDS)
ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"
ENDED: Final = "It ended by itself."  # where nobody has said more
ENDED_MEANWHILE: Final = "It had ended by the time at which lost changes were noticed."


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
        boxes=loaded.boxes_of_session(action.ordinal, action.revision.epoch),
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


def _take(row: Instance, told: pb.InstanceStatus, status: Status) -> None:
    now = timezone.now()
    row.room_at, row.since = room_since(row, status, now), since_of(row, status, now)
    row.reason, row.sentence = status.reason, status.sentence
    if status.state is State.READY and row.ready_at is None:
        row.ready_at = row.since
    row.state, row.cache = status.state.value, status.cache.value
    row.acknowledged_goal, row.url = status.goal.value, status.url
    row.engine_restarts, row.host = status.restarts, told.host
    progress = told.progress
    row.progress_done, row.progress_total = progress.done, progress.total
    row.progress_unit, row.progress_seconds = progress.unit, progress.seconds
    row.running_requests, row.seen_at = told.running_requests, time_of(told.seen_at)


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
