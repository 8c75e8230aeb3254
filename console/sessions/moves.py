"""Moving streams while they run: one that somebody names, or those that cross the spine."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from console.accounts.principal import Principal
from console.fleet.models import Node
from console.operations.models import Operation
from console.placement import explain
from console.placement.plan import BringBack
from console.placement.reasons import route
from console.placement.rules import Cause
from console.placement.topology import State
from console.sessions import planning, reserving
from console.sessions import rules as ruling
from console.sessions.changing import record, start
from console.sessions.models import Session, Shard
from console.sessions.moving import Place, place_of, send_to
from console.sessions.planning import CannotPlan
from console.sessions.services import shards_of
from console.sessions.world import World, key_of
from telemetry.units import size


def plan_back_on_rails(session: Session, moves_max: int | None = None) -> BringBack:
    """Which moves would take its streams off the spine, and what they gain."""
    return planning.back_on_rails(World.now(), session.name, moves_max)


@transaction.atomic
def move(
    principal: Principal, session: Session, shard: Shard, node: Node, *, reason: str = ""
) -> Operation:
    """Move a shard of a session that came from `for_change` to a node. Its job goes on.

    Raises CannotPlan where the node has no room or the path is not allowed, and operations' Busy.
    """
    world = World.now()
    to = _place_at(world, session, shard, node)
    return _begin_moves(
        principal,
        "session.move",
        session,
        f"Move {shard.name} of {session.name} to {node.name}",
        [(shard, to)],
        reason,
    )


@transaction.atomic
def bring_back(
    principal: Principal, session: Session, *, moves_max: int | None = None, reason: str = ""
) -> Operation:
    """Move the streams of a session that came from `for_change` off the spine, as far as that gains.

    Raises CannotPlan where no move does, and operations' Busy.
    """
    world = World.now()
    found = planning.back_on_rails(world, session.name, moves_max)
    if not found.moves:
        raise CannotPlan(Cause.WAITING_FOR_RAIL, explain.bring_back(found))
    shards = {key_of(shard): shard for shard in shards_of(session)}
    nodes = {node.name: node for node in Node.objects.all()}
    moves = []
    for one in found.moves:
        shard = shards[one.stream.key]
        path = route(world.fleet, shard.box.name, shard.domain, world.fleet.node[one.target])
        moves.append(
            (
                shard,
                Place(nodes[one.target], shard.slots, int(path.tier), path.port_leaf, path.nic_leaf),
            )
        )
    return _begin_moves(
        principal,
        "session.bring-back",
        session,
        f"Bring {len(moves)} streams of {session.name} back on rails",
        moves,
        reason,
    )


def _begin_moves(
    principal: Principal,
    kind: str,
    session: Session,
    sentence: str,
    moves: Sequence[tuple[Shard, Place]],
    reason: str,
) -> Operation:
    for shard, _ in moves:
        if shard.operation_id is not None:
            raise CannotPlan(
                Cause.WAITING_FOR_DRAIN, f"{shard.name} is being moved: wait until that is done."
            )
    before = {str(shard.pk): reserving.written(place_of(shard)) for shard, _ in moves}
    told = {shard.name: place.node.name for shard, place in moves}
    operation = start(
        principal, kind, session, sentence, plan={"moves": told}, before={"shards": before}
    )
    operation.notes["total"] = len(moves)
    operation.save(update_fields=["notes"])
    for shard, place in moves:
        send_to(shard, place, operation)
    was = {shard.name: shard.node.name for shard, _ in moves}
    session.version += 1
    session.save()
    record(principal, operation, session, before=was, after=told, reason=reason)
    return operation


def _place_at(world: World, session: Session, shard: Shard, node: Node) -> Place:
    """There, with the size that it has. Raises CannotPlan.

    A path that the rules refuse will do where it is better than the one that the stream has.
    """
    there = world.fleet.node.get(node.name)
    if there is None or there.state is not State.READY:
        raise CannotPlan(Cause.NODE_CORDONED, f"{node.name} takes nothing new: it is {node.state}.")
    if shard.node_id == node.pk:
        raise CannotPlan(Cause.MISCONFIGURED, f"{shard.name} is on {node.name} already.")
    here = [stream for stream, at in world.running.items() if at == node.name]
    free = there.memory_bytes - sum(stream.memory_bytes for stream in here)
    if free < shard.memory_bytes or len(here) >= there.shards_max:
        raise CannotPlan(
            Cause.WAITING_FOR_CAPACITY,
            f"{node.name} has {size(free)} free for {size(shard.memory_bytes)}, and {len(here)} of "
            f"{there.shards_max} shards.",
        )
    path = route(world.fleet, shard.box.name, shard.domain, there)
    limit = ruling.in_force(session.org, session.path).limit(float("inf"))
    if limit.worst < path.tier >= shard.tier and limit.because is not None:
        raise CannotPlan(
            limit.because,
            f"The path to {node.name} would be {path.tier.name.lower()}: the rules refuse it.",
        )
    return Place(node, shard.slots, int(path.tier), path.port_leaf, path.nic_leaf)
