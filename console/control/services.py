"""Getting every process to be what it should be, and telling who is and who is not.

`changed` is called by whoever changes intent. All else is level-triggered: `push` makes documents from
what is intended now and tells whoever is not there yet; `reconcile` does so every few seconds for all.
Any of it may be repeated, run beside itself, or be lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from celery import current_app
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.http import Http404
from django.utils import timezone
from kombu.exceptions import OperationalError

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.control.documents import Compiler, Document, Idle, NotYet, Partial
from console.control.models import BadAnswers, Change, Kind, Target, new_secret
from console.control.sending import (
    ROUND_SECONDS,
    SUSPECTS_AT_ONCE_MAX,
    Answer,
    Endpoint,
    Order,
    send,
)
from console.fleet.models import MODELS, Brain, Driver, Node, is_lost
from console.operations import services as operations
from telemetry.events import in_order_of_commits
from telemetry.hints import hint
from telemetry.topics import of_source

log = logging.getLogger(__name__)

PUSH: Final = "console.control.tasks.push"  # by its name, for it imports this module

Address = tuple[str, str]  # kind and name; * for all of a kind
ALL_DRIVERS: Final[Address] = (Kind.DRIVER.value, "*")
ALL_NODES: Final[Address] = (Kind.NODE.value, "*")
ALL_BRAINS: Final[Address] = (Kind.BRAIN.value, "*")
# Also who should be there already: it may have lost its state.
ASK_EVERY: Final = timedelta(seconds=30)
RETRY_SECONDS: Final = (1, 2, 5, 10, 30, 60)  # after so many failures in a row
FAILURES_PATIENT_MAX: Final = 3  # in a row; then a change waits for the next try, too
ASKED_FOR: Final = timedelta(seconds=ROUND_SECONDS + 2)  # then whoever asked a target has died in it
ROUNDS_MAX: Final = 3  # of a push whose targets get newer documents all the time
OPEN_CHANGES_MAX: Final = 200
KEPT: Final = timedelta(days=30)
COMPILED: Final = (
    *("generation", "digest", "compiled_at", "change", "observed_change", "problem", "is_idle"),
)
NOTED: Final = (
    *("generation", "observed_generation", "observed_change", "observed_at", "problem"),
    *("failures", "retry_at", "told_at", "fault", "bad_since", "asked_until"),
)
SILENT: Final = "It does not respond. It is updated as soon as it is back."


def changed(targets: Collection[Address], why: str, *, topic: str = "") -> Change:
    """Intent has changed for these. Call it late in the transaction that changed it.

    After the commit they are told at once, by a task; should that be lost, by the next reconcile. The
    change that is returned can be asked for with `applied`; who watches `topic` is told when somebody
    has heard of it.
    """
    in_order_of_commits()
    change = Change.objects.create(why=why[:200], targets=sorted(map(list, set(targets))), topic=topic)
    transaction.on_commit(lambda: _push_soon(sorted(set(targets))))
    return change


def _push_soon(targets: list[Address]) -> None:
    try:
        current_app.send_task(PUSH, ([list(target) for target in targets],), retry=False)
    except OperationalError as error:
        # The change is saved, and the request that made it has succeeded.
        log.warning("No task could be sent, so the next reconcile tells of the change: %s", error)


def claims_key_of(driver: str) -> bytes:
    """What gateways sign the claims of this engine's requests with."""
    return bytes(_target_of(Kind.DRIVER, driver).claims_key)


def claims_keys_of(drivers: Iterable[str]) -> dict[str, bytes]:
    """What gateways sign the claims of these engines' requests with, by driver."""
    found = targets_of(Kind.DRIVER, drivers).only("name", "claims_key")
    return {target.name: bytes(target.claims_key) for target in found}


def new_claims_key(driver: str) -> bytes:
    """Rotate it. The engine is told by a `changed` that has to follow."""
    target = _target_of(Kind.DRIVER, driver)
    target.claims_key = new_secret()
    target.save(update_fields=["claims_key"])
    return claims_key_of(driver)


def secret_of(kind: str, name: str) -> bytes:
    """What a driver shows to agents, and agents are told to expect of it."""
    return bytes(_target_of(kind, name).secret)


def secrets_of(kind: str, names: Iterable[str]) -> dict[str, bytes]:
    """What these show to agents, by name. In as many queries for many as for one."""
    found = targets_of(kind, names).only("name", "secret")
    return {target.name: bytes(target.secret) for target in found}


def _target_of(kind: str, name: str) -> Target:
    """It is made where there is none."""
    target = Target.objects.filter(kind=kind, name=name).first()
    return target or targets_of(kind, [name]).get()


def targets_of(kind: str, names: Iterable[str]) -> QuerySet[Target]:
    """Those of these names, which are made where there are none. When two make them at once, neither
    fails, as one of two that "get or create" would: it goes on, but PostgreSQL has logged an error."""
    wanted = set(names)
    found = Target.objects.filter(kind=kind, name__in=wanted)
    # Only those that are missing: their secrets are sealed, which takes time.
    if new := wanted.difference(found.values_list("name", flat=True)):
        made = [Target(kind=kind, name=name) for name in sorted(new)]
        Target.objects.bulk_create(made, ignore_conflicts=True)
    return found.all()


# Who has it


@dataclass(frozen=True, slots=True)
class Standing:
    """Of one target: whether it has heard of a change, and if not, why."""

    kind: str
    name: str
    has_it: bool
    generation: int
    observed_generation: int
    as_of: datetime | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a change has come. `seconds` is what it took to reach the last one; None until then."""

    change: Change | None
    standings: list[Standing]

    @property
    def has_it(self) -> int:
        return sum(one.has_it for one in self.standings)

    @property
    def lagging(self) -> list[Standing]:
        return [one for one in self.standings if not one.has_it]

    @property
    def seconds(self) -> float | None:
        if self.change is None or self.change.applied_at is None:
            return None
        return (self.change.applied_at - self.change.at).total_seconds()


def applied(
    change: Change | None, kind: str = Kind.DRIVER, *, among: Collection[str] | None = None
) -> Reach:
    """Who of a kind has heard of a change, and why others have not; without one, of all there was.

    `among`: of just these, also of those that it did not concern when it was made. Left out are those
    that have never been told anything, and those that are idle: nobody waits for them.
    """
    there = {one.name: one for one in _joined(kind).defer("control_token")}
    targets = _awaited(kind).filter(name__in=there).order_by("name")
    return Reach(
        change,
        [
            _standing(target, change.pk if change else 0, is_silent=is_lost(there[target.name]))
            for target in targets.defer("secret", "claims_key", "digest")
            if (target.name in among if among is not None else _concerns(change, target))
        ],
    )


def _awaited(kind: str) -> QuerySet[Target]:
    """Those that were told something and serve somebody: a change has come as far as they have it."""
    return Target.objects.filter(kind=kind, generation__gt=0, is_idle=False)


def _concerns(change: Change | None, target: Target) -> bool:
    return change is None or change.concerns(target.kind, target.name)


def _standing(target: Target, change: int, *, is_silent: bool) -> Standing:
    has_it = target.observed_generation > 0 and target.observed_change >= change
    return Standing(
        kind=target.kind,
        name=target.name,
        has_it=has_it,
        generation=target.generation,
        observed_generation=target.observed_generation,
        as_of=target.observed_at,
        why_not="" if has_it else target.problem or (SILENT if is_silent else "It is being configured."),
    )


def visible_targets(principal: Principal) -> QuerySet[Target]:
    """All, for those with a role on the platform. Raises Http404 for others."""
    if not principal.on_platform(Role.VIEWER):
        raise Http404
    return Target.objects.filter(generation__gt=0).defer("secret", "claims_key", "digest")


# Telling


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
        for name in _joined(kind)
        .exclude(name__in=settled.filter(kind=kind).values("name"))
        .values_list("name", flat=True)
    ]


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
        _push_soon(sorted(targets))
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
        for target in _awaited(kind)
        .filter(name__in=_joined(kind).values("name"))
        .defer("secret", "claims_key", "digest")
    }
    done = [
        change.pk
        for change in waiting
        if all(number >= change.pk for one, number in heard.items() if change.concerns(*one))
    ]
    Change.objects.filter(pk__in=done, applied_at=None).update(applied_at=now)


def forget(kind: str, name: str) -> None:
    """It has left the fleet. Who joins under its name has another secret, and is told from the start."""
    Target.objects.filter(kind=kind, name=name).delete()


def _forget_who_is_gone() -> None:
    for kind in Kind.values:
        # In one statement: who joins meanwhile is not gone.
        joined = _joined(kind).values("name")
        Target.objects.filter(kind=kind, generation__gt=0).exclude(name__in=joined).delete()


def forget_old_changes(now: datetime) -> int:
    """Whoever was away for longer is told what is intended now, as ever."""
    deleted, _ = Change.objects.filter(at__lt=now - KEPT).delete()
    return deleted


# The fleet


def _joined(kind: str) -> QuerySet[Node | Driver | Brain]:
    return MODELS[kind].objects.filter(joined_at__isnull=False)


def _endpoints(kind: str, names: Collection[str] | None) -> Mapping[str, Endpoint | None]:
    """Who has joined, and where it is told; None for whom nothing is heard of."""
    found = _joined(kind) if names is None else _joined(kind).filter(name__in=names)
    return {one.name: None if is_lost(one) else Endpoint.of(one) for one in found}


def in_the_open() -> list[str]:
    """Who is asked over plain HTTP through a network, or would be."""
    return [
        f"{kind} {one.name}"
        for kind in Kind.values
        for one in _joined(kind).filter(control_url__startswith="http:").order_by("name")
        if Endpoint(one.control_url, "").is_in_the_open
    ]
