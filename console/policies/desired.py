"""The parts of desired documents that follow from policies: what drivers and agents are told of orgs.

Agents know an org only by its tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.control.services import addition, common_part
from console.orgs.models import Org
from console.policies.models import Caller
from console.policies.org_keys import keys_of, secrets_of, tags_by_org
from console.policies.services import active_policies
from console.policies.tier2_limits import tier2_limits_of
from swdriver_shim.desired import OrgSpec


@common_part("driver")
def orgs() -> Mapping[str, Any]:
    """Every org with its keys, its policies within the limits, and the tokens of its engines."""
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
            secrets=secrets_of(keys[held.org.pk]),
        )
        for held in active_policies(found)
    ]
    return {"orgs": specs}


@addition("node", "orgs")
def tags() -> Mapping[str, Any]:
    """The current tags of all orgs. What carries another tag belongs to no org and is deleted."""
    orgs = list(Org.objects.order_by("slug"))
    return {"tags": sorted(tag for _, tags in tags_by_org(orgs) for tag in tags)}


@addition("node", "retiring")
@addition("node", "tier2")
def tier2_limits() -> Mapping[str, Any]:
    """How much of tier 2 each org may fill, and for how long files without a request stay there."""
    orgs = list(Org.objects.order_by("slug"))
    tags = {org.pk: tags for org, tags in tags_by_org(orgs)}
    told = {
        tag: tier2_limits_of(held.policies)
        for held in active_policies(orgs)
        for tag in tags[held.org.pk]
    }
    return {
        "org_caps": {tag: one.bytes_max for tag, one in told.items() if one.bytes_max is not None},
        "org_ttl_seconds": {
            tag: one.seconds_max for tag, one in told.items() if one.seconds_max is not None
        },
    }
