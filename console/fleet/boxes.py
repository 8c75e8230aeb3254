"""What people change of a box: its state."""

from __future__ import annotations

from typing import Any, Final

from django.db import transaction

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.fleet import services
from console.fleet.models import Box
from console.operations.models import Operation
from console.operations.services import Busy, running_on
from console.placement.topology import State
from telemetry.topics import FLEET

BY_PEOPLE: Final = (State.READY, State.CORDONED)


def topic(name: str) -> str:
    """What operations on a box have as their target."""
    return f"box:{name}"


def snapshot(box: Box) -> dict[str, Any]:
    """What the audit trail keeps of it."""
    return {"state": box.state, "reason": box.state_reason}


def nearest_by_people(box: Box) -> State:
    """Its state, or what people would set it to that is like it: what drains takes no new jobs."""
    state = State(box.state)
    return state if state in BY_PEOPLE else State.CORDONED


@transaction.atomic
def set_state(
    principal: Principal,
    box: Box,
    state: State,
    *,
    reason: str = "",
    operation: Operation | None = None,
) -> Box:
    """Say what a box that came from `for_change` should be. The same again changes nothing. What runs on
    it goes on. Raises Busy while another operation than the one that asks drains it."""
    before = snapshot(box)
    if before == {"state": state.value, "reason": reason}:
        return box
    at_work = running_on(topic(box.name))
    if at_work is not None and at_work != operation:
        raise Busy(at_work)
    box.state, box.state_reason = state.value, reason
    box.version += 1
    box.full_clean()
    box.save()
    record(
        principal,
        "box.state",
        Subject("box", box.name, box.name, topics=[FLEET]),
        before=before,
        after=snapshot(box),
        reason=reason,
        sentence=f"{box.name} is {state.value}{f': {reason}' if reason else ''}.",
    )
    return box


@undoable("box.state")
def _undo_state(principal: Principal, entry: AuditEntry, reason: str) -> None:
    services.check_fleet(principal, Role.ON_CALL)
    if not Box.objects.filter(name=entry.object_id).exists():
        raise CannotUndo("The box no longer exists.")
    box = services.for_change(principal, services.visible_boxes, entry.object_id, Role.ON_CALL)
    before, after = entry.before or {}, entry.after or {}
    if box.state != after.get("state"):
        raise CannotUndo(f"{box.name} is {box.state} by now.")
    if box.state_reason != after.get("reason", ""):
        raise CannotUndo(f"{box.name} is {box.state} for another reason by now.")
    if State(before["state"]) not in BY_PEOPLE:
        raise CannotUndo(f"{box.name} was draining: drain it again.")
    try:
        set_state(principal, box, State(before["state"]), reason=reason)
    except Busy as error:
        raise CannotUndo(str(error)) from None
