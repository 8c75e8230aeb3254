"""Jobs of a session: registering one, which makes its streams and tells its driver, and ending it."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.fleet.models import Driver
from console.fleet.services import get
from console.operations.models import Operation
from console.sessions import driver_orgs
from console.sessions.changes.requests import (
    check_idle,
    check_may_go_beside,
    now_or_later,
    record,
    start,
    wait_or_not,
)
from console.sessions.driver_orgs import Orgs, Said
from console.sessions.models import Job, Session
from console.sessions.plans import reservations
from console.sessions.plans.proposals import Proposal
from console.sessions.plans.snapshot import Snapshot
from console.sessions.services import get_driver, get_job
from console.sessions.steps import machines


def plan_job(session: Session, name: str, driver: Driver, boxes: Sequence[str]) -> Proposal:
    """What it would be with this job. Raises CannotPlan, and Misconfigured."""
    return reservations.propose_job(Snapshot.now(), session, name, driver, boxes, timezone.now())


@transaction.atomic
def start_job(
    principal: Principal,
    session: Session,
    name: str,
    driver: Driver,
    boxes: Sequence[str] = (),
    *,
    orgs: Said | None = None,
    wait_seconds: int = 0,
    plan_token: str | None = None,
    reason: str = "",
) -> Operation:
    """Register a job on these boxes of a session that came from `for_change`, or on those that it needs.

    Its streams are made and its driver is told, beside whatever else is done with the session that does
    not change these boxes, or the streams of jobs on them. `orgs`: those that the driver may serve, by
    default the session's own. Raises CannotPlan, Misconfigured, StalePlan, ValidationError, Refused,
    operations' Busy, and Http404 where the driver is no more.
    """
    # Before the trail's lock, which a heartbeat that holds this row may wait for.
    driver = get(Driver.objects.select_for_update(no_key=True), driver.name)
    served = check_new_job(principal, session, name, driver, orgs)
    told = {
        "job": name,
        "driver": driver.name,
        "boxes": list(boxes),
        "orgs": driver_orgs.slugs(served),
    }
    check_may_start(session, name)
    operation = start(
        principal,
        "session.start-job",
        session,
        f"Start job {name} in session {session.name}",
        plan={
            **told,
            "wait_seconds": wait_seconds,
            "orgs_before": driver_orgs.slugs(driver_orgs.orgs_of(driver)),
        },
        job=name,
    )
    proposal = now_or_later(
        lambda: plan_job(session, name, driver, boxes),
        wait_seconds=wait_seconds,
        plan_token=plan_token,
    )
    wait_or_not(session, proposal)
    session.save()
    record(principal, operation, session, after=told, reason=reason)
    if proposal is not None:
        machines.take_job(operation, session, driver, proposal)
    return operation


def check_may_start(session: Session, name: str) -> None:
    """Raises operations' Busy while something is done that a new job of this name can't go beside."""
    check_may_go_beside(session, ["session.create", "session.delete"])
    check_idle(session, name)


@transaction.atomic
def end_job(principal: Principal, session: Session, name: str, *, reason: str = "") -> Operation:
    """Take the streams of a job off their nodes. Raises Http404, and operations' Busy."""
    job = get_job(session, name)
    check_may_go_beside(session, ["session.delete"])
    operation = start(
        principal,
        "session.end-job",
        session,
        f"End job {name} of session {session.name}",
        plan={"job": name},
        role=Role.ORG_ADMIN,
        job=name,
    )
    told = {"job": name, "driver": job.driver.name}
    record(principal, operation, session, before=told, reason=reason)
    return operation


def check_new_job(
    principal: Principal, session: Session, name: str, driver: Driver, orgs: Said | None
) -> Orgs:
    """The orgs that its driver is to serve. Raises ValidationError, Refused, and Http404 where they may
    not use the driver, or not any more."""
    get_driver(principal, driver.name)
    if session.jobs.filter(name=name).exists():
        raise ValidationError({"name": f"{session.name} has a job {name} already."})
    # Which job it is may be none of their business: who knows of it finds it on the driver's page.
    if Job.objects.filter(driver=driver).exists():
        raise ValidationError({"driver": f"Driver {driver.name} has a job already."})
    served = driver_orgs.resolve(principal, session, orgs)
    driver_orgs.plan_orgs(driver, served)
    return served
