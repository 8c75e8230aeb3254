"""Starting, seeing, cancelling and advancing operations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

from celery import current_app
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.http import Http404
from django.utils import timezone
from kombu.exceptions import OperationalError

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.operations import core
from console.operations.core import ENDED, MOVING, Failed, Outcome, Position, State, Waiting
from console.operations.machines import Doing, Machine, is_known, machine_of, names_places
from console.operations.models import PART, Operation
from console.periodic import is_locked, limit_lock_waits
from console.search.services import Found, finder
from console.shell import request_context
from telemetry.events import note
from telemetry.hints import hint
from telemetry.topics import OPERATIONS

log = logging.getLogger(__name__)

ADVANCE: Final = "console.operations.tasks.advance_operation"  # by its name, for it imports this module

TAKEN_FOR_LOST: Final = timedelta(seconds=15)  # an advance that began so long ago and said nothing
UNKNOWN_FOR: Final = timedelta(seconds=10)  # then a worker of another version may have it
# A step waits for the fleet in its queue, behind all who plan. After so long it gives its worker back:
# a console may have only two, and alerts are evaluated each ten seconds.
LOCKED_SECONDS_MAX: Final = 10
LOCKED_FOR: Final = timedelta(seconds=5)  # then it is tried again
IS_LOCKED: Final = "It waits for its turn: another change is under way, and takes long."
AHEAD: Final = timedelta(hours=1)  # nothing waits that long: a clock was ahead when this was written
SWEEP_MAX: Final = 200
KEPT: Final = timedelta(days=90)
TEXT_MAX: Final = 300


class Busy(Exception):
    """Another operation works on the same target; `operation` is that one."""

    def __init__(self, operation: Operation) -> None:
        how = "is not done yet. Wait for it, or cancel it."
        if operation.state == State.STUCK:
            how = "is stuck. See why, and retry it."
        super().__init__(f"“{operation.sentence}” {how}")
        self.operation = operation


class CannotCancel(Exception):
    """It is stuck: there is no way back that it could take by itself."""


class CannotRetry(Exception):
    """It goes on by itself, has ended, or is of a kind that this version does not know."""


class StalePlan(Exception):
    """What a plan was looked at for, and is applied by its token, is no longer what would happen.

    `version` is that of what it would change.
    """

    def __init__(
        self,
        sentence: str = "The state that this plan was made from has changed. Make a new plan.",
        *,
        version: int | None = None,
    ) -> None:
        super().__init__(sentence)
        self.version = version


def start(
    principal: Principal,
    kind: str,
    target: str,
    sentence: str,
    *,
    plan: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    org_id: int | None = None,
    role: Role = Role.ON_CALL,
) -> Operation:
    """Begin one, in the transaction of the change that asks for it, which records the audit row.

    `plan` says what is to become and `before` how to return; steps read both and change neither.
    `role` is what cancelling takes. Raises Busy while another one works on this target.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError(f"{kind} must start in the transaction of what asks for it")
    operation = Operation(
        kind=kind,
        target=target,
        org_id=org_id,
        role=role,
        sentence=sentence[:TEXT_MAX],
        total=len(machine_of(kind).steps),
        plan=dict(plan),
        before=dict(before or {}),
        actor_id=principal.user_id,
        actor_name=principal.name,
        request_id=request_context.current_id(),
    )
    try:
        with transaction.atomic():
            operation.save(force_insert=True)
    except IntegrityError:
        running = running_on(target)
        if running is None:
            raise
        raise Busy(running) from None
    _advance_on_commit(operation)
    return operation


def running_on(target: str) -> Operation | None:
    """The operation on exactly this target."""
    return Operation.objects.filter(target=target, done=False).first()


def running_within(topic: str) -> QuerySet[Operation]:
    """The operations on this topic and on parts of it, the first ones first."""
    return Operation.objects.filter(_on(topic), done=False).order_by("pk")


def _on(topic: str) -> Q:
    """Operations on this topic, or on parts of it."""
    return Q(target=topic) | Q(target__startswith=f"{topic}{PART}")


def waiting_for(topic: str) -> list[Operation]:
    """Running operations that wait for this process."""
    running = Operation.objects.filter(done=False).order_by("created_at")[:SWEEP_MAX]
    return [
        one for one in running if is_known(one.kind) and topic in machine_of(one.kind).waits_for(one)
    ]


def wake(topics: Collection[str]) -> None:
    """Have those looked at again that wait for news of one of these. Robust: else the sweep does it."""
    waiting = Operation.objects.filter(state__in=MOVING).exclude(awaits=[])
    for pk, awaits in waiting.values_list("pk", "awaits")[:SWEEP_MAX]:
        if not set(topics).isdisjoint(awaits):
            _advance_soon(pk)


def pause(running: Collection[UUID]) -> None:
    """Wait for the steps of these that are being done; until the end of the transaction no other begins.

    Before `fleet.lock_fleet`: steps take that after their operation.
    """
    list(Operation.objects.select_for_update(no_key=True).filter(pk__in=running).order_by("pk"))


def visible_operations(principal: Principal) -> QuerySet[Operation]:
    """Those of the orgs that they may see; what belongs to no org is for the platform's people."""
    orgs = principal.orgs_with(Role.VIEWER)
    return Operation.objects.all() if orgs is None else Operation.objects.filter(org_id__in=orgs)


def filtered(
    operations: QuerySet[Operation], *, target: str = "", kind: str = "", done: bool | None = None
) -> QuerySet[Operation]:
    """The same for the page and the API. A kind is also all kinds that begin so."""
    if target:
        operations = operations.filter(_on(target))
    if kind:
        operations = operations.filter(Q(kind=kind) | Q(kind__startswith=f"{kind}."))
    return operations if done is None else operations.filter(done=done)


def get_operation(principal: Principal, operation_id: UUID) -> Operation:
    """The one access function: a stranger gets Http404."""
    operation = visible_operations(principal).filter(pk=operation_id).first()
    if operation is None:
        raise Http404("There is no such operation, or it is not yours to see.")
    return operation


def may_change(principal: Principal, operation: Operation) -> bool:
    return principal.holds(Role(operation.role), operation.org_id) and not principal.read_only


def can_go_back(operation: Operation) -> bool:
    """Whether cancelling it would make a difference by now."""
    return core.can_go_back(_position(operation), machine_of(operation.kind).shape())


@transaction.atomic
def cancel(principal: Principal, operation_id: UUID, reason: str = "") -> Operation:
    """Have it go back to where it was. Again, or when it has ended, it changes nothing.

    Raises CannotCancel where it is stuck.
    """
    operation = _for_change(principal, operation_id)
    if operation.state == State.STUCK:
        raise CannotCancel("It is stuck: retry it.")
    if operation.done or operation.cancel_requested:
        return operation
    operation.cancel_requested = True
    operation.wake_at = timezone.now()
    operation.save(update_fields=["cancel_requested", "wake_at"])
    _record(principal, "operation.cancel", operation, "is being cancelled", reason)
    _advance_on_commit(operation)
    return operation


@transaction.atomic
def retry(principal: Principal, operation_id: UUID, reason: str = "") -> Operation:
    """Retry a stuck operation. Raises CannotRetry for others, and for an unknown kind."""
    operation = _for_change(principal, operation_id)
    if operation.state != State.STUCK:
        raise CannotRetry(f"It is {operation.state}: there is nothing to try again.")
    if not is_known(operation.kind):
        raise CannotRetry(f"This version of the console does not know the kind “{operation.kind}”.")
    now = timezone.now()
    _put(operation, core.again(_position(operation), now), now)
    operation.wake_at = now
    operation.save()
    _record(principal, "operation.retry", operation, "is retried", reason)
    _advance_on_commit(operation)
    return operation


def retry_stuck(principal: Principal, found: Iterable[Operation], reason: str) -> None:
    """Retry those of them that are stuck."""
    for one in found:
        if one.state == State.STUCK:
            with contextlib.suppress(CannotRetry):  # somebody else has it tried again
                retry(principal, one.pk, reason)


def advance(operation_id: UUID) -> bool:
    """Do the next step, or look at it again; whether there is more to do at once.

    However many call it, one at a time works on an operation. Who is killed in it has changed nothing,
    and neither has who waits too long for a lock.
    """
    if not _begin(operation_id):
        return False
    try:
        return _advance(operation_id)
    except DatabaseError as error:
        if not is_locked(error):
            raise
        _come_again(operation_id)
        return False


def _advance(operation_id: UUID) -> bool:
    with transaction.atomic():
        limit_lock_waits(LOCKED_SECONDS_MAX)
        operation = _locked(operation_id)
        if operation is None:
            return False
        now = timezone.now()
        shown = operation.step, operation.percent, operation.message
        position, waiting = _stepped(operation, machine_of(operation.kind), now)
        _put(operation, position, now)
        operation.wake_at = now + timedelta(seconds=waiting.seconds if waiting else 0)
        operation.awaits = sorted(waiting.topics) if waiting else []
        operation.save()
        if not position.state.moves:
            _note_end(operation)
            # Who waits for what it had.
            transaction.on_commit(partial(wake, [operation.topic]), robust=True)
        elif (operation.step, operation.percent, operation.message) != shown:
            hint([operation.topic, OPERATIONS], "operation")
    return position.state.moves and not (waiting and waiting.seconds)


def take_due(now: datetime) -> list[UUID]:
    """The operations that somebody should advance now. Nobody else is given them for a while."""
    is_due = Q(wake_at__lte=now) | Q(wake_at__gt=now + AHEAD)
    due = Operation.objects.filter(is_due, state__in=MOVING).order_by("wake_at")
    with transaction.atomic():
        found = list(
            due.select_for_update(no_key=True, skip_locked=True).values_list("pk", flat=True)[:SWEEP_MAX]
        )
        Operation.objects.filter(pk__in=found).update(wake_at=now + TAKEN_FOR_LOST)
    return found


def forget_old_operations(now: datetime) -> int:
    deleted, _ = Operation.objects.filter(done=True, done_at__lt=now - KEPT).delete()
    return deleted


def _stepped(
    operation: Operation, machine: type[Machine], now: datetime
) -> tuple[Position, Waiting | None]:
    """Where it is after its next step, and what that waits for."""
    shape, position = machine.shape(), _position(operation)
    if operation.attempts > core.ATTEMPTS_MAX:
        return core.worn_out(position, shape, now), None
    if operation.cancel_requested:
        position = core.cancelled(position, shape, now)
    step = machine.steps[position.step]
    outcome = _outcome(step.undo if position.state is State.UNDOING else step.do, operation)
    after = core.after(position, outcome, shape, now)
    if after.state is State.SUCCEEDED:
        operation.response = machine.response(operation)
    if isinstance(outcome, Waiting) and after.state is position.state:
        return after, outcome
    return after, None


def _outcome(doing: Doing, operation: Operation) -> Outcome:
    """What the step says. One that fails leaves nothing in the database."""
    with transaction.atomic():
        outcome = doing(operation)
        transaction.set_rollback(isinstance(outcome, Failed))
    if isinstance(outcome, Failed):
        log.warning("%s of %s failed: %s", operation.kind, operation.target, outcome.detail)
    return outcome


def _begin(operation_id: UUID) -> bool:
    """Count the attempt where even the death of this process can't take it back.

    What this version does not know is left to a worker of the one that does: it is not worn out.
    """
    with transaction.atomic():
        operation = _locked(operation_id)
        if operation is None:
            return False
        if not is_known(operation.kind):
            log.warning("%s is of the kind %s, which is not known here", operation.pk, operation.kind)
            operation.wake_at = timezone.now() + UNKNOWN_FOR
            operation.save(update_fields=["wake_at"])
            return False
        operation.attempts += 1
        operation.wake_at = timezone.now() + TAKEN_FOR_LOST
        operation.save(update_fields=["attempts", "wake_at"])
    return True


def _come_again(operation_id: UUID) -> None:
    """Something is locked for long. That counts as no attempt: the step may come to an end yet."""
    with transaction.atomic():
        operation = _locked(operation_id)
        if operation is None:
            return
        log.warning("%s of %s waits: something is locked", operation.kind, operation.target)
        operation.attempts = max(0, operation.attempts - 1)
        operation.wake_at = timezone.now() + LOCKED_FOR
        if operation.message != IS_LOCKED:
            operation.message = IS_LOCKED
            hint([operation.topic, OPERATIONS], "operation")
        operation.save(update_fields=["attempts", "wake_at", "message"])


def _locked(operation_id: UUID) -> Operation | None:
    """None where it has ended, is stuck, or where somebody else is at it."""
    found = Operation.objects.filter(pk=operation_id, state__in=MOVING)
    return found.select_for_update(no_key=True, skip_locked=True).first()


def _for_change(principal: Principal, operation_id: UUID) -> Operation:
    principal.check_may_change()
    seen = get_operation(principal, operation_id)
    if not may_change(principal, seen):
        raise Refused(f"This needs the role {Role(seen.role).label}.")
    return Operation.objects.select_for_update(no_key=True).get(pk=seen.pk)


def _position(operation: Operation) -> Position:
    error = operation.error
    return Position(
        State(operation.state),
        operation.step,
        operation.step_since,
        operation.attempts,
        Failed(error["reason"], error["detail"]) if error else None,
        operation.message,
    )


def _put(operation: Operation, position: Position, now: datetime) -> None:
    shape = machine_of(operation.kind).shape()
    operation.state = position.state.value
    operation.step = position.step
    operation.step_since = position.since
    operation.attempts = position.attempts
    operation.message = position.message[:TEXT_MAX]
    error, percent = position.error, position.percent(shape)
    # What is taken back counts as done until it is: it sinks from where it was, and does not jump there.
    operation.percent = min(percent, operation.percent) if error else percent
    operation.error = {"reason": error.reason, "detail": error.detail} if error else None
    operation.done = operation.state in ENDED
    operation.done_at = now if operation.done else None
    operation.updated_at = now


def _advance_on_commit(operation: Operation) -> None:
    """Robust: where Redis is away, the sweep finds it later."""
    transaction.on_commit(partial(_advance_soon, operation.pk), robust=True)


def _advance_soon(operation_id: UUID) -> None:
    try:
        current_app.send_task(ADVANCE, (str(operation_id),), retry=False)
    except OperationalError as error:
        log.warning("No task could be sent, so the sweep goes on with %s: %s", operation_id, error)


def _note_end(operation: Operation) -> None:
    # Events are for all who see the target.
    is_told = operation.state != State.CANCELLED and not names_places(operation.kind)
    said = f": {operation.message}" if operation.message and is_told else "."
    note(
        f"operation.{operation.state}",
        [operation.topic, OPERATIONS],
        f"{operation.sentence}: {operation.state}{said}",
        {"operation": str(operation.pk), "kind": operation.kind},
    )


def _record(principal: Principal, action: str, operation: Operation, what: str, reason: str) -> None:
    topics = [operation.topic, OPERATIONS]
    record(
        principal,
        action,
        Subject("operation", operation.pk, operation.sentence, operation.org_id, topics),
        reason=reason,
        sentence=f"“{operation.sentence}” {what}.",
    )


@finder("operations")
def find_operations(principal: Principal, text: str, most: int) -> list[Found]:
    """By what they do, by their target, by their own id or that of the request that began them."""
    visible, by_id = visible_operations(principal), _uuid_of(text)
    if by_id:
        found = visible.filter(Q(pk=by_id) | Q(request_id=text))
    else:
        found = visible.filter(
            Q(sentence__icontains=text) | Q(target__icontains=text) | Q(request_id=text)
        ).order_by("done", "-created_at")
    return [
        Found(one.sentence, f"{one.state}, {one.target}", "operation", one.pk) for one in found[:most]
    ]


def _uuid_of(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
