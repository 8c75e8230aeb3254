"""What people change of a node: its state and its labels. And who says that streams run there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from django.db import transaction
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.fleet import services
from console.fleet.labels import NotALabel, check_labels
from console.fleet.models import Node, topic
from console.operations.models import Operation
from console.operations.services import Busy, running_on
from console.placement.topology import State
from telemetry.units import counted

BY_PEOPLE: Final = (State.READY, State.CORDONED, State.DRAINING, State.MAINTENANCE)


class Impossible(ValueError):
    """The fleet as it is now does not allow it. The text says why, and what to do."""


class InProgress(Impossible):
    """Something is in the way that ends by itself: waiting helps."""


Kind = Literal["node", "box"]
Streams = Callable[[Kind, Collection[str]], Mapping[str, int]]
_streams: list[Streams] = []


def tells_streams(function: Streams) -> Streams:
    """Register who knows of streams: how many begin at each of these boxes, or end on these nodes."""
    _streams.append(function)
    return function


def streams_on(kind: Kind, names: Collection[str]) -> dict[str, int]:
    """How many streams there are on each of these that has some."""
    found: Counter[str] = Counter()
    for tell in _streams:
        found.update(tell(kind, names))
    return {name: count for name, count in found.items() if count}


Listener = Callable[[], None]
_listeners: list[Listener] = []


def hears_of_nodes(function: Listener) -> Listener:
    """Register who is told, in the transaction, that nodes have other states or descriptions."""
    _listeners.append(function)
    return function


def tell_listeners() -> None:
    for hear in _listeners:
        hear()


def snapshot(node: Node) -> dict[str, Any]:
    """What the audit trail keeps of a node's state and labels."""
    state, reason = wanted(node)
    return {"state": state.value, "reason": reason, "labels": node.labels}


def wanted(node: Node) -> tuple[State, str]:
    """What people want it to be, which it is unless it is lost, and why."""
    if node.state == State.LOST.value:
        return State(node.held_state), node.held_reason
    return State(node.state), node.state_reason


@transaction.atomic
def set_state(
    principal: Principal,
    node: Node,
    state: State,
    *,
    reason: str = "",
    operation: Operation | None = None,
) -> Node:
    """Say what a node that came from `for_change` should be. The same again changes nothing.

    A node that is lost becomes that when it comes back. Raises Impossible for maintenance while streams
    run there, and Busy while another operation than the one that asks drains or upgrades it.
    """
    if state not in BY_PEOPLE:
        raise Impossible("Whether a node is lost is found out by the console, and not decided.")
    before = snapshot(node)
    if wanted(node) == (state, reason):
        return node
    at_work = running_on(topic(node))
    if at_work is not None and at_work != operation:
        raise Busy(at_work)
    if state is State.MAINTENANCE and (count := streams_on("node", [node.name]).get(node.name)):
        raise Impossible(
            f"{counted(count, 'stream runs', 'streams run')} on {node.name}. Drain it first."
        )
    if node.state == State.LOST.value:
        node.held_state, node.held_reason = state.value, reason
    else:
        node.state, node.state_reason, node.state_since = state.value, reason, timezone.now()
    sentence = f"{node.name} is {state.value}{f': {reason}' if reason else ''}."
    if node.state == State.LOST.value:
        sentence = f"{node.name} will be {state.value} when it comes back."
    tell_listeners()
    _save(principal, "node.state", node, sentence, before, reason)
    return node


@transaction.atomic
def set_labels(
    principal: Principal,
    node: Node,
    labels: Mapping[str, str],
    *,
    reason: str = "",
) -> Node:
    """Give a node that came from `for_change` these labels. Raises Impossible for what is no label."""
    try:
        check_labels(labels)
    except NotALabel as error:
        raise Impossible(str(error)) from None
    if node.labels == dict(labels):
        return node
    before = snapshot(node)
    node.labels = dict(labels)
    sentence = f"The labels of {node.name} have changed."
    _save(principal, "node.labels", node, sentence, before, reason)
    return node


@undoable("node.state", Busy, Impossible)
def _undo_state(principal: Principal, entry: AuditEntry, reason: str) -> None:
    node = _node_of(principal, entry, Role.ON_CALL)
    before, after = entry.before or {}, entry.after or {}
    state, why = wanted(node)
    if state.value != after.get("state"):
        raise CannotUndo(f"{node.name} is {state.value} by now.")
    if why != after.get("reason", ""):
        raise CannotUndo(f"{node.name} is {state.value} for another reason by now.")
    set_state(principal, node, State(before["state"]), reason=reason)


@undoable("node.labels")
def _undo_labels(principal: Principal, entry: AuditEntry, reason: str) -> None:
    node = _node_of(principal, entry, Role.PLATFORM_ADMIN)
    if node.labels != (entry.after or {}).get("labels"):
        raise CannotUndo(f"The labels of {node.name} have changed since.")
    set_labels(principal, node, (entry.before or {})["labels"], reason=reason)


def _node_of(principal: Principal, entry: AuditEntry, at_least: Role) -> Node:
    services.check_fleet(principal, at_least)
    if not Node.objects.filter(name=entry.object_id).exists():
        raise CannotUndo("The node no longer exists.")
    return services.for_change(principal, services.visible_nodes, entry.object_id, at_least)


def _save(
    principal: Principal,
    action: str,
    node: Node,
    sentence: str,
    before: dict[str, Any],
    reason: str,
) -> None:
    node.version += 1
    node.full_clean(exclude=["heartbeat_sha256"])
    node.save()
    record(
        principal,
        action,
        Subject("node", node.name, node.name, topics=[topic(node)]),
        before=before,
        after=snapshot(node),
        reason=reason,
        sentence=sentence,
    )
