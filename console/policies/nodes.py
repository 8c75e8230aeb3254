"""What agents are told of orgs: how much of tier 2 each may fill, and for how long files may lie there
that nobody asks for. They know an org by its tag, and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.control.services import addition
from console.orgs.models import Org
from console.policies.drivers import keys_of
from console.policies.services import in_force_of
from console.policies.terms import terms
from swdriver_shim.keys import isolation_tag


@addition("node", "tier2")
def of_orgs() -> Mapping[str, Any]:
    orgs = list(Org.objects.order_by("slug"))
    keys = keys_of(orgs)
    told = {
        isolation_tag(held.org.slug, bytes(keys[held.org.pk].secret)).hex(): terms(held.policies)
        for held in in_force_of(orgs)
    }
    return {
        "org_caps": {tag: one.bytes_max for tag, one in told.items() if one.bytes_max is not None},
        "org_ttl_seconds": {
            tag: one.seconds_max for tag, one in told.items() if one.seconds_max is not None
        },
    }
