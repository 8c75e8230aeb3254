"""What orgs may ask of brains: reading, and the one way to change it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from django.db import transaction
from msgspec.structs import asdict

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo, Subject, record, undoable
from console.control.services import ALL_BRAINS, changed
from console.orgs.models import Org
from console.orgs.services import for_undo
from console.routing.models import OrgLimits
from inference_brain.desired import Limits
from telemetry.topics import of_org

DEFAULTS: Final = Limits()
NAMES: Final = Limits.__struct_fields__


@dataclass(frozen=True, slots=True)
class ActiveLimits:
    """What holds for an org. Version 0: nobody has ever said anything."""

    org: Org
    limits: Limits
    version: int


def limits_of(orgs: Collection[Org]) -> Mapping[int, ActiveLimits]:
    """By org."""
    rows = {row.org_id: row for row in OrgLimits.objects.filter(org__in=orgs)}
    return {org.pk: _of(org, rows.get(org.pk)) for org in orgs}


def active_limits(org: Org) -> ActiveLimits:
    return limits_of([org])[org.pk]


def _of(org: Org, row: OrgLimits | None) -> ActiveLimits:
    if row is None:
        return ActiveLimits(org, DEFAULTS, 0)
    return ActiveLimits(org, Limits(**{name: getattr(row, name) for name in NAMES}), row.version)


def check_may_set(principal: Principal) -> None:
    """Limits protect orgs from each other, so they are the platform's to set. Raises Refused."""
    principal.check_may_change(Role.PLATFORM_ADMIN)


@transaction.atomic
def set_limits(
    principal: Principal,
    org: Org,
    limits: Limits,
    *,
    reason: str = "",
) -> ActiveLimits:
    """Set the limits of an org that came from `orgs.services.for_change`. Brains are told after the
    commit. The same again changes nothing. Raises ValidationError, by field."""
    check_may_set(principal)
    before = active_limits(org)
    if limits == before.limits:
        return before
    row = OrgLimits.objects.filter(org=org).first()
    if row is None:
        row = OrgLimits(org=org)
    else:
        row.version += 1
    for name in NAMES:
        setattr(row, name, getattr(limits, name))
    why = f"limits of {org.slug}: {reason}"
    row.full_clean(exclude=["change"])
    row.change = changed([ALL_BRAINS], why, topic=of_org(org.slug))
    row.save()
    record(
        principal,
        "limits.set",
        Subject.of("limits", org.slug, org.name, org),
        before=asdict(before.limits),
        after=asdict(limits),
        reason=reason,
    )
    return _of(org, row)


@undoable("limits.set")
def _undo_limits(principal: Principal, entry: AuditEntry, reason: str) -> None:
    org = for_undo(principal, entry)
    if asdict(active_limits(org).limits) != entry.after:
        raise CannotUndo("The limits were changed again since. Undo the later change first.")
    set_limits(principal, org, msgspec.convert(entry.before, Limits), reason=reason)
