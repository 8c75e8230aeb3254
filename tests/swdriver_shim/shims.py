"""Documents for a shim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from swdriver_shim.desired import Desired, HomeSpec, OrgSpec
from swdriver_shim.policy import OrgPolicies, Policy
from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.plane import SECRET as DRIVER_SECRET
from tests.swdriver_shim.prompts import LAYOUT, MODEL, SECRET


def document(
    place: Path, policies: Mapping[str, Policy], *, generation: int = 1, secret: bytes = SECRET
) -> bytes:
    """What tells a driver to be as those of these tests, at the agent that listens at this place."""
    homes = tuple(
        HomeSpec(group=one.name, index=index, address=f"unix:{place}", shard=f"{at}.{index}")
        for at, one in enumerate(LAYOUT.groups)
        for index in range(one.shards)
    )
    orgs = tuple(
        OrgSpec(name=name, secret=secret, policies=OrgPolicies(policy=policy))
        for name, policy in policies.items()
    )
    told = Desired(
        generation=generation,
        driver=DRIVER,
        secret=DRIVER_SECRET,
        model=MODEL,
        homes=homes,
        orgs=orgs,
    )
    return msgspec.json.encode(told)
