"""Purging an org, or what it keeps of one model: an operation that ends with a receipt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import httpx
import msgspec
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import record
from console.control.sending import NO_SENSE, Call, Endpoint, ask_all, refusal
from console.control.services import ALL_DRIVERS, changed
from console.fleet.models import Driver, Node
from console.operations import services as operations
from console.operations.core import Done, Outcome, Waiting
from console.operations.machines import Machine, Step, machine
from console.operations.models import Operation
from console.orgs.models import Org
from console.policies.drivers import keys_of
from console.policies.models import PurgeReceipt, new_data_key
from console.policies.reach import own_drivers
from console.policies.services import check_reason
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import isolation_tag
from telemetry.topics import of_org

PATIENCE: Final = timedelta(hours=2)  # for who is away; then a person has to look
SECONDS: Final = 2.0  # that a driver may take for one answer; it goes on by itself
TIMEOUT: Final = httpx.Timeout(SECONDS + 5, connect=2.0)
# A driver is not told of that org, or of none yet; an agent has no tier 2.
KEEPS_NOTHING: Final = (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT)
NOT_OWN: Final = "drivers of other sessions"
_COUNTS: Final = ("columns", "bytes", "tier2_files", "tier2_bytes")


@transaction.atomic
def purge(principal: Principal, org: Org, *, model: str = "", reason: str) -> Operation:
    """Begin to remove all of an org that came from `for_change`, or what drivers of a model keep of it.

    Raises operations.Busy while another purge of it goes on; ValidationError without a reason, or for a
    model that no driver serves.
    """
    check_reason(reason)
    if model and not _of_model(Driver.objects.all(), model):
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
    """Who is asked, and what. `shown`: what the org's people read instead of a name that is none of
    their business."""

    name: str
    call: Call
    shown: str = ""


def receipts_of(org: Org) -> QuerySet[PurgeReceipt]:
    """The newest first; not those of an org that had its slug before."""
    return PurgeReceipt.objects.filter(org_slug=org.slug, asked_at__gte=org.created_at)


def _data_key(operation: Operation) -> Outcome:
    """Whoever can't be reached, and whatever was copied elsewhere: what is encrypted is noise now."""
    org = Org.objects.filter(slug=operation.plan["org"]).first()
    if operation.plan["model"] or org is None:
        return Done("Only a purge of all models destroys the data key that they share.")
    keys = keys_of([org])[org.pk]
    keys.data_key = new_data_key()
    keys.save(update_fields=["data_key"])
    changed([ALL_DRIVERS], f"data key of {org.slug}: {operation.plan['reason']}")
    operation.notes["data_key_destroyed_at"] = timezone.now().isoformat()
    return Done("Files that were encrypted can't be read any more.")


def _drivers(operation: Operation) -> Outcome:
    joined = Driver.objects.filter(joined_at__isnull=False).order_by("name")
    body = {"org": operation.plan["org"], "seconds": SECONDS}
    own = own_drivers(operation.plan["org"])
    places = [
        _Place(one.name, _call(one, "/v1/purge_org", body), "" if one.name in own else NOT_OWN)
        for one in _of_model(joined, operation.plan["model"])
    ]
    return _asked(operation, "drivers", places)


def _agents(operation: Operation) -> Outcome:
    """Files that no driver of now knows: where its shards were once, or of models that nobody runs."""
    org = Org.objects.filter(slug=operation.plan["org"]).first()
    if org is None:
        return Done("The org is gone, and with it the key that names its files.")
    tag = isolation_tag(org.slug, bytes(keys_of([org])[org.pk].secret)).hex()
    bodies = [{"tag": tag}]
    if operation.plan["model"]:
        bodies = [{"tag": tag, "namespace": one} for one in _namespaces(operation.plan["model"])]
    joined = Node.objects.filter(joined_at__isnull=False).order_by("name")
    places = [
        _Place(
            " ".join([one.name, *([body["namespace"]] if len(bodies) > 1 else [])]),
            _call(one, "/v1/purge", body),
        )
        for one in joined
        for body in bodies
    ]
    return _asked(operation, "nodes", places)


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
    """Ask those who have not confirmed yet. What they tell is added up: each has removed it once."""
    told: dict[str, Any] = operation.notes.setdefault(kind, {})
    left = [place for place in places if not told.get(place.name, {}).get("done")]
    answers = ask_all([place.call for place in left], TIMEOUT)
    for place, answer in zip(left, map(_told, answers), strict=True):
        before = told.get(place.name, {})
        counts = {name: before.get(name, 0) + answer.get(name, 0) for name in _COUNTS}
        told[place.name] = {**answer, **counts}
    waiting = [place for place in left if not told[place.name]["done"]]
    if not waiting:
        return Done(f"{len(places)} {kind} have confirmed.")
    names = ", ".join(dict.fromkeys(place.shown or place.name for place in waiting))
    why = told[waiting[0].name].get("problem", "it is not done yet")
    return Waiting(f"{names[:200]}: {why}", 1 - len(waiting) / len(places))


def _call(one: Driver | Node, path: str, body: Mapping[str, Any]) -> Call:
    endpoint = Endpoint(one.control_url, str(one.control_token))
    return Call(endpoint, "POST", path, msgspec.json.encode(body))


def _told(answer: httpx.Response | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"done": False, "problem": answer}
    if answer.status_code in KEEPS_NOTHING:
        return {"done": True}
    if not answer.is_success:
        return {"done": False, "problem": refusal(answer)}
    try:
        return _confirmed(answer.json())
    except (ValueError, KeyError, TypeError):
        return {"done": False, "problem": NO_SENSE}


def _confirmed(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A driver's receipt, or an agent's, whose files are all that it counts."""
    if "confirmed" in receipt:
        seconds = {name: round(at, 3) for name, at in receipt["confirmed"].items()}
        counts = {name: receipt[name] for name in _COUNTS}
        return {"done": receipt["done"], **counts, "confirmed_seconds": seconds}
    return {"done": True, "tier2_files": receipt["columns"], "tier2_bytes": receipt["bytes"]}


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
        reason=operation.plan["reason"],
        at=timezone.now(),
        columns=sums["columns"],
        bytes=sums["bytes"],
        files=sums["tier2_files"],
        file_bytes=sums["tier2_bytes"],
        places={**places, "drivers": _own(places["drivers"], own_drivers(operation.plan["org"]))},
    )
    return Done(f"{sums['columns']:,} columns and {sums['tier2_files']:,} files are gone.")


def _own(told: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """A receipt is the org's: it names the drivers of its own sessions, and counts the others."""
    named = {name: one for name, one in told.items() if name in own}
    others = [one for name, one in told.items() if name not in own]
    if others:
        sums = {name: sum(one.get(name, 0) for one in others) for name in _COUNTS}
        named[NOT_OWN] = {"done": True, "drivers": len(others), **sums}
    return named


@machine("org.purge")
class Purge(Machine):
    """What is gone can't come back, so there is no way back: who can't be reached is waited for."""

    steps = (
        Step("data_key", "Destroy the data key", _data_key, final=True),
        Step("drivers", "Purge memory and tier 2, by driver", _drivers, patience=PATIENCE, final=True),
        Step("nodes", "Purge files that no driver knows", _agents, patience=PATIENCE, final=True),
        Step("receipt", "Write the receipt", _receipt, final=True),
    )

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        return PurgeReceipt.objects.get(operation_id=operation.pk).statement()
