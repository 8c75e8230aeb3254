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

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from kombu.exceptions import OperationalError

from console.control.documents import (
    Compiler,
    Document,
    NotYet,
    Partial,
    addition,
    common_part,
    part,
)
from console.control.models import Change, Kind, Target
from console.control.sending import Answer, Endpoint, Order, send
from console.fleet.models import Driver, Node
from telemetry.events import in_order_of_commits
from telemetry.hints import hint

__all__ = [
    "NotYet",
    "addition",
    "applied",
    "changed",
    "common_part",
    "part",
    "push",
    "reconcile",
    "secret_of",
]

log = logging.getLogger(__name__)

Address = tuple[str, str]  # kind and name; * for all of a kind
ALL_DRIVERS: Final[Address] = (Kind.DRIVER.value, "*")
ALL_NODES: Final[Address] = (Kind.NODE.value, "*")
ASK_EVERY: Final = timedelta(
    seconds=30
)  # also of who should be there already: it may have lost its state
RETRY_SECONDS: Final = (1, 2, 5, 10, 30, 60)  # after so many failures in a row
OPEN_CHANGES_MAX: Final = 200
KEPT: Final = timedelta(days=30)
COMPILED: Final = ("generation", "digest", "compiled_at", "change", "observed_change", "problem")
NOTED: Final = (
    *("generation", "observed_generation", "observed_change", "observed_at", "problem"),
    *("failures", "retry_at", "told_at"),
)
SILENT: Final = "Nothing is heard of it. It is told as soon as it is back."


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
    from console.control import tasks

    try:
        tasks.push.apply_async(([list(target) for target in targets],), retry=False)
    except OperationalError as error:
        # The change is saved, and the request that made it has succeeded.
        log.warning("No task could be sent, so the next reconcile tells of the change: %s", error)


def secret_of(kind: str, name: str) -> bytes:
    """What a driver shows to agents, and agents are told to expect of it."""
    return bytes(Target.objects.get_or_create(kind=kind, name=name)[0].secret)


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


def applied(change: Change | None, kind: str = Kind.DRIVER) -> Reach:
    """Who of a kind has heard of a change, and why others have not; without one, of all there was.

    Who has never been told anything keeps nothing of anybody, and is left out.
    """
    there = {one.name: one for one in _joined(kind).defer("control_token")}
    targets = Target.objects.filter(kind=kind, name__in=there, generation__gt=0).order_by("name")
    return Reach(
        change,
        [
            _standing(target, change.pk if change else 0, is_silent=_is_silent(there[target.name]))
            for target in targets.defer("secret", "digest")
            if change is None or change.concerns(kind, target.name)
        ],
    )


def _standing(target: Target, change: int, *, is_silent: bool) -> Standing:
    has_it = target.observed_generation > 0 and target.observed_change >= change
    return Standing(
        kind=target.kind,
        name=target.name,
        has_it=has_it,
        generation=target.generation,
        observed_generation=target.observed_generation,
        as_of=target.observed_at,
        why_not="" if has_it else target.problem or (SILENT if is_silent else "It is being told."),
    )


# Telling


def reconcile() -> int:
    """Tell whoever has not got what it should have. How many are not there yet."""
    _forget_who_is_gone()
    return sum(push([(kind, "*")], also_ask=True) for kind in Kind.values)


def push(targets: Iterable[Address], *, also_ask: bool = False) -> int:
    """Make these targets' documents, and tell those who have not got theirs. How many still have not.

    `also_ask` is a reconcile's: it waits before it tries again where it has failed, and asks those who
    have theirs now and then whether they still do.
    """
    wanted: dict[str, set[str] | None] = {}
    for kind, name in targets:
        names = wanted.setdefault(kind, set())
        if name == "*":
            wanted[kind] = None
        elif names is not None:
            names.add(name)
    return sum(_push(kind, names, also_ask=also_ask) for kind, names in wanted.items())


def _push(kind: str, names: Collection[str] | None, *, also_ask: bool) -> int:
    there = _endpoints(kind, names)
    compiled = _compile(kind, list(there))
    asked_at = timezone.now()
    orders = []
    for target, document in compiled.values():
        endpoint = there[target.name]
        if endpoint is None or (also_ask and target.retry_at and target.retry_at > asked_at):
            continue
        if document is not None and not target.is_up_to_date:
            orders.append(Order(target.pk, endpoint, document.of_generation(target.generation)))
        elif also_ask and (target.observed_at is None or asked_at - target.observed_at > ASK_EVERY):
            orders.append(Order(target.pk, endpoint))
    told = {order.key for order in orders if order.document is not None}
    answers = send(orders) if orders else []
    with transaction.atomic():  # in the order of names, as everybody takes these rows
        for answer in answers:
            _note(compiled[answer.key][0], answer, asked_at, was_told=answer.key in told)
    open_changes = list(Change.objects.filter(applied_at=None)[:OPEN_CHANGES_MAX])
    _close(open_changes)
    if told:
        hint(sorted({change.topic for change in open_changes if change.topic}), "control.applied")
    return sum(not target.is_up_to_date for target, _ in compiled.values())


@transaction.atomic
def _compile(kind: str, names: Collection[str]) -> dict[int, tuple[Target, Document | None]]:
    """The targets by key, with what each should be now. A new content is a new generation.

    Whoever compiles holds the rows, so of two at the same time the second one sees what is newer.
    """
    known = Target.objects.filter(kind=kind, name__in=names)
    missing = set(names) - set(known.values_list("name", flat=True))
    Target.objects.bulk_create(
        [Target(kind=kind, name=name) for name in sorted(missing)], ignore_conflicts=True
    )
    rows = list(known.select_for_update().order_by("name"))
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
    models = dict(Driver.objects.values_list("name", "model"))
    return {
        target.name: {"driver": target.name, "secret": target.secret, "model": models.get(target.name)}
        for target in targets
    }


def _document_of(target: Target, compiler: Compiler, base: Partial) -> Document | None:
    try:
        return compiler.compile(target.name, base)
    except NotYet as why:
        target.problem = str(why)[:500]
        return None


def _follow(target: Target, document: Document, newest: int) -> None:
    """Take note of what it should be, and of the last change that this takes in."""
    if bytes(target.digest) != document.digest:
        target.generation += 1
        target.digest = document.digest
        target.compiled_at = timezone.now()
    target.change = newest
    if target.is_up_to_date:
        target.observed_change = newest


def _note(target: Target, answer: Answer, asked_at: datetime, *, was_told: bool) -> None:
    """Write down what it said, unless somebody has made a later generation or asked it later."""
    ours = target.generation
    target.problem = answer.problem
    if answer.generation > ours or (answer.generation == ours and answer.refused):
        # Our database is older than what it was told, or somebody else has told it.
        target.generation = answer.generation + 1
        target.problem = "Somebody else has told it what to be. It is told anew."
    if answer.reached:
        target.observed_generation = answer.observed_generation
        target.observed_change = target.change if target.is_up_to_date else 0
        target.observed_at = asked_at
    arrived = answer.reached and target.is_up_to_date
    target.failures = 0 if arrived else target.failures + 1
    wait = RETRY_SECONDS[min(target.failures, len(RETRY_SECONDS)) - 1]
    target.retry_at = None if arrived else asked_at + timedelta(seconds=wait)
    if was_told:
        target.told_at = asked_at
    Target.objects.filter(
        Q(observed_at=None) | Q(observed_at__lte=asked_at), pk=target.pk, generation=ours
    ).update(**{field: getattr(target, field) for field in NOTED})


def _close(waiting: Collection[Change]) -> None:
    """Those that all have heard of by now. Those that somebody misses stay open."""
    if not waiting:
        return
    now = timezone.now()
    heard = {
        (kind, target.name): target.observed_change if target.observed_generation else 0
        for kind in Kind.values
        for target in Target.objects.filter(
            kind=kind, generation__gt=0, name__in=_joined(kind).values("name")
        ).defer("secret", "digest")
    }
    done = [
        change.pk
        for change in waiting
        if all(number >= change.pk for one, number in heard.items() if change.concerns(*one))
    ]
    Change.objects.filter(pk__in=done, applied_at=None).update(applied_at=now)


def _forget_who_is_gone() -> None:
    for kind in Kind.values:
        names = list(_joined(kind).values_list("name", flat=True))
        Target.objects.filter(kind=kind, generation__gt=0).exclude(name__in=names).delete()


def forget_old_changes(now: datetime) -> int:
    """Whoever was away for longer is told what is intended now, as ever."""
    deleted, _ = Change.objects.filter(at__lt=now - KEPT).delete()
    return deleted


# The fleet


def _joined(kind: str) -> QuerySet[Driver] | QuerySet[Node]:
    model = Driver if kind == Kind.DRIVER else Node
    return model.objects.filter(joined_at__isnull=False)


def _endpoints(kind: str, names: Collection[str] | None) -> Mapping[str, Endpoint | None]:
    """Who has joined, and where it is told; None for whom nothing is heard of."""
    found = _joined(kind) if names is None else _joined(kind).filter(name__in=names)
    return {
        one.name: None if _is_silent(one) else Endpoint(one.control_url, str(one.control_token))
        for one in found
    }


def _is_silent(one: Driver | Node) -> bool:
    return one.lost_at is not None if isinstance(one, Driver) else one.state == "lost"
