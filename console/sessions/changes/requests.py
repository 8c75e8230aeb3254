"""What all changes of sessions have in common: a plan now or later, an operation, one row of audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit import services as audit
from console.operations import services as operations
from console.operations.models import Operation
from console.operations.services import StalePlan
from console.placement.rules import Cause
from console.sessions.models import Session
from console.sessions.plans.proposals import CannotPlan, Proposal
from telemetry.topics import of_session


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
    """Until the operation has looked for a place, nobody knows what it waits for."""
    session.cause = "" if proposal else Cause.PENDING_EVALUATION.value
    session.cause_sentence = "" if proposal else "Waiting for placement."
    session.waiting_since = None if proposal else timezone.now()


def start(
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
