"""The operations of sessions: each a few steps that change intent and wait until it has arrived."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.control import services as control
from console.fleet.models import Driver, Node
from console.fleet.services import lock_fleet
from console.operations.core import Done, Failed, Outcome, Waiting
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation
from console.placement.topology import Misconfigured, State
from console.sessions import driver_orgs, holders, siblings
from console.sessions.models import WAIT_SECONDS_MAX, Job, Session, Stream
from console.sessions.plans.proposals import CannotPlan, Proposal
from console.sessions.plans.reservations import (
    boxes_of,
    make_job,
    places_before,
    propose_job,
    propose_size,
    reserve,
    send_all,
)
from console.sessions.plans.snapshot import Snapshot
from console.sessions.services import orgs_said
from console.sessions.steps import relocation, waiting
from console.sessions.steps.observations import Observations
from telemetry.topics import of_session, of_source
from telemetry.units import counted

PLAN_AGAIN_SECONDS: Final = 5.0
AS_LONG_AS_ASKED: Final = timedelta(seconds=WAIT_SECONDS_MAX + 60)
COPYING: Final = timedelta(minutes=30)
TAKEN_BACK: Final = "taken back"  # the note of an operation that has nothing reserved any more
TOLD: Final = timedelta(minutes=5)
ORGS: Final = "orgs"  # the note of which orgs its driver served, and which it was given

log = logging.getLogger(__name__)


def _session(operation: Operation) -> Session:
    return Session.objects.select_for_update(no_key=True).get(name=operation.plan["session"])


def _cannot(operation: Operation, session: Session, error: CannotPlan) -> Outcome:
    """Wait for what may come, as long as it was asked for."""
    now = timezone.now()
    asked = float(operation.plan.get("wait_seconds", 0))
    if error.cause.is_never or (now - operation.created_at).total_seconds() >= asked:
        return Failed(error.cause.value, error.sentence)
    waiting.begin(session, error.cause, error.sentence)
    session.save(update_fields=waiting.FIELDS)
    return Waiting(
        error.sentence, seconds=PLAN_AGAIN_SECONDS, topics=frozenset({of_session(session.name)})
    )


def _take_back(operation: Operation) -> Outcome:
    """What it has reserved for streams of running jobs. Once: later, others may have moved them."""
    if operation.notes.get(TAKEN_BACK):
        return Done()
    outcome = relocation.roll_back(operation, partial(places_before, operation))
    operation.notes[TAKEN_BACK] = isinstance(outcome, Done)
    return outcome


# Making a session, and giving it another size


def _place(operation: Operation) -> Outcome:
    """Reserve what it needs, unless the request has done so already."""
    if operation.notes.get(waiting.PLACED):
        return Done()
    lock_fleet()
    session = _session(operation)
    try:
        proposal = propose_size(Snapshot.now(), session, operation.plan["boxes"], timezone.now())
        proposal.require_whole()
    except Misconfigured as error:
        return Failed("Misconfigured", str(error))
    except CannotPlan as error:
        return _cannot(operation, session, error)
    take(operation, session, proposal)
    return Done(proposal.summary)


def take(operation: Operation, session: Session, proposal: Proposal) -> None:
    """Reserve what the proposal says for this operation."""
    reserve(operation, session, proposal)
    waiting.end(session, operation)
    operation.notes[waiting.PLACED] = True
    operation.save(update_fields=["notes"])


def _give_back(operation: Operation) -> Outcome:
    """The size that it had, and the boxes. It may have reserved all with the request."""
    outcome = _take_back(operation)
    if not isinstance(outcome, Done):
        return outcome
    session = _session(operation)
    session.boxes.filter(box__name__in=operation.before.get("added", ()), ready=False).delete()
    session.boxes.update(leaving=False)
    session.boxes_desired = operation.before["boxes"]
    session.version += 1
    session.save(update_fields=["boxes_desired", "version"])
    waiting.end(session, operation)
    return Done()


def _unmake(operation: Operation) -> Outcome:
    _session(operation).delete()
    return Done()


def _finish_size(operation: Operation) -> Outcome:
    session = _session(operation)
    session.boxes.filter(leaving=True).delete()
    session.boxes.update(ready=True)
    return Done()


class _Sized(Machine):
    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        session = _session(operation)
        return {"session": session.name, "boxes": list(boxes_of(session))}


@machine("session.create")
class Create(_Sized):
    steps = (
        Step(
            "place", "Find boxes near nodes with free memory", _place, _unmake, patience=AS_LONG_AS_ASKED
        ),
        Step("finish", "Assign the boxes", _finish_size),
    )


@machine("session.resize")
class Resize(_Sized):
    steps = (
        Step("place", "Find boxes and memory", _place, _give_back, patience=AS_LONG_AS_ASKED),
        Step("settle", "Resize and move streams", relocation.settle, _take_back, patience=COPYING),
        Step("finish", "Assign the boxes", _finish_size),
    )


# Jobs


def _place_job(operation: Operation) -> Outcome:
    if operation.notes.get(waiting.PLACED):
        return Done()
    lock_fleet()
    session = _session(operation)
    driver = Driver.objects.filter(name=operation.plan["driver"]).first()
    if driver is None:
        return Failed("NoSuchDriver", f"Driver {operation.plan['driver']} was removed from the fleet.")
    if Job.objects.filter(driver=driver).exists():
        return Failed("Conflict", f"Driver {driver.name} has been given another job meanwhile.")
    if _has_other_orgs(operation, driver):
        return Failed("Conflict", f"Driver {driver.name} has been given other orgs meanwhile.")
    name, boxes = operation.plan["job"], operation.plan["boxes"]
    try:
        proposal = propose_job(Snapshot.now(), session, name, driver, boxes, timezone.now())
        proposal.require_whole()
    except Misconfigured as error:
        return Failed("Misconfigured", str(error))
    except CannotPlan as error:
        return _cannot(operation, session, error)
    take_job(operation, session, driver, proposal)
    return Done(proposal.summary)


def _has_other_orgs(operation: Operation, driver: Driver) -> bool:
    """Whether somebody has set the driver aside for an org since the job was asked for."""
    before, wanted = operation.plan.get("orgs_before"), operation.plan.get("orgs")
    now = driver_orgs.slugs(driver_orgs.orgs_of(driver))
    if before is None or driver_orgs.ALL in (now, wanted):
        return False
    known = {*wanted} if before == driver_orgs.ALL else {*wanted, *before}
    return not known.issuperset(now)


def take_job(operation: Operation, session: Session, driver: Driver, proposal: Proposal) -> None:
    keeps = bool(operation.plan["boxes"])
    make_job(session, operation.plan["job"], driver, proposal, keeps_to_boxes=keeps)
    said = operation.plan.get("orgs", driver_orgs.ALL)  # of an earlier version: all
    if operation.actor_id is None:  # nobody's but the workload's, which may be for others since it waits
        said = orgs_said(session) or said
    orgs = driver_orgs.from_slugs(said)
    before = driver_orgs.set_orgs(SYSTEM, driver, orgs, reason=f"{operation.sentence}.").plan.before
    operation.notes[ORGS] = {"before": driver_orgs.slugs(before), "given": driver_orgs.slugs(orgs)}
    waiting.end(session, operation)
    operation.notes[waiting.PLACED] = True
    send_all(operation, session, [one for one in proposal.streams if one.changes])


def _job(operation: Operation) -> Job | None:
    found = Job.objects.filter(session__name=operation.plan["session"], name=operation.plan["job"])
    return found.select_related("driver").first()


def _unmake_job(operation: Operation) -> Outcome:
    """First its streams go, so that those of other jobs that made room for them can have it back. They
    may have been reserved with the request, before any step."""
    if not operation.notes.get(waiting.PLACED):
        waiting.end(_session(operation), operation)
        return Done()
    if _job(operation) is None:
        return _take_back(operation)
    lock_fleet()  # before the session, as for all who plan
    _session(operation)
    if (job := _job(operation)) is not None:
        nodes, named = nodes_of([job]), documents_of(job.driver.name)
        job.delete()
        _return_orgs(operation, job.driver)
        tell(nodes, named | holders.reconcile(timezone.now()), operation.sentence)
    return Waiting("Its streams are removed.", seconds=0)


def _return_orgs(operation: Operation, driver: Driver) -> None:
    """Let it serve those that it served before its job, unless somebody has said otherwise since."""
    noted = operation.notes.get(ORGS)  # none where an earlier version began
    if noted is None or driver_orgs.slugs(driver_orgs.orgs_of(driver)) != noted["given"]:
        return
    orgs = driver_orgs.from_slugs(noted["before"])
    try:
        driver_orgs.set_orgs(SYSTEM, driver, orgs, reason=f"{operation.sentence}: undone.")
    except ValidationError as error:  # too many to take off at once: for a person, in steps
        log.warning("Driver %s keeps the orgs of a job that was undone: %s", driver.name, error)


def _tell_driver(operation: Operation) -> Outcome:
    """Its homes, once agents have made its streams; and wait until it has connected to all of them."""
    job = _job(operation)
    if job is None:
        return Failed("NoSuchJob", "The job no longer exists.")
    topics = frozenset({of_source("driver", job.driver.name)})
    if not job.running:
        lock_fleet()  # before the row of the job
        job.running = True
        job.save(update_fields=["running"])
        named = holders.reconcile(timezone.now()) | documents_of(job.driver.name)
        control.changed({("driver", job.driver.name), *named}, operation.sentence)
        return Waiting(f"Driver {job.driver.name} is being configured.", topics=topics)
    facts = Observations(set(), {job.driver})
    streams = list(job.streams.all())
    seen = [facts.shard_of(job.driver.name, stream.group, stream.index) for stream in streams]
    here = sum(one is not None and one.state == "here" for one in seen)
    if here == len(streams):
        streams_here = "its stream" if here == 1 else f"all {here} streams"
        return Done(f"Driver {job.driver.name} has {streams_here}.")
    return Waiting(
        f"Driver {job.driver.name} has {here} of {len(streams)} streams.",
        here / len(streams),
        topics=topics,
    )


def _stop_telling(operation: Operation) -> Outcome:
    job = _job(operation)
    if job is not None:
        lock_fleet()
        named = documents_of(job.driver.name)
        job.running = False
        job.save(update_fields=["running"])
        tell(set(), named | holders.reconcile(timezone.now()), operation.sentence)
    return Done()


@machine("session.start-job")
class StartJob(Machine):
    steps = (
        Step("place", "Place its streams", _place_job, _unmake_job, patience=AS_LONG_AS_ASKED),
        Step("make", "Create its shards on the nodes", relocation.settle, _unmake_job, patience=COPYING),
        Step("tell", "Configure its driver", _tell_driver, _stop_telling, patience=TOLD),
    )

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        return {"session": operation.plan["session"], "job": operation.plan["job"]}


def _end_jobs(operation: Operation) -> Outcome:
    """Those of the plan, or all. Their streams go, and with them what they kept in memory."""
    lock_fleet()
    session = _session(operation)
    jobs = session.jobs.select_related("driver")
    if "job" in operation.plan:
        jobs = jobs.filter(name=operation.plan["job"])
    streams = [stream.name for job in jobs for stream in job.streams.select_related("job__driver")]
    nodes, named = nodes_of(list(jobs)), documents_of(*(job.driver.name for job in jobs))
    operation.notes["streams"], operation.notes["nodes"] = streams, sorted(nodes)
    jobs.delete()
    tell(nodes, named | holders.reconcile(timezone.now()), operation.sentence)
    return Done()


def gone(operation: Operation) -> Outcome:
    """Wait until agents have given the memory back. Who is lost has none to give."""
    nodes = set(Node.objects.filter(name__in=operation.notes["nodes"]).exclude(state=State.LOST.value))
    facts = Observations(nodes, set())
    left = [
        name
        for name in operation.notes["streams"]
        if any(facts.shard_at(node.name, name) for node in nodes)
    ]
    silent = [node.name for node in nodes if not facts.node_answers(node.name)]
    if not left and not silent:
        return Done()
    total = max(1, len(operation.notes["streams"]))
    still = counted(len(left), "stream is", "streams are")
    waits = f"{silent[0]} does not answer." if silent else f"{still} still there."
    topics = frozenset(of_source("agent", name) for name in operation.notes["nodes"])
    return Waiting(waits, 1 - len(left) / total, topics=topics)


@machine("session.end-job")
class EndJob(Machine):
    steps = (
        Step("end", "Delete its streams", _end_jobs, final=True),
        Step("gone", "Wait until their memory is freed", gone, patience=TOLD, final=True),
    )


def _delete(operation: Operation) -> Outcome:
    _session(operation).delete()
    return Done()


@machine("session.delete")
class Delete(Machine):
    steps = (
        *EndJob.steps,
        Step("delete", "Release its boxes", _delete, final=True),
    )


# Moving


def _move(operation: Operation) -> Outcome:
    outcome = relocation.settle(operation)
    streams = Stream.objects.filter(pk__in=map(int, operation.before["streams"]))
    if isinstance(outcome, Done) and not streams.exists():
        return Failed("NoSuchJob", "Their job has ended: nothing is left to move.")
    return outcome


@machine("session.move")
class Move(Machine):
    steps = (Step("move", "Move the streams", _move, _take_back, patience=COPYING),)

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        return {"session": operation.plan["session"], "moves": len(operation.plan["moves"])}


@machine("session.restore-rails")
class RestoreRails(Move):
    """Moves that take streams off the spine."""


def nodes_of(jobs: list[Job]) -> set[str]:
    """The nodes on which these jobs have streams, or are about to."""
    streams = Stream.objects.filter(job__in=jobs).select_related("node", "next_node")
    return {
        node.name for stream in streams for node in (stream.node, stream.next_node) if node is not None
    }


def documents_of(*drivers: str) -> set[control.Address]:
    """Those of others that say something of these drivers: of their siblings, and of the nodes that
    store their fragments."""
    return siblings.documents_of(*drivers) | holders.documents_of(*drivers)


def tell(nodes: set[str], more: set[control.Address], why: str) -> None:
    if told := more.union(("node", name) for name in nodes):
        control.changed(told, why)
