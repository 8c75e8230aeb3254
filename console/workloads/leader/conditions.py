"""What people read of a workload's state: conditions, each with a reason and a sentence. Pure.

`Ready` follows from the others, as in KServe: it can be used. Whether a roll-out is under way is apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from console.workloads.leader.replicas import Replica
from console.workloads.leader.verdicts import Verdict
from console.workloads.leader.world import (
    CompileState,
    Condition,
    Endpoint,
    Instance,
    Intent,
    Revision,
    Seen,
    State,
)
from telemetry.units import counted

COMPILED: Final = "Compiled"
SESSION: Final = "SessionReady"
INSTANCES: Final = "InstancesReady"
WARM: Final = "CacheWarm"
PUBLISHED: Final = "EndpointsPublished"
ROLLOUT: Final = "RolloutComplete"
READY: Final = "Ready"
CLUSTER_UNKNOWN: Final = "ClusterUnknown"  # the reason where the Cluster Server is silent
WAITING_FOR_CACHE: Final = "WaitingForCache"  # as managers say it


def conditions(
    intent: Intent,
    seen: Seen,
    replicas: Sequence[Replica],
    endpoints: Sequence[Endpoint],
    verdict: Verdict | None,
    *,
    is_complete: bool,
) -> tuple[Condition, ...]:
    """All of them, `Ready` first. `is_complete`: whether the revision is one to go back to."""
    wanted = [one for one in replicas if one.ordinal < intent.replicas]
    ready = sum(not one.is_draining for one in endpoints if one.ordinal < intent.replicas)
    parts = (
        _compiled(intent, seen),
        _session(intent, seen),
        _instances(intent, wanted, ready),
        _warm(seen, wanted),
        _published(seen),
        _rollout(intent, seen, wanted, verdict, is_complete=is_complete),
    )
    return (_ready(intent, parts, ready), *parts)


def _compiled(intent: Intent, seen: Seen) -> Condition:
    number = intent.revision.number
    if intent.revision.is_compiled:
        return Condition(COMPILED, True, "Compiled", f"Revision {number} is compiled.")
    match seen.compile.state:
        case CompileState.FAILED:
            return Condition(COMPILED, False, "CompileFailed", seen.compile.sentence)
        case CompileState.RUNNING if seen.compile.sentence:
            why = f"Revision {number} is compiled again in a moment: {seen.compile.sentence}"
            return Condition(COMPILED, None, "Waiting", why)
        case CompileState.RUNNING:
            return Condition(COMPILED, None, "Compiling", f"Revision {number} is being compiled.")
        case _:
            return Condition(COMPILED, None, "Waiting", f"Revision {number} is not compiled yet.")


def _session(intent: Intent, seen: Seen) -> Condition:
    if not intent.boxes_per_replica:
        return Condition(SESSION, True, "NotNeeded", "It has no boxes, and so no session.")
    session = seen.session
    needed = intent.replicas * intent.boxes_per_replica
    if session is None:
        return Condition(SESSION, None, "Waiting", "Its session is not created yet.")
    if session.granted >= needed:
        return Condition(SESSION, True, "Granted", f"Its session has {counted(session.granted, 'box')}.")
    why = f"Its session has {session.granted} of {counted(needed, 'box')}."
    if session.cause:
        helps = "Waiting does not help." if session.refused else "It waits."
        why = f"{why} {session.cause_sentence} {helps}"
    return Condition(SESSION, False, session.cause or "WaitingForBoxes", why)


def _instances(intent: Intent, wanted: Sequence[Replica], ready: int) -> Condition:
    needed = max(min(1, intent.replicas), intent.replicas - intent.rules.max_unavailable)
    they_are = f"{ready} of {intent.replicas} {'is' if ready == 1 else 'are'} ready."
    if ready >= needed:
        return Condition(INSTANCES, True, "Ready", they_are)
    for replica in wanted:
        for one in (replica.heir, *replica.rest):
            if one is not None and one.sentence and (not one.answers or one.reason == WAITING_FOR_CACHE):
                said = f"{they_are} {_why_not_ready(one, replica)}"
                return Condition(INSTANCES, False, one.reason or "Starting", said)
    return Condition(INSTANCES, False, "Starting", they_are)


def _why_not_ready(one: Instance, replica: Replica) -> str:
    """Its own sentence. A manager does not know whether another instance has the cache."""
    if one.reason != WAITING_FOR_CACHE:
        return one.sentence
    others = [other for other in (*replica.rest, *replica.draining) if other is not one]
    keeper = next((other for other in others if other.home == one.home), None)
    if keeper is None:
        return f"The engine of {one.name} answers; its driver is being started."
    return f"The engine of {one.name} answers, and waits until {keeper.name} has let go of the cache."


def _warm(seen: Seen, wanted: Sequence[Replica]) -> Condition:
    owners = [one.owner for one in wanted if one.owner is not None]
    cold = [one.name for one in owners if not one.is_warm]
    if not owners:
        return Condition(WARM, None, "NoInstance", "No instance serves.")
    if cold:
        names = ", ".join(cold[:5])
        return Condition(WARM, False, "WithoutCache", f"These serve without their cache: {names}.")
    jobs = {one.home: one for one in seen.homes}
    for one in owners:
        job = jobs.get(one.home) if one.home else None
        if one.home and (job is None or not job.has_job):
            why = job.refused if job and job.refused else "It is being reserved."
            return Condition(WARM, False, "WithoutMemory", f"{one.name} has no memory yet. {why}")
        if job is not None and job.is_starting:
            return Condition(WARM, False, "OpeningShards", f"The shards of {one.name} are being opened.")
    return Condition(WARM, True, "Attached", "All that serve have their cache.")


def _published(seen: Seen) -> Condition:
    if seen.is_stale:
        return Condition(
            PUBLISHED,
            None,
            CLUSTER_UNKNOWN,
            "The Cluster Server has not been heard from; endpoints stay.",
        )
    if seen.refusal:
        return Condition(PUBLISHED, False, "RedisRefuses", seen.refusal)
    if not seen.can_publish:
        return Condition(
            PUBLISHED, False, "RedisAway", "Redis takes no endpoints; brains go on with those they know."
        )
    return Condition(PUBLISHED, True, "Published", "Its endpoints are in Redis, where brains read them.")


def _rollout(
    intent: Intent,
    seen: Seen,
    wanted: Sequence[Replica],
    verdict: Verdict | None,
    *,
    is_complete: bool,
) -> Condition:
    new = [one for one in wanted if one.heir is not None and one.owner is one.heir]
    done = sum(one.live == 1 for one in new)
    counted = f"{len(new)} of {intent.replicas} replicas run {_named(intent.revision)}."
    if intent.deleting:
        left = sum(one.live for one in wanted)
        return Condition(ROLLOUT, False, "Deleting", f"It is being deleted; {left} instances are left.")
    if verdict is not None:
        return Condition(ROLLOUT, False, verdict.reason, verdict.sentence)
    if done == len(wanted):
        if is_complete:
            return Condition(ROLLOUT, True, "Complete", counted)
        why = f"{counted} It is complete when they have served for a while, and nothing else runs."
        return Condition(ROLLOUT, False, "Settling", why)
    if leaving := _leaving(intent, seen, wanted):
        return replace(leaving, message=f"{counted} {leaving.message}")
    if outdated := [one for one in wanted if any(member.is_outdated for member in one.rest)]:
        names = ", ".join(f"{intent.name}-{one.ordinal}" for one in outdated[:5])
        said = f"{names} gets a new instance: the console has another address."
        return Condition(ROLLOUT, False, "ConsoleMoved", f"{counted} {said}")
    if intent.paused:
        return Condition(ROLLOUT, False, "Paused", f"The rollout is paused. {counted}")
    if lacking := _lacking(intent, seen):
        return Condition(ROLLOUT, False, "WaitingForBoxes", f"{counted} {lacking}")
    moving = [one.heir for one in wanted if one.heir is not None and one.owner is not one.heir]
    standing = next((one for one in moving if one.state is State.STANDBY), None)
    if standing is not None:
        return Condition(
            ROLLOUT, False, "HandingOver", f"{counted} {standing.name} takes over the cache."
        )
    return Condition(ROLLOUT, False, "RollingOut", counted)


def _named(revision: Revision) -> str:
    """By its number, and by that of the one that it restores, which its instances may have."""
    same = "" if revision.same_as is None else f", the same as revision {revision.same_as}"
    return f"revision {revision.number}{same}"


def _lacking(intent: Intent, seen: Seen) -> str:
    """Which boxes a cold roll-out waits for, and what else would help; empty if it has them."""
    session = seen.session
    needed = intent.replicas * intent.boxes_per_replica
    if session is None or not needed <= session.granted < session.boxes:
        return ""
    return (
        f"It waits for {counted(session.boxes - session.granted, 'box')}: engines with another cache "
        "start beside the old ones, on boxes of their own. Free some, or set rollout.max_surge to 0 and "
        "rollout.max_unavailable to 1, and replicas are replaced in place."
    )


def _leaving(intent: Intent, seen: Seen, wanted: Sequence[Replica]) -> Condition | None:
    """Which replicas are to leave boxes, and whether they have somewhere to go; none if none are."""
    session = seen.session
    if session is None:
        return None
    leaving = [
        one
        for replica in wanted
        for one in (*replica.rest, *replica.draining)
        if seen.leaves(one) and one.template == intent.template
    ]
    if not leaving:
        return None
    boxes = sorted({box for one in leaving for box in one.boxes} & session.to_leave)
    names = ", ".join(dict.fromkeys(f"{intent.name}-{one.ordinal}" for one in leaving))
    said = f"{names} moves off {', '.join(boxes[:5])}."
    free = session.spare + session.free
    # A job has all of its boxes from the beginning, and starts there before it ends on the others.
    needed = min(
        len(session.to_leave & {*one.boxes}) if one.home is None else len(one.boxes) for one in leaving
    )
    is_moving = any(replica.heir is not None for replica in wanted if replica.rest or replica.draining)
    if free >= needed or is_moving:
        return Condition(ROLLOUT, False, "LeavingBoxes", said)
    if not free:
        lacking = "No other box is free."
    else:
        others = counted(needed, "other box", "other boxes")
        are_free = f"{counted(free, 'box is', 'boxes are')} free"
        if any(one.home is None for one in leaving):  # of one template: so none of them has a job
            lacking = f"It needs {others}, and {are_free}."
        else:
            lacking = f"Its job needs {others}, where it starts anew, and {are_free}."
    return Condition(ROLLOUT, False, "TooFewBoxes", f"{said} {lacking}")


def _ready(intent: Intent, parts: Sequence[Condition], ready: int) -> Condition:
    """It serves. That it is cold, or becomes another revision, keeps nobody from using it."""
    if intent.deleting:
        return Condition(READY, False, "Deleting", "It is being deleted.")
    if not intent.replicas:
        return Condition(READY, False, "NoReplicas", "It has no replicas.")
    by_type = {one.type: one for one in parts}
    if by_type[INSTANCES].status:
        return Condition(READY, True, "Ready", by_type[INSTANCES].message)
    order = (COMPILED, SESSION, INSTANCES) if not ready else (INSTANCES,)
    cause = next(by_type[kind] for kind in order if not by_type[kind].status)
    return Condition(READY, False, cause.reason, cause.message)
