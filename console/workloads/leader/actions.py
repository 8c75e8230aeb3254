"""What a decision asks of other parts of the console, in a transaction of the leader."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any, Final

from console.accounts.principal import SYSTEM
from console.fleet.models import Driver
from console.operations import services as operations
from console.placement.rules import Cause
from console.routing import services as routing
from console.routing.models import EndpointSource, Engine
from console.sessions import services as sessions
from console.sessions.changes import driver_removal, jobs, sizes
from console.sessions.changes.requests import of_job
from console.sessions.models import WAIT_SECONDS_MAX
from console.sessions.plans.proposals import CannotPlan
from console.workloads import changes, lifecycle, plans
from console.workloads import services as workloads
from console.workloads.leader import rendering, store
from console.workloads.leader.loaded import START_JOB, Loaded
from console.workloads.leader.world import (
    CancelJob,
    Complete,
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
)
from console.workloads.models import Workload

KEY_BYTES: Final = 32
ENGINES: Final = {"vllm": Engine.VLLM, "sglang": Engine.SGLANG}


def handler_of(action: object) -> Callable[[Loaded], object] | None:
    """What carries it out; None if nobody in the console does."""
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
    boxes = loaded.boxes_of_home(home)
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
    if running is not None and running.kind == START_JOB:
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
    values = _place_of(loaded, ordinal, epoch)
    known = model.replicas.filter(name=name).first()
    if known is None:
        values["api_key"] = secrets.token_urlsafe(KEY_BYTES)
        routing.add_replica(SYSTEM, model, name=name, values=values, reason=why)
    else:
        routing.update_replica(SYSTEM, known, values=values, reason=why)


def _place_of(loaded: Loaded, ordinal: int, epoch: int | None) -> dict[str, Any]:
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
