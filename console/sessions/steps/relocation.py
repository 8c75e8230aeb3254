"""Move streams to other nodes and give them other sizes, while their jobs keep running.

A stream is resized in place, or moves to another node: the next node makes its shard, the driver
switches to it and copies the bytes, and the former node deletes its own. Each transition is a change of
intent in the database, which the control loop publishes to agents and drivers; the next one follows when
they have applied it. So each may be repeated, and an interrupted one is continued later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from django.db.models import Q, QuerySet

from console.control import observed
from console.control import services as control
from console.fleet.models import Driver, Node
from console.fleet.services import lock_fleet
from console.operations.core import Done, Outcome, Waiting
from console.operations.models import Operation
from console.placement import sentences
from console.placement.plan import Route
from console.placement.topology import State, Tier
from console.sessions import endpoints, siblings
from console.sessions.budgets import Budgets
from console.sessions.fragments import AllFragments
from console.sessions.models import Phase, Stream
from console.sessions.rules import effective_rules
from console.sessions.steps import former_homes
from console.sessions.steps.observations import Observations
from telemetry.decoder import excerpt
from telemetry.events import note
from telemetry.topics import of_session, of_source
from telemetry.units import counted, size

MOVES_AT_ONCE_MAX: Final = 8  # of one operation: bytes are copied beside what jobs do
WHY_MAX: Final = 500
ROUTE: Final = ("tier", "port_leaf", "nic_leaf", "why")
SILENT: Final = (State.LOST.value, State.MAINTENANCE.value)  # of nodes whose agents make no shards
CLOSED: Final = (*SILENT, State.DRAINING.value)  # of nodes that no stream goes to


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stream is to be, how large, and on which path."""

    node: Node
    slots: int
    tier: int
    port_leaf: str
    nic_leaf: str
    why: str = ""

    @classmethod
    def at(cls, node: Node, slots: int, route: Route, why: str = "") -> Place:
        return cls(node, slots, int(route.tier), route.port_leaf, route.nic_leaf, why[:WHY_MAX])


def place_of(stream: Stream) -> Place:
    return Place(stream.node, stream.slots, *(getattr(stream, name) for name in ROUTE))


def send_to(stream: Stream, place: Place, operation: Operation) -> None:
    """Reserve a stream's next place. Whoever calls holds the world."""
    stream.next_node, stream.next_slots = place.node, place.slots
    for name in ROUTE:
        setattr(stream, f"next_{name}", getattr(place, name))
    stream.phase, stream.operation = Phase.SETTLED, operation
    stream.save()


def of_operation(operation: Operation) -> QuerySet[Stream]:
    related = ("job__session__org", "job__driver", "box", "node", "next_node")
    return Stream.objects.filter(operation=operation).select_related(*related).order_by("pk")


@dataclass
class _Changes:
    """The nodes and drivers whose desired documents have changed, and documents that name one of these
    drivers as a sibling."""

    nodes: set[str] = field(default_factory=set)
    drivers: set[str] = field(default_factory=set)
    _moving: set[str] = field(default_factory=set)
    _named: set[control.Address] = field(default_factory=set)

    def moves(self, stream: Stream) -> None:
        """It begins to move, or arrives. Called before that is noted."""
        driver = stream.job.driver.name
        if stream.job.running and driver not in self._moving:
            self._moving.add(driver)
            self._named |= siblings.documents_of(driver)

    def goes_on(self, stream: Stream) -> None:
        """Its driver uses the other one of its nodes from now on."""
        self.drivers.add(stream.job.driver.name)
        if AllFragments().holders_of_stream(stream) and stream.next_node is not None:
            self.nodes.update((stream.node.name, stream.next_node.name))

    def publish(self, why: str) -> None:
        targets = {("node", name) for name in self.nodes} | {("driver", name) for name in self.drivers}
        if self._moving:
            targets |= self._named | siblings.documents_of(*self._moving)
        if targets:
            control.changed(targets, why)


def settle(operation: Operation) -> Outcome:
    """Bring the streams of an operation nearer to where they are to be; Done when all are there."""
    return _settle(operation, int(operation.notes.get("total", 0)))


def stay(operation: Operation) -> Outcome:
    """Moves that have not begun are forgotten; those that have are finished, which harms nobody."""
    forget_unbegun(operation)
    return settle(operation)


def _settle(operation: Operation, total: int) -> Outcome:
    streams = list(of_operation(operation))
    if not streams:
        return Done()
    facts = _facts(streams)
    # Again, since they may have ended with their job while agents were asked.
    streams = list(of_operation(operation).select_for_update(of=("self",), no_key=True))
    before = Budgets().nodes
    changes = _Changes()
    begun = [stream for stream in streams if stream.phase != Phase.SETTLED]
    waits = [reason for stream in begun if (reason := _advance(stream, facts, changes))]
    waits += _start(operation, facts, changes)
    if changes.nodes:  # a move has begun or ended, so others may be faster or slower than they were
        changes.nodes |= before | Budgets().nodes
    changes.publish(operation.sentence)
    left = of_operation(operation).count()
    if not left:
        return Done()
    done = max(0, total - left)
    said = f"{done} of {total} streams are in place."
    return Waiting(
        f"{said} {waits[0]}" if waits else said, done / total if total else 0.0, topics=_topics(streams)
    )


def _topics(streams: Iterable[Stream]) -> frozenset[str]:
    """Of who may have news of them."""
    nodes = {of_source("agent", one.next_node.name) for one in streams if one.next_node is not None}
    return frozenset(nodes.union(of_source("driver", one.job.driver.name) for one in streams))


def _facts(streams: Sequence[Stream]) -> Observations:
    nodes = {stream.next_node for stream in streams if stream.next_node is not None}
    drivers = {
        stream.job.driver
        for stream in streams
        if stream.job.running and stream.next_node_id != stream.node_id
    }
    return Observations(nodes, drivers)


def _start(operation: Operation, facts: Observations, changes: _Changes) -> list[str]:
    """Begin with those whose next place has room by now, as far as documents go. Why others wait."""
    streams = list(of_operation(operation))
    moving = sum(stream.phase in (Phase.MAKING, Phase.MOVING) for stream in streams)
    nodes = {stream.next_node for stream in streams if stream.next_node is not None}
    rooms = {node.pk: node.memory_bytes - published_bytes(node) for node in nodes}
    waits = []
    # Who gives room back comes first.
    for stream in sorted(streams, key=_more_bytes):
        node = stream.next_node
        if stream.phase != Phase.SETTLED or node is None:
            continue
        in_place = stream.next_node_id == stream.node_id
        more = _more_bytes(stream)
        if more > max(0, rooms[node.pk]):
            waits.append(f"{node.name} has no room for {stream.name} yet.")
            continue
        if not in_place and moving >= MOVES_AT_ONCE_MAX:
            continue
        if not in_place:
            count_from = _count_from(stream, facts)
            if count_from is None:
                waits.append(f"Driver {stream.job.driver.name} does not answer.")
                continue
            stream.next_count_from = count_from
            moving += 1
        stream.phase = Phase.SIZING if in_place else Phase.MAKING
        stream.save()
        rooms[node.pk] -= more
        changes.nodes.add(node.name)
    return waits


def _more_bytes(stream: Stream) -> int:
    """What its next place takes beyond what it has there."""
    coming = (stream.next_slots or 0) * stream.slot_bytes
    return coming - (stream.memory_bytes if stream.next_node_id == stream.node_id else 0)


def published_bytes(node: Node) -> int:
    """What its streams may have by now, as far as it was changes; and fragments of others."""
    found = Stream.objects.filter(Q(node=node) | Q(next_node=node))
    of_streams = sum(_slots_at(stream, node.pk) * stream.slot_bytes for stream in found)
    return of_streams + AllFragments().bytes_by_node[node.name]


def _slots_at(stream: Stream, node: int) -> int:
    if stream.phase == Phase.SIZING:
        return max(stream.slots, stream.next_slots or 0)
    if stream.node_id == node:
        return stream.slots
    return (stream.next_slots or 0) if stream.phase in (Phase.MAKING, Phase.MOVING) else 0


def _count_from(stream: Stream, facts: Observations) -> int | None:
    """Where the next place counts evicts from; None while that can't be known."""
    if not stream.job.running or _is_lost(stream.job.driver):
        return 0
    seen = facts.shard_of(stream.job.driver.name, stream.group, stream.index)
    return None if seen is None else seen.count_from


def _is_lost(driver: Driver) -> bool:
    """Whether not to wait for it: when it is back it is told where its streams are."""
    return driver.joined_at is None or driver.lost_at is not None


def _advance(stream: Stream, facts: Observations, changes: _Changes) -> str:
    """The next transition of a stream that is on its way, if it can be made. Else what it waits for."""
    node = stream.next_node
    if node is None:
        raise RuntimeError(f"{stream.name} has no next node")
    if stream.phase == Phase.MOVING:
        return _arrive(stream, node, facts, changes)
    seen = facts.shard_at(node.name, stream.name)
    is_there = seen is not None and seen.state == "ready" and seen.slots == stream.next_slots
    if not is_there:
        return _why_not(stream, node, seen)
    if stream.phase == Phase.MAKING and stream.job.running:
        changes.moves(stream)
        stream.phase = Phase.MOVING
        stream.save(update_fields=["phase"])
        changes.goes_on(stream)
        return ""
    _finish(stream, node, changes)
    return ""


def _why_not(stream: Stream, node: Node, seen: observed.Shard | None) -> str:
    if node.state == State.LOST.value:
        return f"{node.name} is lost: restart its agent, or cancel."
    if seen is None:
        return f"{node.name} has not reported {stream.name} yet."
    return f"{node.name}: {excerpt(seen.reason or seen.state)}."


def _arrive(stream: Stream, node: Node, facts: Observations, changes: _Changes) -> str:
    driver = stream.job.driver
    if not _is_lost(driver):
        seen = facts.shard_of(driver.name, stream.group, stream.index)
        if seen is None:
            return f"Driver {driver.name} does not answer."
        there = endpoints.address(node, Tier(stream.next_tier or 0))
        if seen.address != there and node.state == State.LOST.value:
            return _stay_for_now(stream, node, changes)
        if seen.address != there or seen.state == "moving":
            left = f", {counted(seen.left_to_move, 'column')} left" if seen.left_to_move else ""
            percent = effective_rules(stream.job.session.org).moves_percent
            budget = Budgets().of(stream, percent)
            most = f", at most {size(budget.bytes_per_second)}/s over {budget.link}" if budget else ""
            return f"{stream.name} is moving to {node.name}{left}{most}."
    _finish(stream, node, changes)
    return ""


def _stay_for_now(stream: Stream, node: Node, changes: _Changes) -> str:
    """Its driver was to go on at a node that was lost before it had: it is told to stay where it is.

    When the node is back it is told again; and who cancels need not wait for that.
    """
    changes.moves(stream)
    stream.phase = Phase.MAKING
    stream.save(update_fields=["phase"])
    changes.goes_on(stream)
    return _why_not(stream, node, None)


def _finish(stream: Stream, node: Node, changes: _Changes) -> None:
    """It is what it was to be. Who crosses the spine from here on is warned of, once."""
    moved, is_new = stream.node_id != node.pk, not stream.slots
    if moved:
        changes.moves(stream)
        former_homes.leave(stream)
        changes.nodes.update((stream.node.name, node.name))
        stream.count_from = stream.next_count_from
    stream.node, stream.slots = node, stream.next_slots or 0
    for name in ROUTE:
        setattr(stream, name, getattr(stream, f"next_{name}"))
    forget_next(stream)
    if (moved or is_new) and stream.tier == Tier.SPINE:
        warn_of_spine(stream)


def warn_of_spine(stream: Stream) -> None:
    name = stream.job.session.name
    because = sentences.unnamed(stream.why)
    note(
        "session.spine",
        [of_session(name), of_source("agent", stream.node.name)],
        f"{stream.name} of {name} crosses the spine, from {stream.port_leaf} to "
        f"{stream.nic_leaf}{f': {because}' if because else ''}",
        {"session": name, "stream": stream.name, "node": stream.node.name, "wio": stream.wio},
    )


def forget_next(stream: Stream) -> None:
    stream.next_node = stream.next_slots = stream.next_tier = stream.operation = None
    stream.next_port_leaf = stream.next_nic_leaf = stream.next_why = ""
    stream.next_count_from = 0
    stream.phase = Phase.SETTLED
    stream.save()


def roll_back(operation: Operation, before: Callable[[], Mapping[int, Place | None]]) -> Outcome:
    """Bring the streams of an operation back to these places; Done when they are there.

    What has not begun is forgotten. A stream whose driver has gone on at its next node arrives there
    first: its bytes are there by then. One that has left a node which is drained, lost or in maintenance
    gets its size where it is. A stream whose memory others have been promised since stays as it is, and
    so does one that has left a node which was removed (None).
    """
    stays = operation.notes.get("stays", ())
    places = _places(before(), stays)
    if _unbegun(operation) or any(stream.operation_id is None for stream in _elsewhere(places)):
        lock_fleet()
        known = before()  # again, since nodes may have been taken away meanwhile
        places, removed = _places(known, stays), [pk for pk, place in known.items() if place is None]
        forget_unbegun(operation)
        free = [stream for stream in _elsewhere(places) if stream.operation_id is None]
        without = [*Stream.objects.filter(pk__in=removed), *_without_place(operation, free, places)]
        # With all of their jobs: a job is as good as its smallest stream.
        jobs = {stream.job_id for stream in without}
        if left := {stream.pk for stream in free if stream.job_id in jobs}:
            operation.notes["stays"] = sorted(left.union(stays))
            stay = counted(len(left), "stream stays as it is", "streams stay as they are")
            return Waiting(f"{stay}.", seconds=0)
        for stream in free:
            send_to(stream, places[stream.pk], operation)
        _finish_unasked(free, operation)
        going_back = {*operation.notes.get("going back", ()), *(stream.pk for stream in free)}
        operation.notes["going back"] = sorted(going_back)
        moving = counted(len(free), "stream is", "streams are")
        return Waiting(f"{moving} moving back.", seconds=0)
    outcome = _settle(operation, len(places))
    if isinstance(outcome, Done) and _elsewhere(places):
        return Waiting("Streams that have just arrived are moving back.")
    return outcome


def _places(known: Mapping[int, Place | None], stays: Collection[int]) -> dict[int, Place]:
    """To which streams are to return. One that has left a node which takes none by now gets its size
    where it is: its job is as good as its smallest stream."""
    places = {pk: place for pk, place in known.items() if place is not None and pk not in stays}
    closed = [pk for pk, place in places.items() if place.node.state in CLOSED]
    for stream in Stream.objects.filter(pk__in=closed).select_related("node"):
        if stream.node_id != places[stream.pk].node.pk:
            places[stream.pk] = replace(place_of(stream), slots=places[stream.pk].slots)
    return places


def _finish_unasked(streams: Iterable[Stream], operation: Operation) -> None:
    """Have those on silent nodes be what they were: their agents hear of that when they are back."""
    changes = _Changes()
    for stream in streams:
        if stream.next_node is not None and stream.next_node.state in SILENT:
            changes.nodes.add(stream.next_node.name)
            _finish(stream, stream.next_node, changes)
    changes.publish(operation.sentence)


def _without_place(
    operation: Operation, free: Collection[Stream], places: Mapping[int, Place]
) -> list[Stream]:
    """Those of them that don't fit there, beside what has been promised to others since."""
    returning = {stream.pk for stream in free}
    fragments = AllFragments().bytes_by_node
    found = []
    for node in {places[pk].node for pk in returning}:
        here = [stream for stream in free if places[stream.pk].node == node]
        room = node.memory_bytes - fragments[node.name]
        for other in Stream.objects.filter(Q(node=node) | Q(next_node=node)).exclude(pk__in=returning):
            room -= _promised_slots_at(other, node.pk, operation) * other.slot_bytes
        for stream in sorted(here, key=lambda one: places[one.pk].slots * one.slot_bytes):
            taken = places[stream.pk].slots * stream.slot_bytes
            if taken > room:
                found.append(stream)
                taken = stream.memory_bytes if stream.node_id == node.pk else 0
            room -= taken
    return found


def _promised_slots_at(stream: Stream, node: int, operation: Operation) -> int:
    """What may be there, until whoever changes it is done; of what this operation changes, then."""
    coming = stream.next_slots or 0 if stream.next_node_id == node else 0
    if stream.operation_id == operation.pk:
        return coming
    return max(coming, stream.slots if stream.node_id == node else 0)


def _elsewhere(places: Mapping[int, Place]) -> list[Stream]:
    """Those that are not where they were, or not what they were."""
    found = Stream.objects.filter(pk__in=places).select_related("node", "job__driver").order_by("pk")
    return [
        stream
        for stream in found
        if (stream.node_id, stream.slots) != (places[stream.pk].node.pk, places[stream.pk].slots)
    ]


def forget_unbegun(operation: Operation) -> None:
    """Let go of next places to which no driver has gone on yet."""
    forget(_unbegun(operation), operation.sentence)


def forget(streams: Iterable[Stream], why: str) -> None:
    """Let go of the next places of streams whose driver has not gone on there yet."""
    changes = _Changes()
    for stream in streams:
        if stream.next_node is not None:
            changes.nodes.add(stream.next_node.name)
        forget_next(stream)
    changes.publish(why)


def _unbegun(operation: Operation) -> list[Stream]:
    """Also those that go back to a node that has been lost meanwhile."""
    going_back = operation.notes.get("going back", ())
    found = of_operation(operation).exclude(phase=Phase.MOVING)
    lost = Q(next_node__state=State.LOST.value)
    return list(found.filter(~Q(pk__in=going_back) | lost))
