"""Moving streams while they run: one that somebody names, or those that cross the spine."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from console.accounts.principal import Principal
from console.fleet.models import Node
from console.fleet.nodes import Impossible
from console.operations.models import Operation
from console.placement import sentences
from console.placement.plan import RailsPlan, route
from console.placement.rules import Cause
from console.placement.topology import State, Tier
from console.sessions import rules as session_rules
from console.sessions.changes.requests import check_idle, record, start
from console.sessions.models import Session, Stream
from console.sessions.plans import proposals, reservations
from console.sessions.plans.proposals import BeingChanged, CannotPlan
from console.sessions.plans.snapshot import Snapshot, key_of
from console.sessions.services import streams_of
from console.sessions.steps.relocation import Place, place_of, send_to
from telemetry.units import counted, size


def plan_rails(session: Session, moves_max: int | None = None) -> RailsPlan:
    """Which moves would take its streams off the spine, and what they gain."""
    return proposals.plan_rails(Snapshot.now(), session.name, moves_max)


def check_rails(session: Session, moves_max: int | None = None) -> RailsPlan:
    """As `plan_rails`. Raises what `restore_rails` does."""
    found = _worthwhile(session, plan_rails(session, moves_max))
    check_idle(session)
    return found


def sentence_of(session: Session, plan: RailsPlan) -> str:
    """What a plan to restore the rails of a session does, or why it does nothing."""
    found = sentences.restore_rails(plan)
    if (changing := _changing(session)) and not (plan.moves or plan.left):
        streams = counted(changing, "stream is", "streams are")
        return f"{streams} being moved or resized: wait until that is done. All others are on rails."
    return found


def _changing(session: Session) -> int:
    """How many streams no plan touches, since an operation moves or resizes them."""
    return streams_of(session).exclude(operation=None).count()


def _worthwhile(session: Session, plan: RailsPlan) -> RailsPlan:
    if plan.moves:
        return plan
    why = sentence_of(session, plan)
    if plan.left:
        raise CannotPlan(Cause.WAITING_FOR_RAIL, why)
    raise BeingChanged(why) if _changing(session) else Impossible(why)


@transaction.atomic
def move(
    principal: Principal, session: Session, stream: Stream, node: Node, *, reason: str = ""
) -> Operation:
    """Move a stream of a session that came from `for_change` to a node. Its job goes on.

    Raises CannotPlan where the node has no room or the path is not allowed, and operations' Busy.
    """
    snapshot = Snapshot.now()
    to = _place_at(snapshot, session, stream, node)
    return _begin_moves(
        principal,
        "session.move",
        session,
        f"Move {stream.name} of {session.name} to {node.name}",
        [(stream, to)],
        reason,
    )


@transaction.atomic
def restore_rails(
    principal: Principal, session: Session, *, moves_max: int | None = None, reason: str = ""
) -> Operation:
    """Move the streams of a session that came from `for_change` off the spine, as far as that gains.

    Raises CannotPlan where no move does, or streams are being changed and all others are on rails,
    Impossible where all are, and operations' Busy.
    """
    snapshot = Snapshot.now()
    found = _worthwhile(session, proposals.plan_rails(snapshot, session.name, moves_max))
    streams = {key_of(stream): stream for stream in streams_of(session)}
    nodes = {node.name: node for node in Node.objects.all()}
    moves = []
    for one in found.moves:
        stream = streams[one.stream.key]
        path = route(snapshot.fleet, stream.box.name, stream.domain, snapshot.fleet.node[one.target])
        moves.append((stream, Place.at(nodes[one.target], stream.slots, path)))
    return _begin_moves(
        principal,
        "session.restore-rails",
        session,
        f"Restore rails of {session.name}: move {counted(len(moves), 'stream')}",
        moves,
        reason,
    )


def _begin_moves(
    principal: Principal,
    kind: str,
    session: Session,
    sentence: str,
    moves: Sequence[tuple[Stream, Place]],
    reason: str,
) -> Operation:
    for stream, _ in moves:
        if stream.operation_id is not None:
            raise BeingChanged(f"{stream.name} is already being moved: wait until it has finished.")
    before = {str(stream.pk): reservations.written(place_of(stream)) for stream, _ in moves}
    told = {stream.name: place.node.name for stream, place in moves}
    operation = start(
        principal, kind, session, sentence, plan={"moves": told}, before={"streams": before}
    )
    operation.notes["total"] = len(moves)
    operation.save(update_fields=["notes"])
    for stream, place in moves:
        send_to(stream, place, operation)
    was = {stream.name: stream.node.name for stream, _ in moves}
    session.version += 1
    session.save()
    record(principal, operation, session, before=was, after=told, reason=reason)
    return operation


def _place_at(snapshot: Snapshot, session: Session, stream: Stream, node: Node) -> Place:
    """There, with the size that it has. Raises CannotPlan.

    A path that the rules refuse will do where it is better than the one that the stream has.
    """
    there = snapshot.fleet.node.get(node.name)
    if there is None or there.state is not State.READY:
        raise CannotPlan(Cause.NODE_CORDONED, f"{node.name} accepts no new streams: it is {node.state}.")
    if stream.node_id == node.pk:
        raise CannotPlan(Cause.MISCONFIGURED, f"{stream.name} is on {node.name} already.")
    here = [stream for stream, at in snapshot.running.items() if at == node.name]
    free = there.memory_bytes - sum(stream.memory_bytes for stream in here)
    if free < stream.memory_bytes or len(here) >= there.shards_max:
        raise CannotPlan(
            Cause.WAITING_FOR_CAPACITY,
            f"{node.name} has {size(free)} free for {size(stream.memory_bytes)}, and {len(here)} of "
            f"{there.shards_max} streams.",
        )
    path = route(snapshot.fleet, stream.box.name, stream.domain, there)
    limit = session_rules.effective_rules(session.org, session.path).limit(float("inf"))
    if limit.worst < path.tier >= stream.tier and limit.because is not None:
        raise CannotPlan(
            limit.because,
            f"The path to {node.name} would be {path.tier.name.lower()}: the rules refuse it.",
        )
    return Place.at(node, stream.slots, path, "" if path.tier is Tier.RAIL else sentences.MOVED)
