"""Taking everything off a node while jobs go on, and what is done with it then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import Q

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.fleet.models import Node
from console.fleet.nodes import Impossible, set_state, wanted
from console.fleet.services import for_change, lock_fleet, visible_nodes
from console.operations import services as operations
from console.operations.core import Done, Failed, Outcome, Waiting
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation
from console.placement import sentences
from console.placement.plan import Placed, Unplaced
from console.placement.topology import State
from console.sessions.models import Stream
from console.sessions.plans.proposals import away_from
from console.sessions.plans.snapshot import Snapshot
from console.sessions.rules import effective_rules
from console.sessions.steps import fragments, relocation
from console.sessions.steps.relocation import Place, send_to
from telemetry.topics import of_source
from telemetry.units import counted

PLAN_AGAIN_SECONDS: Final = 5.0
LEAVING: Final = timedelta(hours=6)
BY_A_PERSON: Final = timedelta(days=1)
REPAIRING: Final = timedelta(days=1)
SENT: Final = "sent"  # the note of the streams that it has sent to other nodes
HERE: Final = "here"  # and of how many there were on the node at most


@transaction.atomic
def drain(
    principal: Principal, name: str, *, ignore_redundancy: bool = False, reason: str = ""
) -> Operation:
    """Move all that runs on a node to others, while jobs go on. It takes nothing new from then on.

    It begins when no redundant column can be lost by that, and ends when others have the fragments that
    the node had, unless it should `ignore_redundancy`. Raises operations' Busy.
    """
    node = for_change(principal, visible_nodes, name, Role.ON_CALL)
    plan = {"ignore_redundancy": ignore_redundancy}
    return _begin(principal, "node.drain", node, f"Drain {name}", plan, reason)


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """Where the streams of a node would go now, and why some would stay for the time being. `waits_for`:
    why none would go yet."""

    moves: list[tuple[Stream, Placed]]
    staying: list[str]
    waits_for: str


def check_drain(principal: Principal, name: str, *, ignore_redundancy: bool = False) -> DrainPlan:
    """What `drain` would do. Raises what it does, and Impossible where it would fail at once."""
    node = for_change(principal, visible_nodes, name, Role.ON_CALL)
    if running := operations.running_on(of_source("agent", name)):
        raise operations.Busy(running)
    placed, unplaced = _places(node)
    waits_for = "" if ignore_redundancy else fragments.why_needed(node)
    if not ignore_redundancy and not waits_for and (why := _why_not_replaced(node)):
        raise Impossible(f"{why} {fragments.IGNORED}")
    return DrainPlan(placed, [sentences.unplaced(one) for one in unplaced], waits_for)


@transaction.atomic
def _why_not_replaced(node: Node) -> str:
    """Why nobody could take over its fragments if it was draining, which is undone."""
    set_state(SYSTEM, node, State.DRAINING)
    why = fragments.why_not_replaced(node.name, fragments.held(node))
    transaction.set_rollback(True)
    return why


@transaction.atomic
def upgrade(
    principal: Principal,
    name: str,
    *,
    version: str = "",
    ignore_redundancy: bool = False,
    reason: str = "",
) -> Operation:
    """Drain a node, wait until its agent is of this version, or of another one, and use it again.

    The node keeps its fragments. It is drained when no redundant column can be lost by that, unless it
    should `ignore_redundancy`. Raises operations' Busy, and Impossible where it is of this version
    already.
    """
    node = for_change(principal, visible_nodes, name, Role.ON_CALL)
    if version and node.software_version == version:
        raise Impossible(f"{name} runs {version} already.")
    to = f" to {version}" if version else ""
    plan = {"version": version, "ignore_redundancy": ignore_redundancy}
    return _begin(principal, "node.upgrade", node, f"Upgrade {name}{to}", plan, reason)


def _begin(
    principal: Principal, kind: str, node: Node, sentence: str, plan: dict[str, Any], reason: str
) -> Operation:
    topic = of_source("agent", node.name)
    state, held_reason = wanted(node)
    before = {
        "state": state.value,
        "reason": held_reason,
        "software_version": node.software_version,
    }
    operation = operations.start(
        principal,
        kind,
        topic,
        sentence,
        plan={"node": node.name, **plan},
        before=before,
    )
    record(
        principal,
        kind,
        Subject("node", node.name, node.name, topics=[topic]),
        before=before,
        after=plan,
        reason=reason,
        sentence=f"{sentence}.",
    )
    return operation


def _node(operation: Operation) -> Node:
    lock_fleet()
    return Node.objects.select_for_update(no_key=True).get(name=operation.plan["node"])


def _be(operation: Operation, state: State, reason: str) -> Outcome:
    try:
        set_state(SYSTEM, _node(operation), state, reason=reason, operation=operation)
    except Impossible as error:
        return Failed("Impossible", str(error))
    return Done()


def _drain(operation: Operation) -> Outcome:
    """Once no redundant column can be lost by that."""
    node = _node(operation)
    if _ignores_redundancy(operation):
        return _be(operation, State.DRAINING, operation.sentence)
    if why := fragments.why_needed(node):
        return _waiting_for_redundancy(why)
    return _be(operation, State.DRAINING, operation.sentence)


def _waiting_for_redundancy(why: str) -> Waiting:
    return Waiting(f"{why} {fragments.NOT_WAITING}", seconds=fragments.LOOK_SECONDS)


def _empty(operation: Operation) -> Outcome:
    """Begin to drain, where others can take over the fragments that it has."""
    fragments.note_held(operation, _node(operation))
    outcome = _drain(operation)
    if isinstance(outcome, Done) and not _ignores_redundancy(operation):
        name, shards = operation.plan["node"], fragments.held(_node(operation))
        if why := fragments.why_not_replaced(name, shards):
            return Failed("TooFewAgents", f"{why} {fragments.IGNORED}")
    return outcome


def _ignores_redundancy(operation: Operation) -> bool:
    return bool(operation.plan.get("ignore_redundancy"))


def _repaired(operation: Operation) -> Outcome:
    return Done() if _ignores_redundancy(operation) else fragments.repaired(operation)


def _as_before(operation: Operation) -> Outcome:
    return _be(operation, State(operation.before["state"]), operation.before["reason"])


def _leave(operation: Operation) -> Outcome:
    """Send away what is on the node and nobody else has taken, and wait for the rest.

    Either it asks agents and drivers, or it holds the fleet: others would wait for who does both. And
    that nothing is here is only known while it is held, since others may have planned before the node
    was draining, and be about to come.
    """
    node = Node.objects.get(name=operation.plan["node"])
    here = Stream.objects.filter(Q(node=node) | Q(next_node=node))
    if relocation.of_operation(operation).exists():
        outcome = relocation.settle(operation)
        part = _part(operation, here.count())
        if isinstance(outcome, Waiting):
            return replace(outcome, part=part)
        return Waiting("Those have moved.", part, seconds=0)
    lock_fleet()
    left = here.count()
    if not left:
        return Done(f"Nothing runs on {node.name} any more.")
    operation.notes[HERE] = max(left, operation.notes.get(HERE, 0))
    refused, part = _send_away(operation, node), _part(operation, left)
    if going := relocation.of_operation(operation).count():
        operation.notes["total"] = going  # of those that can move now, as they say how far they are
        return Waiting(f"{counted(going, 'stream is', 'streams are')} left to move.", part)
    said = refused or "Another operation moves what is left."
    return Waiting(said, part, seconds=PLAN_AGAIN_SECONDS)


def _part(operation: Operation, left: int) -> float:
    """How much of what was on the node has left it."""
    return 1 - left / max(left, int(operation.notes.get(HERE, 0)), 1)


def _send_away(operation: Operation, node: Node) -> str:
    """Reserve places for what has none yet. What keeps the rest here."""
    placed, unplaced = _places(node)
    nodes = {one.name: one for one in Node.objects.filter(name__in=[at.node for _, at in placed])}
    for stream, at in placed:
        why = sentences.why(at.refused, at)
        send_to(stream, Place.at(nodes[at.node], stream.slots, at.route, why), operation)
    operation.notes[SENT] = [*operation.notes.get(SENT, ()), *(stream.pk for stream, _ in placed)]
    return sentences.unplaced(unplaced[0]) if unplaced else ""


def _places(node: Node) -> tuple[list[tuple[Stream, Placed]], list[Unplaced]]:
    """Where its streams that no operation changes can go, and those that can go nowhere."""
    snapshot = Snapshot.now()
    related = ("job__session__org", "job__driver", "box", "node")
    waiting = Stream.objects.filter(node=node, operation=None).select_related(*related)
    streams = list(waiting.order_by("pk"))
    limits = {
        session.name: effective_rules(session.org, session.path).limit(float("inf"))
        for session in {stream.job.session for stream in streams}
    }
    return away_from(snapshot, {node.name: State.DRAINING}, streams, limits)


@machine("node.drain")
class Drain(Machine):
    steps = (
        Step("drain", "Stop new placements", _empty, _as_before, patience=REPAIRING),
        Step("leave", "Move its streams to other nodes", _leave, relocation.stay, patience=LEAVING),
        Step("repair", "Wait until others have its fragments", _repaired, patience=REPAIRING),
    )

    @staticmethod
    def parameters(operation: Operation) -> dict[str, Any]:
        return {"ignore_redundancy": _ignores_redundancy(operation)}

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        name, sent = operation.plan["node"], operation.notes.get(SENT, ())
        # Others have ended with their job on the way.
        moved = Stream.objects.filter(pk__in=sent).exclude(node__name=name).count()
        return {"node": name, "moved": moved}


def _rest(operation: Operation) -> Outcome:
    """Others may have been lost while its streams moved."""
    node = _node(operation)
    if not _ignores_redundancy(operation) and (why := fragments.why_needed(node)):
        return _waiting_for_redundancy(why)
    return _be(operation, State.MAINTENANCE, operation.sentence)


def _upgraded(operation: Operation) -> Outcome:
    """Whoever upgrades nodes does so now. It is done when the agent tells of another version."""
    node = Node.objects.get(name=operation.plan["node"])
    before, asked = operation.before["software_version"], operation.plan["version"]
    now = node.software_version
    is_other = now == asked if asked else now != before
    if not is_other:
        target = asked or "another version"
        return Waiting(f"Install {target} on {node.name} and start its agent: it runs {now}.")
    if node.state == State.LOST.value:
        return Waiting(f"{node.name} has run {now}, and is lost: start its agent.")
    return Done(f"{node.name} runs {now}.")


def _in_service(operation: Operation) -> Outcome:
    """It takes new streams, unless somebody had cordoned it: an upgrade says nothing against that."""
    if operation.before["state"] == State.CORDONED.value:
        return _as_before(operation)
    return _be(operation, State.READY, "")


@machine("node.upgrade")
class Upgrade(Machine):
    steps = (
        Step("drain", "Stop new placements", _drain, _as_before, patience=REPAIRING),
        Step("leave", "Move its streams to other nodes", _leave, relocation.stay, patience=LEAVING),
        Step("rest", "Put it in maintenance", _rest, patience=REPAIRING),
        Step("upgrade", "Wait for the upgraded agent", _upgraded, patience=BY_A_PERSON),
        Step("ready", "Return it to service", _in_service),
    )

    @staticmethod
    def parameters(operation: Operation) -> dict[str, Any]:
        asked = operation.plan["version"]
        return {"version": asked, "ignore_redundancy": _ignores_redundancy(operation)}

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        node = Node.objects.get(name=operation.plan["node"])
        return {"node": node.name, "software_version": node.software_version}
