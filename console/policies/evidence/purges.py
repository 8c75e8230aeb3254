"""Purging an org, or what it keeps of one model: an operation that ends with a receipt.

It begins a new epoch of the org, see `epochs`, and then has every driver and every agent remove what is
of before, and every brain forget it. Each confirms with a statement that it has signed
(`kvss_agent.security.confirmations`). All else, a status, a body, silence, is "not confirmed": it is
shown with its reason, and asked again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.control.models import Kind
from console.fleet.models import Driver, Removed
from console.operations import services as operations
from console.operations.core import Done, Failed, Outcome
from console.operations.machines import Step, machine
from console.operations.models import Operation
from console.orgs.models import Org
from console.policies import org_keys
from console.policies.evidence.confirmations import (
    PATIENCE,
    ask,
    note_key_holders,
    of_agents,
    of_brains,
    of_drivers,
    removed_of,
)
from console.policies.evidence.receipts import Removal, summary, write
from console.policies.rollout import own_drivers
from console.policies.services import check_reason
from console.sessions.driver_orgs import drivers_told
from console.visibility import sees_fleet
from kvss_agent.security.confirmations import SCOPES_MAX, Scope
from swdriver_shim.desired import ModelSpec
from telemetry.topics import of_org

TOO_MANY: Final = (
    "Earlier purges of this org have not been confirmed by all yet. See their operations, and bring "
    "back who is missing."
)


@transaction.atomic
def purge(principal: Principal, org: Org, *, model: str = "", reason: str) -> Operation:
    """Begin to remove all of an org that came from `for_change`, or what drivers of a model keep of it.

    Raises operations.Busy while another purge of it goes on; ValidationError without a reason, or, for
    who sees the fleet, for a model that no driver has ever served.
    """
    check_reason(reason)
    # Which models others run is not an org's to know, and so a purge of one is begun in any case.
    if model and sees_fleet(principal) and not _namespaces(model):
        raise ValidationError({"model": ["No driver has ever served that model."]})
    what = f"everything stored for {org.name}"
    record(
        principal,
        "org.purge",
        Subject.of("org", org.slug, org.name, org),
        after={"purged": model or "all models"},
        reason=reason,
    )
    return operations.start(
        principal,
        "org.purge",
        of_org(org.slug),
        f"Purge {what}, of model {model}" if model else f"Purge {what}",
        plan={"org": org.slug, "model": model, "reason": reason},
        org_id=org.pk,
        role=Role.ORG_ADMIN,
    )


def _of_model(drivers: Collection[Driver], model: str) -> list[Driver]:
    return [driver for driver in drivers if not model or driver.model_name == model]


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
    since = org_keys.keys_of([org])[org.pk].data_key_since
    keys = org_keys.begin(org, operation.plan["reason"], model=model, namespaces=namespaces)
    scopes = org_keys.retired(keys)
    if len(scopes) > SCOPES_MAX:
        return Failed("TooMany", TOO_MANY)
    operation.notes["org_id"], operation.notes["epoch"] = org.pk, keys.epoch
    operation.notes["key_since"] = since.isoformat()
    operation.notes["scopes"] = [[scope.tag, scope.namespace] for scope in scopes]
    return Done(f"Epoch {keys.epoch}. Nothing of before can be found any more.")


def _drivers(operation: Operation) -> Outcome:
    """All that ever served the org; of one model, those that serve that."""
    if begun := _begun_before(operation):
        return begun
    slug, model = operation.plan["org"], operation.plan["model"]
    org = Org.objects.filter(slug=slug).first()
    drivers = drivers_told(org) if org else Driver.objects.all()  # it was deleted meanwhile
    outcome = ask(operation, "drivers", of_drivers(_of_model(drivers, model), own_drivers(slug)))
    if isinstance(outcome, Done) and not model and operation.notes["scopes"]:
        note_key_holders(operation)
        if not removed_of(operation, Kind.DRIVER):
            operation.notes["data_key_destroyed_at"] = timezone.now().isoformat()
    return outcome


def _agents(operation: Operation) -> Outcome:
    """Files and memory that no driver of now knows of: where its shards were once, or of models that
    nobody runs."""
    return _begun_before(operation) or ask(operation, "nodes", of_agents())


def _brains(operation: Operation) -> Outcome:
    """They store nothing of anybody, but know which columns there were."""
    return _begun_before(operation) or ask(operation, "brains", of_brains())


def _begun_before(operation: Operation) -> Failed | None:
    """The epoch of a purge that an earlier version began, which had none."""
    if "scopes" in operation.notes:
        return None
    begun = _epoch(operation)
    return begun if isinstance(begun, Failed) else None


def _receipt(operation: Operation) -> Outcome:
    receipt = write(operation)
    if "org_id" in operation.notes:
        org_keys.confirmed(operation.notes["org_id"], [Scope(*one) for one in operation.notes["scopes"]])
    return Done(summary(receipt))


def _namespaces(model: str) -> list[str]:
    """In which files of a model lie: of each of its revisions and types that a driver serves, or has
    served before it was removed."""
    of_removed = Removed.objects.filter(kind=Kind.DRIVER, model__name=model)
    told = [driver.model for driver in _of_model(Driver.objects.all(), model)]
    found = set()
    for one in [*told, *of_removed.values_list("model", flat=True).distinct()]:
        try:
            found.add(msgspec.convert(one, ModelSpec).namespace().digest().hex())
        except msgspec.ValidationError:
            continue  # who tells nonsense of its model has never had a shard
    return sorted(found)


@machine("org.purge")
class Purge(Removal):
    steps = (
        Step("epoch", "Start a new epoch", _epoch, final=True),
        Step("drivers", "Drivers remove it, and confirm", _drivers, patience=PATIENCE, final=True),
        Step("nodes", "Nodes remove what is left, and confirm", _agents, patience=PATIENCE, final=True),
        Step("brains", "Brains forget it, and confirm", _brains, patience=PATIENCE, final=True),
        Step("receipt", "Write the receipt", _receipt, final=True),
    )
