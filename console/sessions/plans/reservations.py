"""From a session to a proposal, and from a proposal to rows. The caller has locked the fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from django.db.models import Count

from console.fleet.models import Box, Driver, Node
from console.operations.models import Operation
from console.placement import grants
from console.placement.rules import Cause
from console.sessions import rules as session_rules
from console.sessions.models import Job, JobBox, Session, SessionBox, Stream
from console.sessions.plans.model import model_of
from console.sessions.plans.proposals import (
    BeingChanged,
    CannotPlan,
    Planned,
    Proposal,
    SessionSpec,
    fewer_boxes,
    more_boxes,
    propose,
    refusals,
)
from console.sessions.plans.snapshot import Snapshot, boxes_for, job_of
from console.sessions.services import workload_of
from console.sessions.steps.relocation import WHY_MAX, Place, place_of, send_to
from telemetry.topics import of_session
from telemetry.units import counted

PLACE_FIELDS: Final = ("slots", "tier", "port_leaf", "nic_leaf", "why")


def check_size(snapshot: Snapshot, session: Session, boxes: int) -> None:
    """Raises CannotPlan for a size that is never possible, by rule, by quota or by the fleet."""
    rules = session_rules.effective_rules(session.org, session.path)
    for refused in refusals(rules, boxes, snapshot.fleet):
        raise CannotPlan(refused.cause, refused.sentence)
    org = session.org
    quota = session_rules.of_an_org(org).boxes_quota if org is not None else None
    if org is None or quota is None:
        return
    own = max(session.boxes_desired, session.boxes.count()) if session.pk else 0
    others = session_rules.held_by(org) - own
    if others + boxes > quota:
        raise CannotPlan(
            Cause.EXCEEDS_ORG_QUOTA,
            f"The quota of {org.name} is {counted(quota, 'box')}, and its other sessions have {others}: "
            f"request at most {max(0, quota - others)}, or have a platform admin raise the quota.",
        )


def propose_size(snapshot: Snapshot, session: Session, boxes: int, now: datetime) -> Proposal:
    """What it would be with so many boxes. Raises CannotPlan, and Misconfigured."""
    check_size(snapshot, session, boxes)
    had = boxes_of(session)
    jobs = list(_jobs(session))
    if boxes >= len(had):
        wanted = more_boxes(snapshot, had, boxes)
    else:
        busy = {box for job in jobs for box in _boxes_of_job(job)} | _boxes_of_instances(session)
        wanted = fewer_boxes(snapshot, had, busy.intersection(had), boxes)
    placements = tuple(_placement_job(snapshot, job) for job in jobs)
    found = propose(snapshot, _spec(session, wanted, placements, now))
    # Who gives boxes back needs no place for what could run on the others.
    return found if found.added or not found.is_trial else replace(found, cause=None, sentence="")


def propose_job(
    snapshot: Snapshot, session: Session, name: str, driver: Driver, boxes: Sequence[str], now: datetime
) -> Proposal:
    """What the session would be with this job as well: on these of its boxes, with their memory; or on
    as many as it needs, with a part of what no other job keeps.

    Raises CannotPlan, and Misconfigured.
    """
    had = boxes_of(session)
    usable = [box for box in _boxes_for_jobs(session) if box not in snapshot.closed]
    if missing := sorted(set(boxes) - set(had)):
        raise CannotPlan(
            Cause.MISCONFIGURED, f"{session.name} does not have these boxes: {', '.join(missing)}."
        )
    if (closed := sorted(snapshot.closed & set(boxes or had))) and (boxes or not usable):
        raise CannotPlan(Cause.BOX_CORDONED, f"These boxes take no new jobs: {', '.join(closed)}.")
    if missing := sorted(set(boxes) - set(usable)):
        raise BeingChanged(f"An operation adds or removes these boxes: {', '.join(missing)}.")
    if not usable:
        raise CannotPlan(Cause.WAITING_FOR_CAPACITY, f"{session.name} has no boxes yet.")
    model = model_of(driver)
    on = boxes or boxes_for(model, snapshot.fleet, usable)
    placements = [_placement_job(snapshot, job) for job in _jobs(session)]
    placements.append(job_of(snapshot.fleet, name, model, on, keeps_to_boxes=bool(boxes)))
    return propose(snapshot, _spec(session, had, tuple(placements), now))


def boxes_of(session: Session) -> tuple[str, ...]:
    if not session.pk:
        return ()
    return tuple(session.boxes.values_list("box__name", flat=True).order_by("box__name"))


def _boxes_of_instances(session: Session) -> set[str]:
    """Of its workload: those without a cache have no job."""
    workload = workload_of(session)
    if workload is None:
        return set()
    live = workload.instances.filter(ended_at=None).values_list("boxes", flat=True)
    return {box for boxes in live for box in boxes}


def _boxes_for_jobs(session: Session) -> list[str]:
    """Those that no operation takes away, or may not get after all; with the fewest jobs first."""
    found = session.boxes.filter(ready=True, leaving=False).annotate(count=Count("jobs"))
    return list(found.order_by("count", "box__name").values_list("box__name", flat=True))


def waited_seconds(session: Session, now: datetime) -> float:
    return (now - session.waiting_since).total_seconds() if session.waiting_since else 0.0


def _spec(
    session: Session, boxes: tuple[str, ...], jobs: tuple[grants.Job, ...], now: datetime
) -> SessionSpec:
    return SessionSpec(
        session.name,
        session_rules.effective_rules(session.org, session.path),
        tuple(sorted(boxes)),
        jobs,
        session.bytes_per_token,
        waited_seconds(session, now),
        boxes_of(session),
        _moved_by(session) if session.pk else {},
    )


def _jobs(session: Session) -> Iterator[Job]:
    if session.pk:
        yield from session.jobs.select_related("driver").order_by("name")


def _boxes_of_job(job: Job) -> list[str]:
    return list(job.boxes.values_list("session_box__box__name", flat=True))


def _placement_job(snapshot: Snapshot, job: Job) -> grants.Job:
    boxes, keeps = _boxes_of_job(job), job.keeps_to_boxes
    return job_of(snapshot.fleet, job.name, model_of(job.driver), boxes, keeps_to_boxes=keeps)


def _moved_by(session: Session) -> dict[str, str]:
    """By job of this session, who moves or changes some of its streams."""
    claimed = Stream.objects.filter(job__session=session, operation__isnull=False).order_by("pk")
    return {
        stream.job.name: named_for(session, stream.operation)
        for stream in claimed.select_related("job", "operation")
        if stream.operation is not None
    }


def named_for(session: Session, operation: Operation) -> str:
    """A drain is the platform's: what it is called is not for the people of a session to know."""
    is_own = operation.topic == of_session(session.name)
    return f"“{operation.sentence}”" if is_own else "An operation on the fleet"


# Rows


def reserve(operation: Operation, session: Session, proposal: Proposal) -> None:
    """Take what it says: boxes, and the next places of streams. How to return goes into `before`."""
    for name in proposal.added:
        SessionBox.objects.create(session=session, box=Box.objects.get(name=name))
    session.boxes.filter(box__name__in=proposal.removed).update(leaving=True)
    changed = [] if proposal.is_trial else [one for one in proposal.streams if one.changes]
    operation.before["added"] = list(proposal.added)
    operation.before["removed"] = list(proposal.removed)
    send_all(operation, session, changed)


def send_all(operation: Operation, session: Session, changed: Sequence[Planned]) -> None:
    """Reserve the next place of each of these streams; those that are not there yet are made."""
    nodes = {node.name: node for node in Node.objects.filter(name__in={one.node for one in changed})}
    related = ("job", "node", "box")
    streams = {
        (stream.job.name, stream.group, stream.index): stream
        for stream in Stream.objects.filter(job__session=session).select_related(*related)
    }
    before = dict(operation.before.get("streams", {}))
    for one in changed:
        stream = streams.get((one.job, one.group, one.index))
        if stream is None:
            stream = _made(session, one, nodes[one.node])
        else:
            before[str(stream.pk)] = written(place_of(stream))
        place = Place(
            nodes[one.node], one.slots, one.tier, one.port_leaf, one.nic_leaf, one.why[:WHY_MAX]
        )
        send_to(stream, place, operation)
    operation.before["streams"] = before
    operation.notes["total"] = len(changed)
    operation.save(update_fields=["before", "notes"])


def _made(session: Session, one: Planned, node: Node) -> Stream:
    return Stream(
        job=session.jobs.get(name=one.job),
        group=one.group,
        index=one.index,
        box=Box.objects.get(name=one.box),
        domain=one.domain,
        wio=one.wio,
        slot_bytes=one.slot_bytes,
        node=node,
        slots=0,
        tier=one.tier,
        port_leaf=one.port_leaf,
        nic_leaf=one.nic_leaf,
    )


def make_job(
    session: Session, name: str, driver: Driver, proposal: Proposal, *, keeps_to_boxes: bool
) -> Job:
    """The job's row, and the boxes that it is on as the proposal says."""
    job = Job(session=session, name=name, driver=driver, keeps_to_boxes=keeps_to_boxes)
    job.full_clean()
    job.save()
    on = {one.box for one in proposal.streams if one.job == name}
    for session_box in session.boxes.filter(box__name__in=on):
        JobBox.objects.create(job=job, session_box=session_box)
    return job


def written(place: Place) -> dict[str, Any]:
    """As an operation keeps it."""
    return {"node": place.node.name} | {name: getattr(place, name) for name in PLACE_FIELDS}


def places_before(operation: Operation) -> dict[int, Place | None]:
    """Where the streams of an operation were; None for those whose node was removed since."""
    kept: dict[str, dict[str, Any]] = operation.before.get("streams", {})
    nodes = {
        node.name: node for node in Node.objects.filter(name__in={one["node"] for one in kept.values()})
    }
    return {
        int(number): Place(nodes[one["node"]], *(one[name] for name in PLACE_FIELDS))
        if one["node"] in nodes
        else None
        for number, one in kept.items()
    }
