"""Purging an org, or what it keeps of one model: an operation that ends with a receipt.

It begins a new epoch of the org, see `epochs`, and then has every driver and every agent remove what is
of before. Each confirms with a statement that it has signed (`kvss_agent.security.confirmations`). All
else, a status, a body, silence, is "not confirmed": it is shown with its reason, and asked again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import msgspec
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import record
from console.control.models import Kind, Target
from console.control.sending import Call, Endpoint, ask_all, refusal
from console.fleet.models import Driver, Node, Removed
from console.fleet.retired_stores import forgotten, place_of
from console.operations import services as operations
from console.operations.core import Done, Failed, Outcome, Waiting
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation
from console.orgs.models import Org
from console.policies import org_keys
from console.policies.models import PurgeConfirmation, PurgeReceipt
from console.policies.rollout import own_drivers
from console.policies.services import check_reason
from console.sessions.desired import streams_of_driver, streams_of_node
from console.visibility import sees_fleet
from kvss_agent.http.exchange import Budget, Reply
from kvss_agent.security.confirmations import (
    NO_IDENTITY,
    SCOPES_MAX,
    AgentStatement,
    DriverStatement,
    NotConfirmed,
    Question,
    Scope,
    Signed,
    opened,
)
from swdriver_shim.desired import ModelSpec
from telemetry.decoder import Malformed, excerpt
from telemetry.topics import of_org, of_source

PATIENCE: Final = timedelta(hours=2)  # for who is away; then a person has to look
SECONDS: Final = 2.0  # that a process may take for one answer; it goes on by itself
BUDGET: Final = Budget(SECONDS + 3)
COUNT_MAX: Final = 1 << 50  # beyond, a sum of them would fit no database
NOT_OWN: Final = "drivers of other sessions"
OTHERS: Final = {
    "drivers": ("a driver of another session", NOT_OWN),
    "nodes": ("a node of the fleet", "nodes of the fleet"),
}
REMOVED: Final = {"driver": "a driver", "node": "a node", "store": "a store of a node"}
STANDINGS_MAX: Final = 200  # on a page
TOO_MANY: Final = (
    "Earlier purges of this org have not been confirmed by all yet. See their operations, and bring "
    "back who is missing."
)
_PATH: Final = "/v1/purges"
_COUNTS: Final = ("columns", "bytes", "tier2_files", "tier2_bytes")


@transaction.atomic
def purge(principal: Principal, org: Org, *, model: str = "", reason: str) -> Operation:
    """Begin to remove all of an org that came from `for_change`, or what drivers of a model keep of it.

    Raises operations.Busy while another purge of it goes on; ValidationError without a reason, or, for
    who sees the fleet, for a model that no driver serves.
    """
    check_reason(reason)
    # Which models others run is not an org's to know, and so a purge of one is begun in any case.
    if model and sees_fleet(principal) and not _of_model(Driver.objects.all(), model):
        raise ValidationError({"model": ["No driver serves that model."]})
    what = f"what {org.name} keeps of {model}" if model else f"all that {org.name} keeps"
    record(
        principal,
        "org.purge",
        object_type="org",
        object_id=org.slug,
        object_name=org.name,
        org_id=org.pk,
        after={"purged": model or "all models"},
        reason=reason,
        topics=[of_org(org.slug)],
    )
    return operations.start(
        principal,
        "org.purge",
        of_org(org.slug),
        f"Purge {what}",
        plan={"org": org.slug, "model": model, "reason": reason},
        org_id=org.pk,
        role=Role.ORG_ADMIN,
    )


def _of_model(drivers: Collection[Driver], model: str) -> list[Driver]:
    return [driver for driver in drivers if not model or (driver.model or {}).get("name") == model]


@dataclass(frozen=True, slots=True)
class _Place:
    """Who is asked. `lacks` says what a statement does not cover; nothing where that is all.

    `shown`: what the org's people read instead of a name that is none of their business.
    """

    one: Driver | Node
    identity: str
    kind: type[AgentStatement | DriverStatement]
    lacks: Callable[[Any], str]
    shown: str = ""

    @property
    def name(self) -> str:
        return self.one.name


def receipts_of(org: Org) -> QuerySet[PurgeReceipt]:
    """The newest first; not those of an org that had its slug before."""
    return PurgeReceipt.objects.filter(org_slug=org.slug, asked_at__gte=org.created_at)


def _epoch(operation: Operation) -> Outcome:
    """Whoever can't be reached, and whatever was copied elsewhere: what is of before has no name now,
    and what is encrypted is noise once drivers have dropped the key."""
    org = Org.objects.filter(slug=operation.plan["org"]).first()
    if org is None:
        operation.notes["scopes"] = []
        return Done("The org is gone: whatever carries its tags is nobody's, and is removed.")
    model = operation.plan["model"]
    namespaces = _namespaces(model) if model else []
    if model and not namespaces:
        operation.notes["scopes"] = []
        return Done("No driver has ever served that model, so nothing is kept of it.")
    keys = org_keys.begin(org, operation.plan["reason"], model=model, namespaces=namespaces)
    scopes = org_keys.retired(keys)
    if len(scopes) > SCOPES_MAX:
        return Failed("TooMany", TOO_MANY)
    operation.notes["org_id"], operation.notes["epoch"] = org.pk, keys.epoch
    operation.notes["scopes"] = [[scope.tag, scope.namespace] for scope in scopes]
    return Done(f"Epoch {keys.epoch}. Nothing of before can be found any more.")


def _drivers(operation: Operation) -> Outcome:
    """All that were ever told something; of one model, those that serve it."""
    told = Target.objects.filter(kind=Kind.DRIVER, generation__gt=0).values("name")
    joined = Driver.objects.filter(joined_at__isnull=False, name__in=told).order_by("name")
    own = own_drivers(operation.plan["org"])
    places = [
        _Place(
            one,
            of_source("driver", one.name),
            DriverStatement,
            partial(_lacking_of_driver, streams_of_driver(one.name)),
            "" if one.name in own else NOT_OWN,
        )
        for one in _of_model(joined, operation.plan["model"])
    ]
    outcome = _asked(operation, "drivers", places)
    # The state directory of one that was removed may still have the key.
    is_dropped = isinstance(outcome, Done) and not _removed(operation, Kind.DRIVER)
    if is_dropped and not operation.plan["model"]:
        operation.notes["data_key_destroyed_at"] = timezone.now().isoformat()
    return outcome


def _agents(operation: Operation) -> Outcome:
    """Files and memory that no driver of now knows of: where its shards were once, or of models that
    nobody runs."""
    told = Target.objects.filter(kind=Kind.NODE, generation__gt=0).values("name")
    joined = Node.objects.filter(joined_at__isnull=False, name__in=told).order_by("name")
    places = [
        _Place(one, of_source("agent", one.name), AgentStatement, partial(_lacking_of_agent, one))
        for one in joined.prefetch_related("retiring_stores")
    ]
    return _asked(operation, "nodes", places)


def _lacking_of_driver(expected: Collection[tuple[str, int]], told: DriverStatement) -> str:
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
    shards = streams_of_node(node) - {one.shard for one in told.memory}
    return f"It does not speak of shard {min(shards)}, which it should have." if shards else ""


def _namespaces(model: str) -> list[str]:
    """In which files of a model lie: of each of its revisions and types that a driver serves."""
    found = set()
    for driver in _of_model(Driver.objects.all(), model):
        try:
            found.add(msgspec.convert(driver.model, ModelSpec).namespace().digest().hex())
        except msgspec.ValidationError:
            continue  # who tells nonsense of its model has never had a shard
    return sorted(found)


def _asked(operation: Operation, kind: str, places: Sequence[_Place]) -> Outcome:
    """Ask those who have not confirmed yet. Only a statement that each has signed counts."""
    if "scopes" not in operation.notes:  # it was begun by an earlier version, which had no epochs
        begun = _epoch(operation)
        if isinstance(begun, Failed):
            return begun
    if not operation.notes["scopes"]:
        return Done("Nobody has to be asked.")
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
        gone = len(_removed(operation, kind.removesuffix("s")))
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
            operation.notes.setdefault("removed", []).append(
                {
                    "kind": one.kind,
                    "name": one.name,
                    "org": one.org_slug,
                    "removed_at": one.removed_at.isoformat(),
                }
            )


def _removed(operation: Operation, kind: str) -> list[dict[str, str]]:
    return [one for one in operation.notes.get("removed", ()) if one["kind"] == kind]


def _question(operation: Operation, place: _Place) -> Question:
    return Question(
        operation=str(operation.pk),
        challenge=secrets.token_hex(16),
        epoch=operation.notes["epoch"],
        scopes=tuple(Scope(*one) for one in operation.notes["scopes"]),
        org=operation.plan["org"] if isinstance(place.one, Driver) else "",
        seconds=SECONDS,
    )


def _call(one: Driver | Node, question: Question) -> Call:
    endpoint = Endpoint.of(one)
    return Call(endpoint, "POST", _PATH, msgspec.json.encode(question))


def _confirmed(place: _Place, question: Question, answer: Reply | str) -> dict[str, Any]:
    """What is noted of a confirmation. Raises NotConfirmed: whatever the status says, it takes a
    statement that this process has signed, on this question, and that covers all that it should."""
    if isinstance(answer, str):
        raise NotConfirmed(answer)
    if not place.one.public_key:  # it says that there is no such call, which helps nobody
        raise NotConfirmed(NO_IDENTITY)
    if answer.status_code == HTTPStatus.ACCEPTED:
        raise NotConfirmed(_detail(answer))
    if answer.status_code != HTTPStatus.OK:
        raise NotConfirmed(refusal(answer))
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


def _counts(told: AgentStatement | DriverStatement) -> dict[str, int]:
    if isinstance(told, DriverStatement):
        return dict(zip(_COUNTS, (told.columns, told.bytes, told.files, told.file_bytes), strict=True))
    return {
        "columns": sum(one.columns for one in told.memory),
        "bytes": 0,
        "tier2_files": sum(one.files for one in told.stores),
        "tier2_bytes": sum(one.bytes for one in told.stores),
        "stores": len(told.stores),
    }


def _receipt(operation: Operation) -> Outcome:
    places = {kind: operation.notes.get(kind, {}) for kind in ("drivers", "nodes")}
    sums = {
        name: sum(one.get(name, 0) for told in places.values() for one in told.values())
        for name in _COUNTS
    }
    destroyed = operation.notes.get("data_key_destroyed_at")
    PurgeReceipt.objects.create(
        org_slug=operation.plan["org"],
        model=operation.plan["model"],
        operation_id=operation.pk,
        asked_by=operation.actor_name,
        asked_at=operation.created_at,
        data_key_destroyed_at=datetime.fromisoformat(destroyed) if destroyed else None,
        epoch=operation.notes.get("epoch"),
        reason=operation.plan["reason"],
        at=timezone.now(),
        columns=sums["columns"],
        bytes=sums["bytes"],
        files=sums["tier2_files"],
        file_bytes=sums["tier2_bytes"],
        places={
            **places,
            "drivers": _own(places["drivers"], own_drivers(operation.plan["org"])),
            **_unconfirmed(operation),
        },
    )
    if "org_id" in operation.notes:
        org_keys.confirmed(operation.notes["org_id"], [Scope(*one) for one in operation.notes["scopes"]])
    return Done(f"{sums['columns']:,} columns and {sums['tier2_files']:,} files are gone.")


def _own(told: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """A receipt is the org's: it names the drivers of its own sessions, and counts the others."""
    named = {name: one for name, one in told.items() if name in own}
    others = [one for name, one in told.items() if name not in own]
    if others:
        sums = {name: sum(one.get(name, 0) for one in others) for name in _COUNTS}
        named[NOT_OWN] = {"done": True, "drivers": len(others), **sums}
    return named


def _unconfirmed(operation: Operation) -> dict[str, Any]:
    """Of who was removed before it confirmed, drivers of other sessions without their names; and stores
    of nodes that were removed, which nobody looks after."""
    gone = operation.notes.get("removed", ())
    own = operation.plan["org"]
    org = Org.objects.filter(slug=own).first()
    stores = forgotten(org.created_at if org else datetime.min.replace(tzinfo=UTC))
    told = [{"kind": "store", "name": name, "removed_at": at.isoformat()} for name, at in stores] + [
        {
            "kind": one["kind"],
            "name": "" if one["kind"] == Kind.DRIVER and one["org"] != own else one["name"],
            "removed_at": one["removed_at"],
        }
        for one in gone
    ]
    return {"removed": told} if told else {}


@machine("org.purge")
class Purge(Machine):
    """What is gone can't come back, so there is no way back: who can't be reached is waited for."""

    names_places = True

    steps = (
        Step("epoch", "Start a new epoch", _epoch, final=True),
        Step("drivers", "Drivers remove it, and confirm", _drivers, patience=PATIENCE, final=True),
        Step("nodes", "Nodes remove what is left, and confirm", _agents, patience=PATIENCE, final=True),
        Step("receipt", "Write the receipt", _receipt, final=True),
    )

    @staticmethod
    def waits_for(operation: Operation) -> Collection[str]:
        return [
            of_source(source, name)
            for kind, source in (("drivers", "driver"), ("nodes", "agent"))
            for name, one in operation.notes.get(kind, {}).items()
            if not one["done"]
        ]

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        return PurgeReceipt.objects.get(operation_id=operation.pk).statement()


def _named(removed: Mapping[str, str]) -> str:
    of = "store of node" if removed["kind"] == "store" else removed["kind"]
    return f"{of} {removed['name']}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether somebody has confirmed a purge, when, of how much, and why not. `name` is for whoever may
    know it: a driver of the org's own sessions, or all for people of the platform."""

    name: str
    done: bool
    at: datetime | None
    counts: Mapping[str, int]
    problem: str
    removed_at: datetime | None = None  # from the fleet, before it confirmed


def standings(places: Mapping[str, Any], own: Collection[str], *, is_staff: bool) -> list[Standing]:
    """Of a receipt's places, or of a running purge's notes; those that have not confirmed first."""
    found = [
        Standing(
            name=_named(one) if one["name"] and is_staff else REMOVED[one["kind"]],
            done=False,
            at=None,
            counts={},
            problem="",
            removed_at=datetime.fromisoformat(one["removed_at"]),
        )
        for one in places.get("removed", ())
    ]
    for kind in ("drivers", "nodes"):
        others: dict[bool, list[Mapping[str, Any]]] = {}
        for name, one in places.get(kind, {}).items():
            if name != NOT_OWN and (is_staff or (kind == "drivers" and name in own)):
                found.append(
                    _standing(f"{kind.removesuffix('s')} {name}", [one], one.get("problem", ""))
                )
            else:
                others.setdefault(bool(one.get("done")), []).append(one)
        found += [_standing(_unnamed(kind, ones), ones) for ones in others.values()]
    return sorted(found, key=lambda one: (one.done, one.name))[:STANDINGS_MAX]


def _unnamed(kind: str, ones: Collection[Mapping[str, Any]]) -> str:
    count = sum(one.get("drivers", 1) for one in ones)
    return OTHERS[kind][0] if count == 1 else f"{count} {OTHERS[kind][1]}"


def _standing(name: str, ones: Collection[Mapping[str, Any]], problem: str = "") -> Standing:
    """Of one, or of several that are like it and are not named."""
    confirmed = [one["confirmed_at"] for one in ones if one.get("confirmed_at")]
    return Standing(
        name=name,
        done=all(one.get("done") for one in ones),
        at=max(map(datetime.fromisoformat, confirmed), default=None),
        counts={count: sum(one.get(count, 0) for one in ones) for count in _COUNTS},
        problem=str(problem),
    )
