"""What agents are told of orgs: how much of tier 2 each may fill, and for how long files may lie there
that nobody asks for. They know an org by its tag, and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.control.services import addition
from console.orgs.models import Org
from console.policies.epochs import tags_by_org
from console.policies.services import in_force_of
from console.policies.terms import terms


@addition("node", "orgs")
def tags() -> Mapping[str, Any]:
    """Of all orgs, as they are now: whatever carries another one is nobody's any more."""
    orgs = list(Org.objects.order_by("slug"))
    return {"tags": sorted(tag for _, tags in tags_by_org(orgs) for tag in tags)}


@addition("node", "retiring")
@addition("node", "tier2")
def of_orgs() -> Mapping[str, Any]:
    orgs = list(Org.objects.order_by("slug"))
    tags = {org.pk: tags for org, tags in tags_by_org(orgs)}
    told = {tag: terms(held.policies) for held in in_force_of(orgs) for tag in tags[held.org.pk]}
    return {
        "org_caps": {tag: one.bytes_max for tag, one in told.items() if one.bytes_max is not None},
        "org_ttl_seconds": {
            tag: one.seconds_max for tag, one in told.items() if one.seconds_max is not None
        },
    }
