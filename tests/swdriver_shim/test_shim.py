"""A driver that follows documents, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from swdriver_shim.daemon.shim import Shim
from swdriver_shim.desired import Desired, GroupSpec, HomeSpec, ModelSpec, OrgSpec
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import OrgPolicies, Policy
from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.plane import SECRET as DRIVER_SECRET
from tests.swdriver_shim.prompts import NAMESPACE, SECRET
from tests.swdriver_shim.test_driver import LAYOUT


def document(
    place: Path, policies: Mapping[str, Policy], *, generation: int = 1, secret: bytes = SECRET
) -> bytes:
    """What tells a driver to be as those of these tests, at the agent that listens at this place."""
    model = ModelSpec(
        name=NAMESPACE.model,
        revision=NAMESPACE.revision,
        kv_dtype=NAMESPACE.kv_dtype,
        layout=NAMESPACE.layout,
        groups=tuple(
            GroupSpec(name=one.name, bytes_per_token=one.bytes_per_token, window=one.window)
            for one in LAYOUT.groups
        ),
    )
    homes = tuple(
        HomeSpec(group=one.name, index=index, address=f"unix:{place}", shard=f"{at}.{index}")
        for at, one in enumerate(LAYOUT.groups)
        for index in range(len(one.bytes_per_token))
    )
    orgs = tuple(
        OrgSpec(name=name, secret=secret, policies=OrgPolicies(policy=policy))
        for name, policy in policies.items()
    )
    told = Desired(
        generation=generation,
        driver=DRIVER,
        secret=DRIVER_SECRET,
        model=model,
        homes=homes,
        orgs=orgs,
    )
    return msgspec.json.encode(told)


def test_a_request_that_is_late_does_not_bring_an_old_secret_back(tmp_path: Path) -> None:
    shim, nowhere, other = Shim("late", None), tmp_path / "nobody.sock", SECRET[::-1]
    orgs = {"acme": Policy()}
    try:
        [before] = shim.set_desired(document(nowhere, orgs)).orgs
        [now] = shim.set_desired(document(nowhere, orgs, generation=2, secret=other)).orgs
        assert shim.keys(before).tag == isolation_tag("acme", SECRET), "who came before that"
        assert shim.keys(now).tag == isolation_tag("acme", other)
    finally:
        shim.stop()
