"""Receipts: what was removed, by whom it was confirmed, and who never did."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from django.db.models import QuerySet
from django.utils import timezone

from console.control.models import Kind
from console.fleet.retired_stores import forgotten
from console.operations.machines import Machine
from console.operations.models import Operation
from console.orgs.models import Org
from console.policies.evidence.confirmations import COUNTS, NOT_OWN
from console.policies.models import PurgeReceipt
from console.policies.rollout import own_drivers
from console.sessions import driver_orgs
from telemetry.topics import of_source

# What confirms, as notes and receipts call it, and as which it reports.
KINDS: Final = {"drivers": "driver", "nodes": "agent", "brains": "brain"}


def receipts_of(org: Org) -> QuerySet[PurgeReceipt]:
    """The newest first; not those of an org that had its slug before."""
    return PurgeReceipt.objects.filter(org_slug=org.slug, asked_at__gte=org.created_at)


def write(operation: Operation) -> PurgeReceipt:
    """The receipt of an operation that all have confirmed, but for those who were removed."""
    places = {kind: operation.notes.get(kind, {}) for kind in KINDS}
    sums = {
        name: sum(one.get(name, 0) for told in places.values() for one in told.values())
        for name in COUNTS
    }
    destroyed = operation.notes.get("data_key_destroyed_at")
    own = own_drivers(operation.plan["org"])
    driver = operation.plan.get("driver", "")
    return PurgeReceipt.objects.create(
        org_slug=operation.plan["org"],
        model=operation.plan["model"],
        driver=driver if driver in own else driver and driver_orgs.NOT_OWN,
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
        places={**places, "drivers": _own(places["drivers"], own), **_unconfirmed(operation)},
    )


def summary(receipt: PurgeReceipt) -> str:
    return f"{receipt.columns:,} columns and {receipt.files:,} files were removed."


class Removal(Machine):
    """A machine whose last step writes a receipt. What is gone can't come back, so there is no way back:
    who can't be reached is waited for."""

    names_places = True

    @staticmethod
    def waits_for(operation: Operation) -> Collection[str]:
        """The topics of those who have not confirmed yet."""
        return [
            of_source(source, name)
            for kind, source in KINDS.items()
            for name, one in operation.notes.get(kind, {}).items()
            if not one["done"]
        ]

    @staticmethod
    def response(operation: Operation) -> dict[str, Any]:
        receipt = PurgeReceipt.objects.filter(operation_id=operation.pk).first()
        return receipt.statement() if receipt else {}


def _own(told: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """A receipt is the org's: it names the drivers of its own sessions, and counts the others."""
    named = {name: one for name, one in told.items() if name in own}
    others = [one for name, one in told.items() if name not in own]
    if others:
        sums = {name: sum(one.get(name, 0) for one in others) for name in COUNTS}
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
            **({"replaced": True} if one.get("replaced") else {}),
        }
        for one in gone
    ]
    return {"removed": told} if told else {}
