"""Placing the streams of lost nodes on other nodes, once that is sure and the rules allow it.

`look` is called every two seconds. It asks agents and drivers before it takes any lock, lets
`plans.losses` decide, stores what was decided for pages and alerts, and starts one operation for each
session and node. A stream that its driver has back before it was told to go on is left where it is, with
its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import F, Q

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.fleet.membership.heartbeats import missed_seconds
from console.fleet.membership.liveness import WATCHED, has_listened
from console.fleet.models import Node
from console.fleet.services import lock_fleet
from console.operations import core
from console.operations import services as operations
from console.operations.core import Done, Outcome
from console.operations.machines import Machine, Step, machine
from console.operations.models import PART, Operation
from console.periodic import taking_turns
from console.placement import sentences
from console.placement.plan import Placed
from console.placement.topology import State, Tier
from console.sessions import endpoints
from console.sessions.models import Job, Loss, Phase, Session, Stream
from console.sessions.plans.losses import (
    Attempt,
    Case,
    Decision,
    Held,
    Limits,
    Standing,
    Surroundings,
    Verdict,
    blocked,
    decide,
)
from console.sessions.plans.proposals import away_from, fewer_slots
from console.sessions.plans.reservations import named_for
from console.sessions.plans.snapshot import Snapshot
from console.sessions.rules import effective_rules
from console.sessions.steps import relocation
from console.sessions.steps.observations import Observations
from console.sessions.steps.relocation import Place, send_to
from telemetry.events import note
from telemetry.topics import of_session, of_source
from telemetry.units import counted

log = logging.getLogger(__name__)

KIND: Final = "session.replace-lost"
LIMITS: Final = Limits()
PARTS: Final = (1.0, 0.75, 0.5, 0.25)  # of its slots that a stream gets, the first that fits
SENTENCE_MAX: Final = 500
PLAN_AGAIN_SECONDS: Final = 10.0  # where there was no place
LEAVING: Final = "leaving"  # the note of the streams that are to be on other nodes in the end
_RELATED: Final = ("job__session__org", "job__driver", "box", "node", "next_node", "operation")


class _NoPlace(Exception):
    """Nothing can be placed. The text says why."""


def look(now: datetime) -> int:
    """Look at nodes that are silent, and replace those that are lost. How many operations began."""
    heard = now - timedelta(seconds=missed_seconds())
    Loss.objects.filter(node__last_heartbeat_at__gte=heard).delete()
    if not has_listened(heard, now):
        return 0
    nodes = Node.objects.filter(
        state__in=[*WATCHED, State.LOST.value], joined_at__isnull=False, last_heartbeat_at__lt=heard
    )
    held = _streams(nodes) if nodes.exists() else []
    if not held:
        _settle_losses(now, nodes, [])
        return 0
    facts = Observations(
        {stream.node for stream in held},
        {stream.job.driver for stream in held if stream.job.driver.joined_at},
    )
    with transaction.atomic():
        with taking_turns():
            lock_fleet()
        return _act(now, nodes.all(), facts)


def _streams(nodes: Iterable[Node]) -> list[Stream]:
    """Those of jobs that run. Others belong to the operation that starts their job."""
    found = Stream.objects.filter(node__in=nodes, job__running=True, slots__gt=0)
    return list(found.select_related(*_RELATED).order_by("pk"))


def _act(now: datetime, nodes: Iterable[Node], facts: Observations) -> int:
    """While the fleet is held: decide, start what is decided, and store it."""
    nodes = list(nodes)
    held = _streams(nodes)
    decisions, begun = [], 0
    for decision in decide(_cases(now, held, facts), _surroundings(now), LIMITS):
        if decision.streams and (same := _still_blocked(now, decision)):
            decision = same
        elif decision.streams:
            unreachable = {node.name for node in nodes if not facts.node_answers(node.name)}
            decision, operation = _begin(decision, held, unreachable)
            begun += operation is not None
        decisions.append(decision)
    _settle_losses(now, nodes, decisions)
    return begun


def _cases(now: datetime, held: Iterable[Stream], facts: Observations) -> list[Case]:
    by_case: dict[tuple[Session, Node], list[Stream]] = {}
    for stream in held:
        by_case.setdefault((stream.job.session, stream.node), []).append(stream)
    since = {(loss.session_id, loss.node_id): loss.since for loss in Loss.objects.all()}
    return [
        Case(
            session=session.name,
            node=node.name,
            rules=effective_rules(session.org, session.path),
            silent_seconds=_seconds(node.last_heartbeat_at, now),
            lost_seconds=_seconds(since.get((session.pk, node.pk)), now),
            agent_answers=facts.node_answers(node.name),
            streams=tuple(_held(stream, facts, now) for stream in streams),
            attempt=_attempt(session, node, now),
        )
        for (session, node), streams in by_case.items()
    ]


def _seconds(since: datetime | None, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds()) if since else 0.0


def _held(stream: Stream, facts: Observations, now: datetime) -> Held:
    standing, by = _standing(stream, facts), stream.operation
    if by is None:
        return Held(stream.name, stream.job.driver.name, standing)
    return Held(
        stream.name,
        stream.job.driver.name,
        standing,
        operation=named_for(stream.job.session, by),
        leaves=stream.next_node_id != stream.node_id,
        seconds=_seconds(by.created_at, now),
        stuck=by.state == core.State.STUCK,
    )


def _standing(stream: Stream, facts: Observations) -> Standing:
    seen = facts.shard_of(stream.job.driver.name, stream.group, stream.index)
    if seen is None or seen.address != endpoints.address(stream.node, Tier(stream.tier)):
        return Standing.UNKNOWN
    return {"lost": Standing.LOST, "here": Standing.HERE}.get(seen.state, Standing.UNKNOWN)


def _target(session: str, node: str) -> str:
    return f"{of_session(session)}{PART}{node}"


def _attempt(session: Session, node: Node, now: datetime) -> Attempt | None:
    """The last one since the node was seen, unless it has succeeded."""
    found = Operation.objects.filter(
        kind=KIND, target=_target(session.name, node.name), created_at__gte=node.last_heartbeat_at
    )
    last = found.order_by("-created_at").first()
    if last is None or last.state == core.State.SUCCEEDED:
        return None
    return Attempt(
        last.sentence,
        running=not last.done,
        seconds=_seconds(last.created_at, now),
        stuck=last.state == core.State.STUCK,
        problem=last.error["detail"] if last.done and last.error else last.message,
    )


def _surroundings(now: datetime) -> Surroundings:
    window = now - timedelta(seconds=LIMITS.window_seconds)
    ours = Operation.objects.filter(kind=KIND)
    return Surroundings(
        nodes=Node.objects.filter(joined_at__isnull=False)
        .exclude(state=State.MAINTENANCE.value)
        .count(),
        replaced=frozenset(one.plan["node"] for one in ours.filter(created_at__gt=window)),
        replacing={one.plan["session"]: one.plan["node"] for one in ours.filter(done=False)},
    )


# Starting


def _begin(
    decision: Decision, held: Iterable[Stream], unreachable: Collection[str]
) -> tuple[Decision, Operation | None]:
    """Reserve places and start the operation. Where that is impossible, the decision says why."""
    streams = [stream for stream in held if stream.name in decision.streams]
    session, node = streams[0].job.session, streams[0].node
    try:
        with transaction.atomic():
            operation = _start(decision, session, node, streams, unreachable)
    except _NoPlace as error:
        found = blocked(session.name, node.name, str(error).rstrip("."))
        return replace(found, unplaced=True), None
    log.warning("%s: %s", operation.sentence, decision.sentence)
    return decision, operation


def _still_blocked(now: datetime, decision: Decision) -> Decision | None:
    """What was found out the last time, if that was just now: a plan takes a while."""
    found = Loss.objects.filter(session__name=decision.session, node__name=decision.node).first()
    if found is None or found.verdict != Verdict.BLOCKED or found.planned_at is None:
        return None
    if _seconds(found.planned_at, now) >= PLAN_AGAIN_SECONDS:
        return None
    return Decision(decision.session, decision.node, Verdict.BLOCKED, found.sentence)


def _start(
    decision: Decision,
    session: Session,
    node: Node,
    streams: Collection[Stream],
    unreachable: Collection[str],
) -> Operation:
    operation = operations.start(
        SYSTEM,
        KIND,
        _target(session.name, node.name),
        f"Replace {node.name} of {session.name}, which is lost",
        plan={"session": session.name, "node": node.name, "why": decision.sentence},
        org_id=session.org_id,
    )
    told = _place_all(operation, session, streams, dict.fromkeys(unreachable, State.LOST))
    operation.plan["streams"] = told
    operation.notes["total"] = len(told)
    operation.notes[LEAVING] = [stream.pk for stream in relocation.of_operation(operation)]
    operation.save(update_fields=["plan", "notes"])
    Session.objects.filter(pk=session.pk).update(version=F("version") + 1)
    topics = of_session(session.name), of_source("agent", node.name)
    record(
        SYSTEM,
        KIND,
        Subject.of("session", session.name, session.name, session.org, *topics),
        before={one["stream"]: node.name for one in told},
        after={one["stream"]: one["node"] for one in told},
        reason=decision.sentence,
        sentence=f"{operation.sentence}: {decision.sentence}",
    )
    return operation


def _place_all(
    operation: Operation, session: Session, streams: Iterable[Stream], closed: dict[str, State]
) -> list[dict[str, Any]]:
    """Job by job, since a driver has hits again once it has all of its streams. What was placed where,
    and why not on a better path. Raises _NoPlace."""
    limits = {session.name: effective_rules(session.org, session.path).limit(float("inf"))}
    by_job: dict[Job, list[Stream]] = {}
    for stream in streams:
        by_job.setdefault(stream.job, []).append(stream)
    told: list[dict[str, Any]] = []
    why_not = ""
    for own in by_job.values():
        snapshot = Snapshot.now()  # with those that have just got a place
        for part in PARTS:
            placed, unplaced = away_from(snapshot, closed, own, limits, part)
            if not unplaced:
                told += [_send(operation, stream, at, part) for stream, at in placed]
                break
            why_not = why_not or sentences.unplaced(unplaced[0])
    if not told:
        raise _NoPlace(why_not)
    return told


def _send(operation: Operation, stream: Stream, at: Placed, part: float) -> dict[str, Any]:
    node, slots = Node.objects.get(name=at.node), fewer_slots(stream.slots, part)
    place = Place.at(node, slots, at.route, sentences.why(at.refused, at))
    send_to(stream, place, operation)
    return {
        "stream": stream.name,
        "node": node.name,
        "path": at.route.tier.name.lower(),
        "slots": slots,
        "slots_before": stream.slots,
        "why": place.why,
    }


# What was decided, for pages and alerts


@transaction.atomic
def _settle_losses(now: datetime, nodes: Iterable[Node], decisions: Iterable[Decision]) -> None:
    """Store what was decided, and what became of losses about which nothing is to be decided."""
    known = {
        (loss.session.name, loss.node.name): loss
        for loss in Loss.objects.filter(node__in=nodes).select_related("session", "node", "operation")
    }
    for decision in decisions:
        loss = known.pop((decision.session, decision.node), None)
        _store(now, decision, loss)
    for loss in known.values():
        _end(loss)


def _store(now: datetime, decision: Decision, loss: Loss | None) -> None:
    if loss is None:
        loss = Loss(
            session=Session.objects.get(name=decision.session),
            node=Node.objects.get(name=decision.node),
            since=now,
        )
    before = _written(loss)
    if not decision.confirms:
        loss.since = now
    if decision.unplaced:
        loss.planned_at = now
    was, loss.verdict = loss.verdict, decision.verdict.value
    loss.sentence = decision.sentence[:SENTENCE_MAX]
    if decision.verdict is Verdict.REPLACING:
        running = operations.running_on(_target(decision.session, decision.node))
        loss.operation = running or loss.operation
    if _written(loss) != before:
        loss.save()
    if loss.verdict == Verdict.BLOCKED and was != Verdict.BLOCKED:
        _tell(loss, "session.lost-node")


def _written(loss: Loss) -> tuple[object, ...]:
    return loss.verdict, loss.sentence, loss.since, loss.planned_at, loss.operation_id


def _end(loss: Loss) -> None:
    """The node serves again, or has nothing of this session any more."""
    moved = (loss.operation.response or {}).get("moved", 0) if loss.operation else 0
    if not moved or Stream.objects.filter(node=loss.node, job__session=loss.session).exists():
        loss.delete()
    elif loss.verdict != Verdict.REPLACED:
        loss.verdict = Verdict.REPLACED.value
        loss.sentence = f"{loss.node.name} is lost. {_streams_are(moved)} on other nodes."
        loss.save()
        _tell(loss, "session.replaced-node")


def _tell(loss: Loss, kind: str) -> None:
    topics = [of_session(loss.session.name), of_source("agent", loss.node.name)]
    note(kind, topics, loss.sentence, {"session": loss.session.name, "node": loss.node.name})


# The operation


def _move(operation: Operation) -> Outcome:
    """Leave streams where they are that their drivers have back; bring the others to their new nodes.

    A stream whose new node is lost as well is let go: the next look plans it again.
    """
    streams = relocation.of_operation(operation)
    facts = Observations(set(), {stream.job.driver for stream in streams if stream.job.running})
    here = [one.pk for one in streams if _standing(one, facts) is Standing.HERE]
    # Locked, since they may have ended with their job while drivers were asked. The others are not, as
    # long as agents are asked.
    staying = list(
        streams.filter(Q(pk__in=here) | Q(next_node__state=State.LOST.value))
        .exclude(phase=Phase.MOVING)
        .select_for_update(of=("self",), no_key=True)
    )
    relocation.forget(staying, operation.sentence)
    notes = operation.notes
    returned = sum(stream.pk in here for stream in staying)
    notes["returned"] = notes.get("returned", 0) + returned
    notes["stranded"] = notes.get("stranded", 0) + len(staying) - returned
    stayed = {stream.pk for stream in staying}
    leaving = notes[LEAVING] = [pk for pk in notes.get(LEAVING, ()) if pk not in stayed]
    outcome = relocation.settle(operation)
    if not isinstance(outcome, Done):
        return outcome
    notes["ended"] = len(leaving) - Stream.objects.filter(pk__in=leaving).count()
    return Done(_said(operation))


def _said(operation: Operation) -> str:
    node, returned = operation.plan["node"], operation.notes["returned"]
    ended = operation.notes["ended"]
    moved = _moved(operation)
    parts = [f"{_streams_are(moved)} on other nodes."] if moved else []
    if returned:
        parts.append(f"{node} is back: {_streams_are(returned)} still there, with their memory.")
    if ended:
        parts.append(f"The job of {counted(ended, 'stream')} has ended.")
    return " ".join([*parts, operation.plan["why"]] if moved else parts)


def _streams_are(count: int) -> str:
    return counted(count, "stream is", "streams are")


def _moved(operation: Operation) -> int:
    notes = operation.notes
    not_moved = (notes.get(why, 0) for why in ("returned", "stranded", "ended"))
    return int(notes["total"] - sum(not_moved))


@machine(KIND)
class ReplaceLost(Machine):
    steps = (Step("move", "Place its streams on other nodes", _move, relocation.stay),)

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        plan = operation.plan
        return {
            "session": plan["session"],
            "node": plan["node"],
            "why": plan["why"],
            "moved": _moved(operation),
            "returned": operation.notes.get("returned", 0),
            # Everybody who sees the operation sees this.
            "streams": [{**one, "why": sentences.unnamed(one["why"])} for one in plan["streams"]],
        }
