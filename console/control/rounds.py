"""Rounds: documents are made from what is intended now, and whoever has not got theirs is told.

All is level-triggered: `push` does so for some targets, and `reconcile` every few seconds for all. Any
of it may be repeated, run beside itself, or be lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from console.control.documents import Compiler, Document, Idle, NotYet, Partial
from console.control.models import BadAnswers, Change, Kind, Target
from console.control.sending import (
    ROUND_SECONDS,
    SUSPECTS_AT_ONCE_MAX,
    Answer,
    Endpoint,
    Order,
    send,
)
from console.control.services import Address, awaited, joined, push_soon, targets_of
from console.fleet.models import Driver, is_lost
from console.operations import services as operations
from telemetry.hints import hint
from telemetry.topics import of_source

# Also who should be there already: it may have lost its state.
ASK_EVERY: Final = timedelta(seconds=30)
RETRY_SECONDS: Final = (1, 2, 5, 10, 30, 60)  # after so many failures in a row
FAILURES_PATIENT_MAX: Final = 3  # in a row; then a change waits for the next try, too
ASKED_FOR: Final = timedelta(seconds=ROUND_SECONDS + 2)  # then whoever asked a target has died in it
ROUNDS_MAX: Final = 3  # of a push whose targets get newer documents all the time
OPEN_CHANGES_MAX: Final = 200
COMPILED: Final = (
    *("generation", "digest", "compiled_at", "change", "observed_change", "problem", "is_idle"),
)
NOTED: Final = (
    *("generation", "observed_generation", "observed_change", "observed_at", "problem"),
    *("failures", "retry_at", "told_at", "fault", "bad_since", "asked_until"),
)


def reconcile() -> int:
    """Tell whoever has not got what it should have. How many are not there yet."""
    _forget_who_is_gone()
    return push([(kind, "*") for kind in Kind.values], also_ask=True)


def reconcile_unsettled(now: datetime) -> int:
    """A reconcile of the targets that somebody has to look at: all while a change has not arrived
    everywhere, else those that are not there yet and those that are to be asked.

    For most of the rounds: to make all documents takes a hundred times as long as to see that nobody
    waits for one. Intent that changed without `changed` is found by the next `reconcile`.
    """
    if Change.objects.filter(applied_at=None).exists():
        return reconcile()
    _forget_who_is_gone()
    return push(_unsettled(now), also_ask=True)


def _unsettled(now: datetime) -> list[Address]:
    settled = Target.objects.filter(
        Q(is_idle=True) | Q(generation__gt=0, observed_generation=F("generation")),
        observed_at__gt=now - ASK_EVERY,
    )
    return [
        (kind, name)
        for kind in Kind.values
        for name in joined(kind)
        .exclude(name__in=settled.filter(kind=kind).values("name"))
        .values_list("name", flat=True)
    ]


def _forget_who_is_gone() -> None:
    for kind in Kind.values:
        # In one statement: who joins meanwhile is not gone.
        there = joined(kind).values("name")
        Target.objects.filter(kind=kind, generation__gt=0).exclude(name__in=there).delete()


def push(targets: Iterable[Address], *, also_ask: bool = False) -> int:
    """Make these targets' documents, and tell those who have not got theirs. How many still have not.

    `also_ask` is a reconcile's: it waits before it tries again where it has failed, and asks those who
    have theirs now and then whether they still do. Both take a bounded time, whatever targets answer. A
    target that somebody else is asking is left to them: they tell it what is newer when they are done.
    """
    has_it: dict[Address, bool] = {}
    for _ in range(ROUNDS_MAX):
        done = _round(targets, also_ask=also_ask)
        has_it |= done.has_it
        targets = done.overtaken
        if not targets:
            break
    else:
        push_soon(sorted(targets))
    return sum(not one for one in has_it.values())


@dataclass(slots=True)
class _Done:
    """What became of a round. `overtaken`: they got a newer document while they were asked."""

    has_it: dict[Address, bool]
    overtaken: list[Address]


def _round(targets: Iterable[Address], *, also_ask: bool) -> _Done:
    """Everybody who is to be asked is asked beside the others, and noted when they have answered."""
    asked_at = timezone.now()
    there: dict[Address, Endpoint | None] = {}
    made: dict[int, tuple[Target, Document | None]] = {}
    for kind, names in _by_kind(targets).items():
        found = _endpoints(kind, names)
        there |= {(kind, name): endpoint for name, endpoint in found.items()}
        made |= _compile(kind, list(found))
    due = [
        target
        for target, document in made.values()
        if there[target.kind, target.name] and _is_due(target, document, asked_at, also_ask=also_ask)
    ]
    claimed = _claim(due, asked_at)
    orders = [_order(*made[key], there[made[key][0].kind, made[key][0].name]) for key in claimed]
    told = {order.key for order in orders if order.document is not None}
    overtaken, heard = [], []
    for answer in send(orders) if orders else ():
        target = made[answer.key][0]
        if not _note(target, answer, asked_at, was_told=answer.key in told):
            overtaken.append((target.kind, target.name))
        if answer.key in told and answer.reached:
            heard.append(of_source(target.kind, target.name))
    if heard:
        operations.wake(heard)
    open_changes = list(Change.objects.filter(applied_at=None)[:OPEN_CHANGES_MAX])
    _close(open_changes)
    if told:
        hint(sorted({change.topic for change in open_changes if change.topic}), "control.applied")
    has_it = {(target.kind, target.name): target.is_up_to_date for target, _ in made.values()}
    return _Done(has_it, overtaken)


def _endpoints(kind: str, names: Collection[str] | None) -> Mapping[str, Endpoint | None]:
    """Who has joined, and where it is told; None for whom nothing is heard of."""
    found = joined(kind) if names is None else joined(kind).filter(name__in=names)
    return {one.name: None if is_lost(one) else Endpoint.of(one) for one in found}


def _by_kind(targets: Iterable[Address]) -> dict[str, set[str] | None]:
    """The names that are wanted of each kind; None for all."""
    wanted: dict[str, set[str] | None] = {}
    for kind, name in targets:
        names = wanted.setdefault(kind, set())
        if name == "*":
            wanted[kind] = None
        elif names is not None:
            names.add(name)
    return wanted


def _is_due(target: Target, document: Document | None, now: datetime, *, also_ask: bool) -> bool:
    """Whether somebody has to talk to it now. Who gives no answers is asked less and less often."""
    waits = target.retry_at is not None and target.retry_at > now
    if waits and (also_ask or (target.fault and target.failures >= FAILURES_PATIENT_MAX)):
        return False
    if document is not None and not target.is_up_to_date:
        return True
    return also_ask and (target.observed_at is None or now - target.observed_at > ASK_EVERY)


def _order(target: Target, document: Document | None, endpoint: Endpoint | None) -> Order:
    if endpoint is None:
        raise RuntimeError(f"{target} is asked though nobody knows where it is")
    is_told = document is not None and not target.is_up_to_date
    return Order(
        target.pk,
        endpoint,
        document.of_generation(target.generation) if document is not None and is_told else None,
        is_suspect=bool(target.fault),
    )


@transaction.atomic
def _claim(due: Collection[Target], now: datetime) -> list[int]:
    """Those of them that nobody else is asking; and of who gives no answers only so many at a time, over
    all workers. Who was asked longest ago comes first."""
    busy = Target.objects.filter(asked_until__gt=now)
    suspects_left = SUSPECTS_AT_ONCE_MAX - busy.exclude(fault="").count()
    mine = [target.pk for target in due]
    rows = Target.objects.select_for_update(no_key=True).filter(pk__in=mine).order_by("kind", "name")
    free = sorted(
        (
            row
            for row in rows.only("pk", "asked_until", "fault", "observed_at", "retry_at")
            if row.asked_until is None or row.asked_until <= now
        ),
        key=lambda row: row.retry_at or row.observed_at or now,
    )
    claimed = []
    for row in free:
        if row.fault:
            suspects_left -= 1
            if suspects_left < 0:
                continue
        claimed.append(row.pk)
    until = timezone.now() + ASKED_FOR
    Target.objects.filter(pk__in=claimed).update(asked_until=until)
    for target in due:
        if target.pk in claimed:
            target.asked_until = until  # by which its answer is known to be ours
    return claimed


@transaction.atomic
def _compile(kind: str, names: Collection[str]) -> dict[int, tuple[Target, Document | None]]:
    """The targets by key, with what each should be now. A new content is a new generation.

    Whoever compiles holds the rows, so of two at the same time the second one sees what is newer.
    """
    rows = list(targets_of(kind, names).select_for_update(no_key=True).order_by("name"))
    # Read before intent is: what is compiled takes in at least these.
    newest = Change.objects.values_list("pk", flat=True).first() or 0
    compiler, bases = Compiler(kind), _bases(kind, rows)
    made: dict[int, tuple[Target, Document | None]] = {}
    touched = []
    for target in rows:
        before = [getattr(target, field) for field in COMPILED]
        document = _document_of(target, compiler, bases[target.name])
        if document is not None:
            _follow(target, document, newest)
        made[target.pk] = target, document
        if before != [getattr(target, field) for field in COMPILED]:
            touched.append(target)
    Target.objects.bulk_update(touched, COMPILED)
    return made


def _bases(kind: str, targets: Collection[Target]) -> dict[str, Partial]:
    """What is known of the process itself."""
    if kind == Kind.NODE:
        return {target.name: {} for target in targets}
    if kind == Kind.BRAIN:
        return {target.name: {"brain": target.name} for target in targets}
    drivers = {one.name: one for one in Driver.objects.only("name", "model", "engine")}
    return {target.name: _base(target, drivers.get(target.name)) for target in targets}


def _base(target: Target, driver: Driver | None) -> Partial:
    """Only engines are told a key for claims: the callers of daemons have tokens."""
    claims = {"claims_key": target.claims_key} if driver and driver.engine else {}
    model = driver.model if driver else None
    return {"driver": target.name, "secret": target.secret, "model": model, **claims}


def _document_of(target: Target, compiler: Compiler, base: Partial) -> Document | None:
    try:
        return compiler.compile(target.name, base)
    except NotYet as why:
        target.problem = str(why)[:500]
        target.is_idle = isinstance(why, Idle)
        return None


def _follow(target: Target, document: Document, newest: int) -> None:
    """Take note of what it should be, and of the last change that this takes in."""
    target.is_idle = False
    if bytes(target.digest) != document.digest:
        target.generation += 1
        target.digest = document.digest
        target.compiled_at = timezone.now()
    target.change = newest
    if target.is_up_to_date:
        target.observed_change = newest


def _note(target: Target, answer: Answer, asked_at: datetime, *, was_told: bool) -> bool:
    """Write down what it said, and that nobody asks it any more. False, and nothing of what it said is
    written, where somebody has made a later generation meanwhile.

    Nothing is written either where somebody else asks it by now, since we took too long: it is theirs.
    Who asks is told from `asked_until`, and not by clocks, of which one may be ahead.
    """
    ours = target.generation
    claimed = Target.objects.filter(pk=target.pk, asked_until=target.asked_until)
    target.asked_until = None
    if not answer.asked:
        claimed.update(asked_until=None)
        return True
    target.problem = answer.problem
    if answer.reached and (answer.generation > ours or (answer.generation == ours and answer.refused)):
        # Our database is older than what it was told, or somebody else has told it.
        target.generation = answer.generation + 1
        target.problem = "It reports a generation that this console did not send. It is sent again."
    if answer.reached:
        target.observed_generation = answer.observed_generation
        target.observed_change = target.change if target.is_up_to_date else 0
        target.observed_at = asked_at
    _note_fault(target, answer, asked_at)
    arrived = answer.reached and target.is_up_to_date
    target.failures = 0 if arrived else target.failures + 1
    wait = RETRY_SECONDS[min(target.failures, len(RETRY_SECONDS)) - 1]
    target.retry_at = None if arrived else timezone.now() + timedelta(seconds=wait)
    if was_told:
        target.told_at = asked_at
    if claimed.filter(generation=ours).update(**{field: getattr(target, field) for field in NOTED}):
        return True
    is_overtaken = claimed.update(asked_until=None)
    return not is_overtaken


def _note_fault(target: Target, answer: Answer, asked_at: datetime) -> None:
    if answer.fault is None:
        target.fault, target.bad_since = "", None
        return
    target.fault = answer.fault.value
    target.bad_since = target.bad_since or asked_at
    BadAnswers.objects.bulk_create([BadAnswers(fault=target.fault)], ignore_conflicts=True)
    BadAnswers.objects.filter(fault=target.fault).update(count=F("count") + 1)


def _close(waiting: Collection[Change]) -> None:
    """Those that all have heard of by now. Those that somebody misses stay open."""
    if not waiting:
        return
    now = timezone.now()
    heard = {
        (kind, target.name): target.observed_change if target.observed_generation else 0
        for kind in Kind.values
        for target in awaited(kind)
        .filter(name__in=joined(kind).values("name"))
        .defer("secret", "claims_key", "digest")
    }
    done = [
        change.pk
        for change in waiting
        if all(number >= change.pk for one, number in heard.items() if change.concerns(*one))
    ]
    Change.objects.filter(pk__in=done, applied_at=None).update(applied_at=now)
