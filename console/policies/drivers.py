"""What drivers are told of orgs: the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.control.services import common_part
from console.orgs.models import Org
from console.policies.models import Caller, OrgKeys
from console.policies.services import in_force_of
from swdriver_shim.desired import OrgSpec


@common_part("driver")
def orgs() -> Mapping[str, Any]:
    """Every org: how its keys are made, what it wants as far as that is allowed, who asks for it."""
    found = list(Org.objects.order_by("slug"))
    keys = keys_of(found)
    callers: dict[int, list[str]] = {}
    for org_id, token in Caller.objects.order_by("token_sha256").values_list("org_id", "token_sha256"):
        callers.setdefault(org_id, []).append(token)
    specs = [
        OrgSpec(
            name=held.org.slug,
            secret=bytes(keys[held.org.pk].secret),
            policies=held.policies,
            data_key=bytes(keys[held.org.pk].data_key) or None,
            tokens=tuple(callers.get(held.org.pk, ())),
            secrets=_secrets(keys[held.org.pk]),
        )
        for held in in_force_of(found)
    ]
    return {"orgs": specs}


def _secrets(keys: OrgKeys) -> dict[str, bytes]:
    from console.policies.epochs import secrets_of  # which asks us for keys

    return secrets_of(keys)


def keys_of(orgs: list[Org]) -> dict[int, OrgKeys]:
    """By org. Those that have none yet get theirs."""
    known = {keys.org_id: keys for keys in OrgKeys.objects.filter(org__in=orgs)}
    without = [org for org in orgs if org.pk not in known]
    if without:
        OrgKeys.objects.bulk_create([OrgKeys(org=org) for org in without], ignore_conflicts=True)
        known |= {keys.org_id: keys for keys in OrgKeys.objects.filter(org__in=without)}
    return known
