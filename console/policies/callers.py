"""API keys of orgs: what clients show to brains, and engines to drivers, to ask in an org's name."""

from __future__ import annotations

import secrets

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404

from console.accounts.principal import Principal
from console.audit.services import Subject, record
from console.control.services import ALL_BRAINS, changed
from console.orgs.models import Org
from console.policies.models import Caller
from console.sessions import driver_orgs
from swdriver_shim.desired import token_hash

CALLERS_MAX = 100  # of an org


def callers_of(org: Org) -> QuerySet[Caller]:
    return Caller.objects.filter(org=org).order_by("name")


@transaction.atomic
def add_caller(principal: Principal, org: Org, *, name: str, reason: str = "") -> tuple[Caller, str]:
    """A key, and its text, which nobody can be shown again. `org` came from `for_change`."""
    if callers_of(org).count() >= CALLERS_MAX:
        raise ValidationError({"name": [f"At most {CALLERS_MAX}. Remove one that is not used."]})
    if callers_of(org).filter(name=name).exists():
        raise ValidationError({"name": [f"{org.name} has an API key of this name already."]})
    public_id = secrets.token_hex(6)
    token = f"tgc_{public_id}_{secrets.token_urlsafe(32)}"
    caller = Caller(
        org=org,
        name=name,
        public_id=public_id,
        token_sha256=token_hash(token),
        created_by=principal.name,
    )
    caller.full_clean()
    caller.save()
    _record(principal, caller, "policy.caller_add", after=True, reason=reason)
    return caller, token


@transaction.atomic
def remove_caller(principal: Principal, org: Org, public_id: str, *, reason: str = "") -> None:
    """Brains and drivers refuse it within seconds. `org` came from `for_change`. Http404 for no key."""
    caller = callers_of(org).filter(public_id=public_id).first()
    if caller is None:
        raise Http404(f"{org.name} has no such API key.")
    _record(principal, caller, "policy.caller_remove", after=False, reason=reason)
    caller.delete()


def _record(principal: Principal, caller: Caller, action: str, *, after: bool, reason: str) -> None:
    said = caller.snapshot()
    record(
        principal,
        action,
        Subject.of("caller", caller.prefix, caller.name, caller.org),
        before=None if after else said,
        after=said if after else None,
        reason=reason,
    )
    told = [*driver_orgs.addresses(caller.org), ALL_BRAINS]
    changed(told, f"API key {caller.name} of {caller.org.slug}")
