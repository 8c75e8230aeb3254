"""Create, resize and delete sessions."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from console.accounts.principal import SYSTEM, Principal
from console.accounts.roles import Role
from console.fleet.nodes import Impossible
from console.fleet.services import lock_fleet
from console.operations.models import Operation
from console.orgs.models import Org
from console.sessions import rules as session_rules
from console.sessions.changes.requests import (
    check_idle,
    check_may_go_beside,
    now_or_later,
    record,
    start,
    wait_or_not,
)
from console.sessions.models import Session
from console.sessions.plans import reservations
from console.sessions.plans.proposals import Proposal
from console.sessions.plans.snapshot import Snapshot
from console.sessions.services import check_may_create, workload_of
from console.sessions.steps import machines
from telemetry.store.former import free_topic
from telemetry.topics import of_session
from telemetry.units import counted


def new_session(
    name: str, org: Org | None, boxes: int, *, path: str = "", bytes_per_token: int | None = None
) -> Session:
    """One that is not saved. Raises ValidationError for what is malformed or taken."""
    session = Session(name=name, org=org, path=path, boxes_desired=boxes)
    if bytes_per_token is not None:
        session.bytes_per_token = bytes_per_token
    session_rules.limit_to(session, session_rules.effective_rules(org, path))
    session.full_clean(validate_unique=False, validate_constraints=False)
    _check_free(name)
    return session


def _check_free(name: str) -> None:
    if Session.objects.filter(name=name).exists():
        raise ValidationError({"name": f"There is a session {name} already."})


def plan_size(session: Session, boxes: int) -> Proposal:
    """What it would be with so many boxes. Raises CannotPlan, and Misconfigured."""
    return reservations.propose_size(Snapshot.now(), session, boxes, timezone.now())


def plan_resize(session: Session, boxes: int) -> Proposal:
    """As `plan_size`, for people. Raises operations' Busy as well, as `resize` does, and Impossible as
    `check_by_hand` does."""
    check_by_hand(session, boxes)
    check_idle(session)
    return plan_size(session, boxes)


def check_by_hand(session: Session, boxes: int) -> None:
    """Raises Impossible for another size of a workload's session: the orchestrator would undo it."""
    workload = workload_of(session)
    if workload and boxes != session.boxes_desired:
        raise Impossible(
            f"Session {session.name} belongs to workload {workload.name}, which sets its size. "
            "Scale the workload instead."
        )


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
    lock_fleet()
    proposal = now_or_later(
        lambda: plan_size(session, session.boxes_desired),
        wait_seconds=wait_seconds,
        plan_token=plan_token,
    )
    # Both again, since nobody else makes one or changes rules now.
    _check_free(session.name)
    session_rules.limit_to(session, session_rules.effective_rules(session.org, session.path))
    wait_or_not(session, proposal)
    free_topic(of_session(session.name))
    session.save()
    operation = start(
        principal,
        "session.create",
        session,
        f"Create session {session.name} with {counted(session.boxes_desired, 'box')}",
        plan={"boxes": session.boxes_desired, "wait_seconds": wait_seconds},
        before={"boxes": 0},
    )
    record(principal, operation, session, after=session.snapshot(), reason=reason)
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
    operation = start(
        principal,
        "session.resize",
        session,
        f"Resize session {session.name} from {session.boxes_desired} to {counted(boxes, 'box')}",
        plan={"boxes": boxes, "wait_seconds": wait_seconds},
        before={"boxes": session.boxes_desired},
    )
    proposal = now_or_later(
        lambda: plan_size(session, boxes), wait_seconds=wait_seconds, plan_token=plan_token
    )
    session.boxes_desired = boxes
    session_rules.limit_to(session, session_rules.effective_rules(session.org, session.path))
    wait_or_not(session, proposal)
    session.version += 1
    session.save()
    record(principal, operation, session, before=before, after=session.snapshot(), reason=reason)
    if proposal is not None:
        machines.take(operation, session, proposal)
    return operation


@transaction.atomic
def delete(
    principal: Principal, session: Session, *, end_jobs: bool = False, reason: str = ""
) -> Operation:
    """Delete a session that came from `for_change` and release its boxes. This can't be undone.

    Raises operations' Busy, and Impossible where it has jobs and they are not to be ended, and for
    people where it is a workload's, which would make it anew.
    """
    if principal is not SYSTEM and (workload := workload_of(session)):
        raise Impossible(
            f"Session {session.name} belongs to workload {workload.name}. Delete the workload instead."
        )
    jobs = list(session.jobs.values_list("name", flat=True))
    if jobs and not end_jobs:
        raise Impossible(
            f"{session.name} has jobs: {', '.join(jobs)}. End them first, or also end its jobs."
        )
    check_may_go_beside(session, ["session.start-job", "session.end-job"])
    operation = start(
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
    record(principal, operation, session, before=before, reason=reason)
    return operation
