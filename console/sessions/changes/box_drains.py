"""Draining a box: it takes nothing new, its jobs leave it, and its session gets another box for it.

Jobs are not moved here: a job on another box is another job. Those of workloads are moved by who keeps
the workload, which asks `services.boxes_to_leave`; all others are ended by people.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.fleet import boxes
from console.fleet.models import Box
from console.fleet.services import for_change, lock_fleet, visible_boxes
from console.operations import services as operations
from console.operations.core import Done, Outcome, Waiting
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation
from console.placement.topology import State
from console.sessions import services
from console.sessions.changes.drains import LEAVING, PLAN_AGAIN_SECONDS
from console.sessions.models import Session, SessionBox
from console.sessions.plans.proposals import CannotPlan, more_boxes
from console.sessions.plans.snapshot import Snapshot
from telemetry.topics import FLEET, of_session


@transaction.atomic
def drain(principal: Principal, name: str, *, reason: str = "") -> Operation:
    """Have a box left by its jobs and by its session. It takes nothing new from then on.

    Raises operations' Busy.
    """
    box = for_change(principal, visible_boxes, name, Role.ON_CALL)
    before = boxes.snapshot(box)
    operation = operations.start(
        principal, "box.drain", boxes.topic(name), f"Drain box {name}", plan={"box": name}, before=before
    )
    record(
        principal,
        "box.drain",
        Subject("box", name, name, topics=[FLEET]),
        before=before,
        reason=reason,
        sentence=f"{operation.sentence}.",
    )
    return operation


def _box(operation: Operation) -> Box:
    lock_fleet()
    return Box.objects.select_for_update(no_key=True).get(name=operation.plan["box"])


def _drain(operation: Operation) -> Outcome:
    reason = operation.sentence
    boxes.set_state(SYSTEM, _box(operation), State.DRAINING, reason=reason, operation=operation)
    return Done()


def _as_before(operation: Operation) -> Outcome:
    state, reason = State(operation.before["state"]), operation.before["reason"]
    boxes.set_state(SYSTEM, _box(operation), state, reason=reason, operation=operation)
    return Done()


def _leave(operation: Operation) -> Outcome:
    """Wait until no job runs there, and give its session another box for it."""
    box = _box(operation)
    held = SessionBox.objects.filter(box=box).select_related("session").first()
    if held is None:
        return _left(operation, box)
    session = Session.objects.select_for_update(no_key=True).get(pk=held.session_id)
    held.refresh_from_db()
    topics = frozenset({of_session(session.name)})
    if jobs := services.jobs_on(held):
        said = " ".join(services.who_moves(job) for job in jobs)
        return Waiting(said, seconds=PLAN_AGAIN_SECONDS, topics=topics)
    if held.leaving or not held.ready:
        said = f"An operation on {session.name} adds or removes it."
        return Waiting(said, seconds=PLAN_AGAIN_SECONDS, topics=topics)
    try:
        [instead] = more_boxes(Snapshot.now(), (), 1)
    except CannotPlan as error:
        return Waiting(error.with_names, seconds=PLAN_AGAIN_SECONDS)
    held.delete()
    SessionBox.objects.create(session=session, box=Box.objects.get(name=instead), ready=True)
    session.version += 1
    session.save(update_fields=["version"])
    operation.notes.update(session=session.name, instead=instead)
    return _left(operation, box)


def _left(operation: Operation, box: Box) -> Outcome:
    """No session has it any more. Instances without a cache, which have no job, leave it after that;
    also those of a session that a former drain, which was cancelled, has given another box."""
    its = {"workload__instances__ended_at": None, "workload__instances__boxes__contains": [box.name]}
    session = Session.objects.filter(**its).first()
    if session is not None:
        said = f"Workload {services.workload_of(session).name} moves its instances to another box."
        return Waiting(said, seconds=PLAN_AGAIN_SECONDS)
    notes = operation.notes
    if "instead" not in notes:
        return Done(f"No session has {box.name}.")
    return Done(f"{notes['session']} has {notes['instead']} instead.")


@machine("box.drain")
class DrainBox(Machine):
    names_places = True  # jobs of anybody
    steps = (
        Step("drain", "Stop new jobs", _drain, _as_before),
        Step("leave", "Wait until its jobs have left, and replace it", _leave, patience=LEAVING),
    )

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        notes = operation.notes
        return {
            "box": operation.plan["box"],
            "session": notes.get("session"),
            "instead": notes.get("instead"),
        }
