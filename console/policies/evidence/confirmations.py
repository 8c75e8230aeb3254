"""Asking drivers, agents and brains for the confirmation of a removal, and what counts as one.

Each confirms with a statement that it has signed (`kvss_agent.security.confirmations`). All else, a
status, a body, silence, is "not confirmed": it is noted with its reason, and asked again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import msgspec
from django.db.models import Q
from django.utils import timezone

from console.control.models import Kind, Target
from console.control.sending import Call, Endpoint, ask_all
from console.fleet.models import ALL_ORGS, Brain, Driver, Node, Removed, topic
from console.fleet.retired_stores import place_of
from console.operations.core import Done, Outcome, Waiting
from console.operations.models import Operation
from console.policies.models import PurgeConfirmation
from console.sessions.desired import shards_of_node, streams_of_driver
from kvss_agent.http.answers import Budget, Reply
from kvss_agent.security.confirmations import (
    NO_IDENTITY,
    AgentStatement,
    BrainStatement,
    DriverStatement,
    NotConfirmed,
    Question,
    Scope,
    Signed,
    opened,
)
from telemetry.decoder import Malformed, excerpt
from telemetry.topics import of_source

PATIENCE: Final = timedelta(hours=2)  # for who is away; then a person has to look
SECONDS: Final = 2.0  # that a process may take for one answer; it goes on by itself
BUDGET: Final = Budget(SECONDS + 3)
COUNT_MAX: Final = 1 << 50  # beyond, a sum of them would fit no database
NOT_OWN: Final = "drivers of other sessions"
COUNTS: Final = ("columns", "bytes", "tier2_files", "tier2_bytes")
_PATH: Final = "/v1/purges"


@dataclass(frozen=True, slots=True)
class Place:
    """Who is asked. `lacks` says what a statement does not cover; nothing where that is all.

    `shown`: what the org's people read instead of a name that is none of their business.
    """

    one: Driver | Node | Brain
    identity: str
    kind: type[AgentStatement | DriverStatement | BrainStatement]
    lacks: Callable[[Any], str]
    shown: str = ""

    @property
    def name(self) -> str:
        return self.one.name


def of_drivers(drivers: Iterable[Driver], own: Collection[str]) -> list[Place]:
    """Those of them that were ever told anything. `own`: those that the org's people know by name."""
    told = set(_told(Kind.DRIVER))
    return [
        Place(
            one,
            of_source("driver", one.name),
            DriverStatement,
            partial(lacking_of_driver, streams_of_driver(one.name)),
            "" if one.name in own else NOT_OWN,
        )
        for one in sorted(drivers, key=lambda driver: driver.name)
        if one.joined_at is not None and one.name in told
    ]


def of_agents() -> list[Place]:
    """Of all agents that were ever told anything."""
    joined = Node.objects.filter(joined_at__isnull=False, name__in=_told(Kind.NODE)).order_by("name")
    return [
        Place(one, of_source("agent", one.name), AgentStatement, partial(_lacking_of_agent, one))
        for one in joined.prefetch_related("retiring_stores")
    ]


def of_brains() -> list[Place]:
    """Of all brains that were ever told anything: whichever models an org may use now, it may have used
    others."""
    joined = Brain.objects.filter(joined_at__isnull=False, name__in=_told(Kind.BRAIN)).order_by("name")
    return [Place(one, topic(one), BrainStatement, _nothing_lacks, "a brain") for one in joined]


def _nothing_lacks(_told: BrainStatement) -> str:
    """A brain speaks of the maps that it follows. One that it does not follow, it has nothing of."""
    return ""


def _told(kind: Kind) -> Iterable[str]:
    return Target.objects.filter(kind=kind, generation__gt=0).values_list("name", flat=True)


def lacking_of_driver(expected: Collection[tuple[str, int]], told: DriverStatement) -> str:
    missing = sorted(set(expected) - {(one.group, one.index) for one in told.shards})
    if not missing:
        return ""
    group, index = missing[0]
    return f"It does not speak of shard {group}.{index}, which it should have."


def _lacking_of_agent(node: Node, told: AgentStatement) -> str:
    said = node.declared.get("tier2")
    places = {store.place for store in node.retiring_stores.all()}
    places |= {place_of(said)} if said else set()
    if missing := sorted(places - {one.place for one in told.stores}):
        return f"It does not speak of the store {missing[0]}, which it should have."
    shards = shards_of_node(node) - {one.shard for one in told.memory}
    return f"It does not speak of shard {min(shards)}, which it should have." if shards else ""


def ask(operation: Operation, kind: str, places: Sequence[Place]) -> Outcome:
    """Ask those who have not confirmed yet. Only a statement that each has signed counts."""
    if not operation.notes["scopes"]:
        return Done("No process has to confirm.")
    told: dict[str, Any] = operation.notes.setdefault(kind, {})
    _let_go(operation, kind, told)
    left = [place for place in places if not told.get(place.name, {}).get("done")]
    questions = [_question(operation, place) for place in left]
    calls = [_call(place.one, question) for place, question in zip(left, questions, strict=True)]
    answers = ask_all(calls, BUDGET) if calls else []
    for place, question, answer in zip(left, questions, answers, strict=True):
        try:
            told[place.name] = _confirmed(place, question, answer)
        except NotConfirmed as reason:
            told[place.name] = {
                "done": False,
                "problem": excerpt(str(reason), 500),
                "asked_at": timezone.now().isoformat(),
            }
    waiting = [place for place in left if not told[place.name]["done"]]
    if not waiting:
        gone = len(removed_of(operation, kind.removesuffix("s")))
        others = f" {gone} were removed from the fleet before they did." if gone else ""
        return Done(f"{len(places)} {kind} have confirmed.{others}")
    names = ", ".join(dict.fromkeys(place.shown or place.name for place in waiting))
    why = told[waiting[0].name]["problem"]
    return Waiting(f"{names[:200]}: {why}", 1 - len(waiting) / len(places))


def _let_go(operation: Operation, kind: str, told: dict[str, Any]) -> None:
    """Nobody waits for who was removed from the fleet since it was asked, but it has confirmed nothing:
    the receipt says so. One that has joined under its name since is asked for itself."""
    asked = {
        name: datetime.fromisoformat(one["asked_at"]) for name, one in told.items() if not one["done"]
    }
    gone = Removed.objects.filter(kind=kind.removesuffix("s"), name__in=asked).order_by("removed_at")
    for one in gone:
        if one.name in told and one.removed_at >= asked[one.name]:
            del told[one.name]
            _note_removed(operation, one)


def _note_removed(operation: Operation, one: Removed) -> None:
    """For the receipt, each once."""
    noted: list[dict[str, Any]] = operation.notes.setdefault("removed", [])
    said = {
        "kind": one.kind,
        "name": one.name,
        "org": one.org_slug,
        "removed_at": one.removed_at.isoformat(),
        **({"replaced": True} if one.was_replaced else {}),
    }
    if said not in noted:
        noted.append(said)


def note_key_holders(operation: Operation) -> None:
    """Note the drivers that nobody can ask any more, and whose state directories may still have the data
    key that this purge has replaced: removed or replaced, before it began or since, without having
    confirmed that they have dropped it."""
    slug, since = operation.plan["org"], datetime.min.replace(tzinfo=UTC)
    if "key_since" in operation.notes:  # else an earlier version has begun it
        since = datetime.fromisoformat(operation.notes["key_since"])
    is_told = Q(orgs__isnull=True) | Q(orgs=ALL_ORGS) | Q(orgs__contains=[slug])
    had_it = Q(told_until=None, removed_at__gte=since) | Q(told_until__gte=since)
    gone = Removed.objects.filter(is_told, had_it, kind=Kind.DRIVER, erased_at=None)
    confirmed = PurgeConfirmation.objects.filter(operation_id=operation.pk).exclude(public_key="")
    for one in gone.exclude(public_key__in=confirmed.values("public_key")).order_by("removed_at"):
        _note_removed(operation, one)


def removed_of(operation: Operation, kind: str) -> list[dict[str, str]]:
    return [one for one in operation.notes.get("removed", ()) if one["kind"] == kind]


def _question(operation: Operation, place: Place) -> Question:
    return Question(
        operation=str(operation.pk),
        challenge=secrets.token_hex(16),
        epoch=operation.notes["epoch"],
        scopes=tuple(Scope(*one) for one in operation.notes["scopes"]),
        org="" if isinstance(place.one, Node) else operation.plan["org"],
        seconds=SECONDS,
        withdrawn=isinstance(place.one, Driver) and "driver" in operation.plan,
        idle=isinstance(place.one, Driver) and _is_idle(place.one),
    )


def _is_idle(driver: Driver) -> bool:
    """Whether its job has ended, for which reason no document is made of it."""
    return Target.objects.filter(kind=Kind.DRIVER, name=driver.name, is_idle=True).exists()


def _call(one: Driver | Node | Brain, question: Question) -> Call:
    endpoint = Endpoint.of(one)
    return Call(endpoint, "POST", _PATH, msgspec.json.encode(question))


def _confirmed(place: Place, question: Question, answer: Reply | str) -> dict[str, Any]:
    """What is noted of a confirmation. Raises NotConfirmed: whatever the status says, it takes a
    statement that this process has signed, on this question, and that covers all that it should."""
    if isinstance(answer, str):
        raise NotConfirmed(answer)
    if not place.one.public_key:  # it says that there is no such call, which helps nobody
        raise NotConfirmed(NO_IDENTITY)
    if answer.status_code == HTTPStatus.ACCEPTED:
        raise NotConfirmed(_detail(answer))
    if answer.status_code != HTTPStatus.OK:
        raise NotConfirmed(answer.refusal)
    statement = opened(answer.content, place.one.public_key, question, place.identity, place.kind)
    if lacking := place.lacks(statement):
        raise NotConfirmed(lacking)
    counts = _counts(statement)
    if max(counts.values()) >= COUNT_MAX:
        raise NotConfirmed("It counts more than there can be.")
    signed = answer.read(Signed)
    PurgeConfirmation.objects.create(
        operation_id=question.operation,
        identity=place.identity,
        payload=signed.payload,
        signature=signed.signature,
        public_key=place.one.public_key,
    )
    return {
        "done": True,
        "confirmed_at": timezone.now().isoformat(),
        **counts,
    }


def _detail(answer: Reply) -> str:
    try:
        return excerpt(answer.read(_NotYet).detail)
    except Malformed:
        return "The purge is still running."


class _NotYet(msgspec.Struct):
    detail: str


def _counts(told: AgentStatement | DriverStatement | BrainStatement) -> dict[str, int]:
    """A brain stores no columns: what it has forgotten counts for itself, and not among them."""
    if isinstance(told, BrainStatement):
        return {**dict.fromkeys(COUNTS, 0), "entries": sum(one.columns for one in told.maps)}
    if isinstance(told, DriverStatement):
        return dict(zip(COUNTS, (told.columns, told.bytes, told.files, told.file_bytes), strict=True))
    return {
        "columns": sum(one.columns for one in told.memory),
        "bytes": 0,
        "tier2_files": sum(one.files for one in told.stores),
        "tier2_bytes": sum(one.bytes for one in told.stores),
        "stores": len(told.stores),
    }
