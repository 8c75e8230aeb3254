"""What all changes of sessions have in common: a plan now or later, an operation, one row of audit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit import services as audit
from console.operations import services as operations
from console.operations.models import PART, Operation
from console.operations.services import StalePlan
from console.placement.rules import Cause
from console.sessions.models import Session
from console.sessions.plans.proposals import CannotPlan, Proposal
from console.sessions.steps import waiting
from telemetry.topics import of_session


def of_job(session: str, job: str) -> str:
    """The target of operations on a job, which go on beside those on other parts of its session. No node
    is called so."""
    return f"{of_session(session)}{PART}job/{job}"


def check_may_go_beside(session: Session, kinds: Collection[str]) -> None:
    """Raises Busy while an operation of one of these kinds works on the session or a part of it."""
    running = operations.running_within(of_session(session.name)).filter(kind__in=kinds).first()
    if running is not None:
        raise operations.Busy(running)


def check_idle(session: Session, job: str = "") -> None:
    """Raises Busy where `start` would, for the session or a job of it."""
    target = of_job(session.name, job) if job else of_session(session.name)
    if running := operations.running_on(target):
        raise operations.Busy(running)


def now_or_later(
    make: Callable[[], Proposal], *, wait_seconds: int, plan_token: str | None
) -> Proposal | None:
    """The plan; None where it has to be waited for, and may be. Raises CannotPlan, StalePlan."""
    try:
        proposal = make()
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


def wait_or_not(session: Session, proposal: Proposal | None) -> None:
    """Until the operation has looked for a place, nobody knows what it waits for. The session may wait
    for another one's place already."""
    if proposal is None and not session.cause:
        waiting.begin(session, Cause.PENDING_EVALUATION, "Waiting for placement.")


def start(
    principal: Principal,
    kind: str,
    session: Session,
    sentence: str,
    *,
    plan: dict[str, Any],
    before: dict[str, Any] | None = None,
    role: Role = Role.ON_CALL,
    job: str = "",
) -> Operation:
    """An operation on a session; or on a job of it, beside others on other jobs. Raises Busy."""
    return operations.start(
        principal,
        kind,
        of_job(session.name, job) if job else of_session(session.name),
        sentence,
        plan={"session": session.name, **plan},
        before=before,
        org_id=session.org_id,
        role=role,
    )


def record(
    principal: Principal,
    operation: Operation,
    session: Session,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    reason: str,
) -> None:
    """That somebody has asked for an operation on a session: an entry, and an event in its words."""
    topic = of_session(session.name)
    audit.record(
        principal,
        operation.kind,
        audit.Subject.of("session", session.name, session.name, session.org, topic),
        before=before,
        after=after,
        reason=reason,
        sentence=f"{operation.sentence}.",
    )
