"""Bringing shards from what they are to what they are to be, while their jobs go on.

A shard changes in place (another size), or goes to another node: its next node makes it, the driver goes
on there and takes the bytes along, the former node drops it. Each transition is a change of intent in
the database, which the control loop tells agents and drivers; the next one follows when they say that
they have it. So any of it may be repeated, or be left in the middle and gone on with later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from django.db.models import Q, QuerySet

from console.control import observed
from console.control import services as control
from console.fleet.models import Driver, Node
from console.fleet.services import hold
from console.operations.core import Done, Outcome, Waiting
from console.operations.models import Operation
from console.placement import explain
from console.placement.topology import State, Tier
from console.sessions import reaching
from console.sessions.asking import Facts
from console.sessions.models import Phase, Shard
from telemetry.decoder import excerpt
from telemetry.events import note
from telemetry.topics import of_session, of_source

MOVES_AT_ONCE_MAX: Final = 8  # of one operation: bytes are copied beside what jobs do
ROUTE: Final = ("tier", "port_leaf", "nic_leaf", "why")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard is to be, how large, and on which path."""

    node: Node
    slots: int
    tier: int
    port_leaf: str
    nic_leaf: str
    why: str = ""


def place_of(shard: Shard) -> Place:
    return Place(shard.node, shard.slots, *(getattr(shard, name) for name in ROUTE))


def send_to(shard: Shard, place: Place, operation: Operation) -> None:
    """Reserve a shard's next place. Whoever calls holds the world."""
    shard.next_node, shard.next_slots = place.node, place.slots
    for name in ROUTE:
        setattr(shard, f"next_{name}", getattr(place, name))
    shard.phase, shard.operation = Phase.SETTLED, operation
    shard.save()


def of_operation(operation: Operation) -> QuerySet[Shard]:
    related = ("job__session__org", "job__driver", "box", "node", "next_node")
    return Shard.objects.filter(operation=operation).select_related(*related).order_by("pk")


@dataclass
class _Told:
    """Who has to hear of what has changed."""

    nodes: set[str] = field(default_factory=set)
    drivers: set[str] = field(default_factory=set)

    def tell(self, why: str) -> None:
        targets = [("node", name) for name in self.nodes] + [("driver", name) for name in self.drivers]
        if targets:
            control.changed(sorted(targets), why)


def settle(operation: Operation, total: int) -> Outcome:
    """Bring the shards of an operation nearer to where they are to be; Done when all are there."""
    shards = list(of_operation(operation))
    if not shards:
        return Done()
    facts = _facts(shards)
    told = _Told()
    begun = [shard for shard in shards if shard.phase != Phase.SETTLED]
    waits = [reason for shard in begun if (reason := _go_on(shard, facts, told))]
    _start(operation, facts, told)
    told.tell(operation.sentence)
    left = of_operation(operation).count()
    if not left:
        return Done()
    done = max(0, total - left)
    said = f"{done} of {total} shards are where they should be."
    return Waiting(f"{said} {waits[0]}" if waits else said, done / total if total else 0.0)


def _facts(shards: Sequence[Shard]) -> Facts:
    nodes = {shard.next_node for shard in shards if shard.next_node is not None}
    drivers = {
        shard.job.driver for shard in shards if shard.job.running and shard.next_node_id != shard.node_id
    }
    return Facts(nodes, drivers)


def _start(operation: Operation, facts: Facts, told: _Told) -> None:
    """Begin with those whose next place has room by now, as far as documents go."""
    shards = list(of_operation(operation))
    moving = sum(shard.phase in (Phase.MAKING, Phase.MOVING) for shard in shards)
    nodes = {shard.next_node for shard in shards if shard.next_node is not None}
    rooms = {node.pk: node.memory_bytes - told_bytes(node) for node in nodes}
    # Who gives room back comes first.
    for shard in sorted(shards, key=_more_bytes):
        node = shard.next_node
        if shard.phase != Phase.SETTLED or node is None:
            continue
        in_place = shard.next_node_id == shard.node_id
        more = _more_bytes(shard)
        if more > max(0, rooms[node.pk]) or (not in_place and moving >= MOVES_AT_ONCE_MAX):
            continue
        if not in_place:
            count_from = _count_from(shard, facts)
            if count_from is None:
                continue  # its driver can't be asked just now
            shard.next_count_from = count_from
            moving += 1
        shard.phase = Phase.SIZING if in_place else Phase.MAKING
        shard.save()
        rooms[node.pk] -= more
        told.nodes.add(node.name)


def _more_bytes(shard: Shard) -> int:
    """What its next place takes beyond what it has there."""
    coming = (shard.next_slots or 0) * shard.slot_bytes
    return coming - (shard.memory_bytes if shard.next_node_id == shard.node_id else 0)


def told_bytes(node: Node) -> int:
    """What its shards may have by now, as far as it was told."""
    found = Shard.objects.filter(Q(node=node) | Q(next_node=node))
    return sum(_slots_at(shard, node.pk) * shard.slot_bytes for shard in found)


def _slots_at(shard: Shard, node: int) -> int:
    if shard.phase == Phase.SIZING:
        return max(shard.slots, shard.next_slots or 0)
    if shard.node_id == node:
        return shard.slots
    return (shard.next_slots or 0) if shard.phase in (Phase.MAKING, Phase.MOVING) else 0


def _count_from(shard: Shard, facts: Facts) -> int | None:
    """Where the next place counts evicts from; None while that can't be known."""
    if not shard.job.running or _is_lost(shard.job.driver):
        return 0
    seen = facts.shard_of(shard.job.driver.name, shard.group, shard.index)
    return None if seen is None else seen.count_from


def _is_lost(driver: Driver) -> bool:
    """Nobody hears of it, so nobody waits for it: when it comes back it is told where its shards are."""
    return driver.joined_at is None or driver.lost_at is not None


def _go_on(shard: Shard, facts: Facts, told: _Told) -> str:
    """The next transition of a shard that is on its way, if it can be made. Else what it waits for."""
    node = shard.next_node
    if node is None:
        raise RuntimeError(f"{shard.name} is on its way to nowhere")
    if shard.phase == Phase.MOVING:
        return _arrive(shard, node, facts, told)
    seen = facts.shard_at(node.name, shard.name)
    is_there = seen is not None and seen.state == "ready" and seen.slots == shard.next_slots
    if not is_there:
        return _why_not(shard, node, seen)
    if shard.phase == Phase.MAKING and shard.job.running:
        shard.phase = Phase.MOVING
        shard.save(update_fields=["phase"])
        told.drivers.add(shard.job.driver.name)
        return ""
    _finish(shard, node, told)
    return ""


def _why_not(shard: Shard, node: Node, seen: observed.Shard | None) -> str:
    if node.state == State.LOST.value:
        return f"{node.name} is lost: bring it back, or cancel."
    if seen is None:
        return f"{node.name} has not heard of {shard.name} yet."
    return f"{node.name}: {excerpt(seen.reason or seen.state)}."


def _arrive(shard: Shard, node: Node, facts: Facts, told: _Told) -> str:
    driver = shard.job.driver
    if not _is_lost(driver):
        seen = facts.shard_of(driver.name, shard.group, shard.index)
        if seen is None:
            return f"Driver {driver.name} does not answer."
        there = reaching.address(node, Tier(shard.next_tier or 0))
        if seen.address != there and node.state == State.LOST.value:
            return _stay_for_now(shard, node, told)
        if seen.address != there or seen.state == "moving":
            left = f", {seen.left_to_move} columns to go" if seen.left_to_move else ""
            return f"{shard.name} moves to {node.name}{left}."
    _finish(shard, node, told)
    return ""


def _stay_for_now(shard: Shard, node: Node, told: _Told) -> str:
    """Its driver was to go on at a node that was lost before it had: it is told to stay where it is.

    When the node is back it is told again; and who cancels need not wait for that.
    """
    shard.phase = Phase.MAKING
    shard.save(update_fields=["phase"])
    told.drivers.add(shard.job.driver.name)
    return _why_not(shard, node, None)


def _finish(shard: Shard, node: Node, told: _Told) -> None:
    """It is what it was to be. Who crosses the spine from here on is warned of, once."""
    moved, is_new = shard.node_id != node.pk, not shard.slots
    if moved:
        told.nodes.update((shard.node.name, node.name))
        shard.count_from = shard.next_count_from
    shard.node, shard.slots = node, shard.next_slots or 0
    for name in ROUTE:
        setattr(shard, name, getattr(shard, f"next_{name}"))
    forget_next(shard)
    if (moved or is_new) and shard.tier == Tier.SPINE:
        warn_of_spine(shard)


def warn_of_spine(shard: Shard) -> None:
    name = shard.job.session.name
    note(
        "session.spine",
        [of_session(name), of_source("agent", shard.node.name)],
        f"{shard.name} of {name} crosses the spine, from leaf {shard.port_leaf} to {shard.nic_leaf}: "
        f"{explain.unnamed(shard.why) or 'there is no better node'}",
        {"session": name, "shard": shard.name, "node": shard.node.name, "wio": shard.wio},
    )


def forget_next(shard: Shard) -> None:
    shard.next_node = shard.next_slots = shard.next_tier = shard.operation = None
    shard.next_port_leaf = shard.next_nic_leaf = shard.next_why = ""
    shard.next_count_from = 0
    shard.phase = Phase.SETTLED
    shard.save()


def take_back(operation: Operation, before: Iterable[tuple[int, Place]]) -> Outcome:
    """Bring the shards of an operation back to these places; Done when they are there.

    What has not begun is forgotten. A shard whose driver has gone on at its next node arrives there
    first: its bytes are there by then.
    """
    places = dict(before)
    if _unbegun(operation) or any(shard.operation_id is None for shard in _elsewhere(places)):
        hold()
        forget_unbegun(operation)
        free = [shard for shard in _elsewhere(places) if shard.operation_id is None]
        for shard in free:
            send_to(shard, places[shard.pk], operation)
        going_back = {*operation.notes.get("going back", ()), *(shard.pk for shard in free)}
        operation.notes["going back"] = sorted(going_back)
        return Waiting(f"{len(free)} shards go back to where they were.", seconds=0)
    outcome = settle(operation, len(places))
    if isinstance(outcome, Done) and _elsewhere(places):
        return Waiting("Shards that have just arrived go back to where they were.")
    return outcome


def _elsewhere(places: Mapping[int, Place]) -> list[Shard]:
    """Those that are not where they were, or not what they were."""
    found = Shard.objects.filter(pk__in=places).select_related("node", "job__driver").order_by("pk")
    return [
        shard
        for shard in found
        if (shard.node_id, shard.slots) != (places[shard.pk].node.pk, places[shard.pk].slots)
    ]


def forget_unbegun(operation: Operation) -> None:
    """Let go of next places to which no driver has gone on yet."""
    told = _Told()
    for shard in _unbegun(operation):
        if shard.next_node is not None:
            told.nodes.add(shard.next_node.name)
        forget_next(shard)
    told.tell(operation.sentence)


def _unbegun(operation: Operation) -> list[Shard]:
    going_back = operation.notes.get("going back", ())
    found = of_operation(operation).exclude(phase=Phase.MOVING)
    return [shard for shard in found if shard.pk not in going_back]
