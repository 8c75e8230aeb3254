"""Sessions: who may see them, and every way to change them. What takes long is begun here as an operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Count, Prefetch, QuerySet
from django.http import Http404
from django.utils import timezone

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.services import record
from console.fleet.models import Driver, Node
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs.models import Org
from console.orgs.services import get_org
from console.placement.plan import BringBack
from console.placement.reasons import route
from console.placement.rules import Cause
from console.placement.topology import State
from console.sessions import machines, planning, reserving
from console.sessions import rules as ruling
from console.sessions.models import Job, Session, SessionBox, Shard
from console.sessions.moving import Place, place_of, send_to
from console.sessions.planning import CannotPlan, Proposal
from console.sessions.world import World, hold
from telemetry.topics import of_org, of_session


class StalePlan(Exception):
    """The world is not what it was when the plan was made."""

    def __init__(self) -> None:
        super().__init__("What this plan was made of has changed since. Make a new one, then decide.")


class JobsRun(Exception):
    """The session has jobs, which somebody has to end first."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """In boxes. `held` is what quotas and shares go by."""

    desired: int
    granted: int
    actual: int

    @property
    def held(self) -> int:
        return max(self.desired, self.granted, self.actual)


def sizes(session: Session) -> Sizes:
    """From boxes that were fetched with it, where they were."""
    boxes = session.boxes.all()
    return Sizes(session.boxes_desired, len(boxes), sum(box.ready for box in boxes))


# Who may


def visible_sessions(principal: Principal) -> QuerySet[Session]:
    """Those of the orgs that they may see, for people of the platform all; with org and boxes."""
    boxes = Prefetch("boxes", SessionBox.objects.select_related("box"))
    found = Session.objects.select_related("org").prefetch_related(boxes)
    found = found.annotate(job_count=Count("jobs"))
    if principal.on_platform(Role.VIEWER):
        return found
    confined = principal.token.org_id if principal.token else None
    if confined is not None:
        return found.filter(org=confined) if principal.role_in(confined) else found.none()
    return found.filter(org__in=principal.orgs_where(Role.VIEWER))


def role_on(principal: Principal, session: Session) -> Role | None:
    return principal.platform_role if session.org_id is None else principal.role_in(session.org_id)


def get_session(principal: Principal, name: str, at_least: Role = Role.VIEWER) -> Session:
    """The one access function: a stranger gets Http404, who may not do it gets Refused."""
    session = visible_sessions(principal).filter(name=name).first()
    role = role_on(principal, session) if session else None
    if session is None or role is None:
        raise Http404("There is no such session, or it is not yours to see.")
    if role < at_least:
        raise Refused(f"This needs the role {at_least.label} on {session.name}; yours is {role.label}.")
    return session


def for_change(principal: Principal, name: str, at_least: Role = Role.ORG_ADMIN) -> Session:
    """The session, locked, while nobody else plans or reserves, for somebody who may change it."""
    principal.check_may_change()
    session = get_session(principal, name, at_least)
    hold()
    locked = Session.objects.select_for_update(of=("self",)).select_related("org")
    found = locked.filter(pk=session.pk).first()
    if found is None:
        raise Http404("There is no such session any more.")
    return found


def check_may_create(principal: Principal, org: Org | None) -> None:
    principal.check_may_change()
    if org is None:
        principal.check_platform(Role.PLATFORM_ADMIN)
    else:
        get_org(principal, org.slug, Role.ORG_ADMIN)


# Plans


def new_session(
    name: str, org: Org | None, boxes: int, *, path: str = "", bytes_per_token: int | None = None
) -> Session:
    """One that is not saved. Raises ValidationError for what is malformed or taken."""
    session = Session(name=name, org=org, path=path, boxes_desired=boxes)
    if bytes_per_token is not None:
        session.bytes_per_token = bytes_per_token
    ruling.limit_to(session, ruling.in_force(org, path))
    session.full_clean(validate_constraints=False)
    return session


def plan_size(session: Session, boxes: int) -> Proposal:
    """What it would be with so many boxes. Raises CannotPlan, and Misconfigured."""
    return reserving.propose_size(World.now(), session, boxes, timezone.now())


def plan_job(session: Session, name: str, driver: Driver, boxes: Sequence[str]) -> Proposal:
    """What it would be with this job. Raises CannotPlan, and Misconfigured."""
    return reserving.propose_job(World.now(), session, name, driver, boxes, timezone.now())


def plan_back_on_rails(session: Session, moves_max: int | None = None) -> BringBack:
    """Which moves would take its streams off the spine, and what they gain."""
    return planning.back_on_rails(World.now(), session.name, moves_max)


def _now_or_later(
    make: Any, *, wait_seconds: int, plan_token: str | None
) -> Proposal | None:
    """The plan; None where it has to be waited for, and may be. Raises CannotPlan, StalePlan."""
    try:
        proposal: Proposal = make()
        proposal.require_whole()
    except CannotPlan as error:
        if plan_token is not None:
            raise StalePlan from None
        if error.cause.is_never or not wait_seconds:
            raise
        return None
    if plan_token is not None and proposal.token != plan_token:
        raise StalePlan
    return proposal


# Changes


@transaction.atomic
def create(
    principal: Principal,
    session: Session,
    *,
    wait_seconds: int = 0,
    plan_token: str | None = None,
    reason: str = "",
) -> Operation:
    """Make a session that came from `new_session`. Raises CannotPlan, Misconfigured, StalePlan.

    Where there is no place for it now and `wait_seconds` is given, it waits so long for one.
    """
    check_may_create(principal, session.org)
    hold()
    proposal = _now_or_later(
        lambda: plan_size(session, session.boxes_desired),
        wait_seconds=wait_seconds,
        plan_token=plan_token,
    )
    if Session.objects.filter(name=session.name).exists():
        raise ValidationError({"name": f"There is a session {session.name} already."})
    _wait_or_not(session, proposal)
    session.save()
    _record(principal, "session.create", session, after=session.snapshot(), reason=reason)
    operation = _start(
        principal,
        "session.create",
        session,
        f"Make session {session.name} of {_boxes(session.boxes_desired)}",
        plan={"boxes": session.boxes_desired, "wait_seconds": wait_seconds},
        before={"boxes": 0},
    )
    if proposal is not None:
        machines.take(operation, session, proposal)
    return operation


@transaction.atomic
def resize(
    principal: Principal,
    session: Session,
    boxes: int,
    *,
    wait_seconds: int = 0,
    plan_token: str | None = None,
    reason: str = "",
) -> Operation:
    """Give a session that came from `for_change` another size. Its jobs go on.

    The same size again deals out anew what there is by now: memory of nodes that came, or of jobs that
    ended. Raises CannotPlan, Misconfigured, StalePlan, and operations' Busy.
    """
    before = session.snapshot()
    operation = _start(
        principal,
        "session.resize",
        session,
        f"Resize session {session.name} from {session.boxes_desired} to {_boxes(boxes)}",
        plan={"boxes": boxes, "wait_seconds": wait_seconds},
        before={"boxes": session.boxes_desired},
    )
    proposal = _now_or_later(
        lambda: plan_size(session, boxes), wait_seconds=wait_seconds, plan_token=plan_token
    )
    reserving.check_size(World.now(), session, boxes)
    session.boxes_desired = boxes
    ruling.limit_to(session, ruling.in_force(session.org, session.path))
    _wait_or_not(session, proposal)
    _changed(principal, "session.resize", session, before, reason)
    if proposal is not None:
        machines.take(operation, session, proposal)
    return operation


@transaction.atomic
def delete(
    principal: Principal, session: Session, *, end_jobs: bool = False, reason: str = ""
) -> Operation:
    """Give everything of a session that came from `for_change` back. There is no way back from it.

    Raises JobsRun where it has jobs and they are not to be ended, and operations' Busy.
    """
    jobs = list(session.jobs.values_list("name", flat=True))
    if jobs and not end_jobs:
        raise JobsRun(
            f"{session.name} has jobs: {', '.join(jobs)}. End them first, or say that they are to end."
        )
    operation = _start(
        principal,
        "session.delete",
        session,
        f"Delete session {session.name}",
        plan={},
        role=Role.ORG_ADMIN,
    )
    before = session.snapshot()
    session.deleting = True
    session.version += 1
    session.save()
    _record(principal, "session.delete", session, before=before, reason=reason)
    return operation


@transaction.atomic
def start_job(
    principal: Principal,
    session: Session,
    name: str,
    driver: Driver,
    boxes: Sequence[str] = (),
    *,
    wait_seconds: int = 0,
    plan_token: str | None = None,
    reason: str = "",
) -> Operation:
    """Register a job on boxes of a session that came from `for_change`, or on as many as its model needs.

    Its shards are made and its driver is told. Raises CannotPlan, Misconfigured, StalePlan,
    ValidationError, and operations' Busy.
    """
    _check_new_job(session, name, driver)
    operation = _start(
        principal,
        "session.start-job",
        session,
        f"Start job {name} in session {session.name}",
        plan={
            "job": name,
            "driver": driver.name,
            "boxes": list(boxes),
            "wait_seconds": wait_seconds,
        },
    )
    proposal = _now_or_later(
        lambda: plan_job(session, name, driver, boxes),
        wait_seconds=wait_seconds,
        plan_token=plan_token,
    )
    _wait_or_not(session, proposal)
    session.version += 1
    session.save()
    told = {"job": name, "driver": driver.name, "boxes": list(boxes)}
    _record(principal, "session.start-job", session, after=told, reason=reason)
    if proposal is not None:
        machines.take_job(operation, session, driver, proposal)
    return operation


@transaction.atomic
def end_job(principal: Principal, session: Session, name: str, *, reason: str = "") -> Operation:
    """Take the shards of a job off their nodes. Raises Http404, and operations' Busy."""
    job = get_job(session, name)
    operation = _start(
        principal,
        "session.end-job",
        session,
        f"End job {name} of session {session.name}",
        plan={"job": name},
        role=Role.ORG_ADMIN,
    )
    session.version += 1
    session.save()
    told = {"job": name, "driver": job.driver.name}
    _record(principal, "session.end-job", session, before=told, reason=reason)
    return operation


@transaction.atomic
def move(
    principal: Principal, session: Session, shard: Shard, node: Node, *, reason: str = ""
) -> Operation:
    """Move a shard of a session that came from `for_change` to a node. Its job goes on.

    Raises CannotPlan where the node has no room or the path is not allowed, and operations' Busy.
    """
    world = World.now()
    to = _place_at(world, session, shard, node)
    operation = _begin_moves(
        principal,
        "session.move",
        session,
        f"Move {shard.name} of {session.name} to {node.name}",
        [(shard, to)],
        reason,
    )
    return operation


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
        raise CannotPlan(Cause.WAITING_FOR_RAIL, "No move helps: nodes on the rails are full.")
    shards = {planning.key_of(shard): shard for shard in world.shards_of(session)}
    nodes = {node.name: node for node in Node.objects.all()}
    moves = []
    for one in found.moves:
        shard = shards[one.stream.key]
        path = route(world.fleet, shard.box.name, shard.domain, world.fleet.node[one.target])
        moves.append(
            (
                shard,
                Place(
                    nodes[one.target], shard.slots, int(path.tier), path.port_leaf, path.nic_leaf
                ),
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
    operation = _start(
        principal, kind, session, sentence, plan={"moves": told}, before={"shards": before}
    )
    operation.notes["total"] = len(moves)
    operation.save(update_fields=["notes"])
    for shard, place in moves:
        send_to(shard, place, operation)
    was = {shard.name: shard.node.name for shard, _ in moves}
    session.version += 1
    session.save()
    _record(principal, kind, session, before=was, after=told, reason=reason)
    return operation


def _place_at(world: World, session: Session, shard: Shard, node: Node) -> Place:
    """There, with the size that it has. Raises CannotPlan."""
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
            f"{node.name} has {free:,} bytes free for {shard.memory_bytes:,}, and {len(here)} of "
            f"{there.shards_max} shards.",
        )
    path = route(world.fleet, shard.box.name, shard.domain, there)
    limit = ruling.in_force(session.org, session.path).limit(float("inf"))
    if path.tier > limit.worst and limit.because is not None:
        raise CannotPlan(
            limit.because, f"The path to {node.name} would be {path.tier.name.lower()}: the rules refuse it."
        )
    return Place(node, shard.slots, int(path.tier), path.port_leaf, path.nic_leaf)


def get_job(session: Session, name: str) -> Job:
    job = session.jobs.select_related("driver").filter(name=name).first()
    if job is None:
        raise Http404(f"{session.name} has no job {name}.")
    return job


def shards_of(session: Session) -> QuerySet[Shard]:
    related = ("job__driver", "job__session", "box", "node", "next_node", "operation")
    found = Shard.objects.filter(job__session=session).select_related(*related)
    return found.order_by("job__name", "group", "index")


def _check_new_job(session: Session, name: str, driver: Driver) -> None:
    if session.jobs.filter(name=name).exists():
        raise ValidationError({"name": f"{session.name} has a job {name} already."})
    other = Job.objects.filter(driver=driver).select_related("session").first()
    if other is not None:
        raise ValidationError({"driver": f"Driver {driver.name} has a job already: {other}."})


def _wait_or_not(session: Session, proposal: Proposal | None) -> None:
    """Until the operation has looked for a place, nobody knows what it waits for."""
    session.cause = "" if proposal else Cause.PENDING_EVALUATION.value
    session.cause_sentence = "" if proposal else "It waits for a place: one is looked for in a moment."
    session.waiting_since = None if proposal else timezone.now()


def _start(
    principal: Principal,
    kind: str,
    session: Session,
    sentence: str,
    *,
    plan: dict[str, Any],
    before: dict[str, Any] | None = None,
    role: Role = Role.ON_CALL,
) -> Operation:
    return operations.start(
        principal,
        kind,
        of_session(session.name),
        sentence,
        plan={"session": session.name, **plan},
        before=before,
        org_id=session.org_id,
        role=role,
    )


def _changed(
    principal: Principal, action: str, session: Session, before: dict[str, Any], reason: str
) -> None:
    session.version += 1
    session.save()
    _record(principal, action, session, before=before, after=session.snapshot(), reason=reason)


def _record(
    principal: Principal,
    action: str,
    session: Session,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str,
) -> None:
    org = session.org
    record(
        principal,
        action,
        object_type="session",
        object_id=session.name,
        object_name=session.name,
        org_id=session.org_id,
        before=before,
        after=after,
        reason=reason,
        topics=[of_session(session.name), *([of_org(org.slug)] if org else [])],
    )


def _boxes(count: int) -> str:
    return "1 box" if count == 1 else f"{count} boxes"
