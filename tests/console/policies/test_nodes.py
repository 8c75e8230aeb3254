"""What agents are told of orgs: by tag, how much of tier 2, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from console.control import documents
from console.control.documents import Compiler
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import services
from console.policies.org_keys import keys_of
from console.policies.tier2_limits import Tier2Limits, tier2_limits_of
from kvss_agent.desired import parse
from kvss_agent.tier2.settings import Tier2Settings
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.conftest import People

GIB = 1 << 30


def kept(**fields: Any) -> Policy:
    return Policy(tiers=Tiers.TIER2, **fields)


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        (OrgPolicies(policy=kept(tier2_bytes_max=GIB)), Tier2Limits(GIB, 3600)),
        (OrgPolicies(policy=kept(ttl_first_use_seconds=60)), Tier2Limits(None, 60)),
        (OrgPolicies(policy=kept(ttl_last_use_seconds=None)), Tier2Limits(None, None)),
        # Who may not be there at all has room for nothing, and what is left goes in its time.
        (OrgPolicies(policy=Policy(ttl_last_use_seconds=600)), Tier2Limits(0, 600)),
        # An agent does not tell models apart: each has its room, and the longest time holds.
        (
            OrgPolicies(
                policy=Policy(), models={"llama": kept(tier2_bytes_max=5, ttl_last_use_seconds=7)}
            ),
            Tier2Limits(5, 7),
        ),
        (
            OrgPolicies(
                policy=kept(tier2_bytes_max=GIB),
                models={"llama": kept(tier2_bytes_max=5, ttl_last_use_seconds=7200)},
            ),
            Tier2Limits(GIB + 5, 7200),
        ),
        (
            OrgPolicies(policy=kept(tier2_bytes_max=GIB), models={"llama": kept()}),
            Tier2Limits(None, 3600),
        ),
    ],
    ids=str,
)
def test_policies_come_to_one_figure_for_an_org(policies: OrgPolicies, expected: Tier2Limits) -> None:
    assert tier2_limits_of(policies) == expected


@pytest.mark.django_db
def test_agents_with_a_tier_2_are_told_and_others_are_not(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = people.principal("org_admin")
    with transaction.atomic():
        wanted = OrgPolicies(policy=kept(tier2_bytes_max=GIB, ttl_last_use_seconds=600))
        services.set_policy(admin, orgs.for_change(admin, "acme"), wanted, reason="asked for")
    acme = Org.objects.get(slug="acme")
    tag = isolation_tag("acme", bytes(keys_of([acme])[acme.pk].secret))

    def shards(name: str) -> dict[str, Any]:
        there = {"tier2": {"kind": "posix", "path": "/kv", "cap_bytes": 10 * GIB}}
        return {"shards": [], "peers": [], **(there if name == "with" else {})}

    monkeypatch.setitem(documents._parts, "node", [shards])
    monkeypatch.setitem(documents._of_rounds, "node", [])
    compiler = Compiler("node")
    told = parse(compiler.compile("with", {}).of_generation(1)).tier2
    assert isinstance(told, Tier2Settings)
    assert told.path == "/kv"
    assert told.caps().of(tag) == GIB
    assert told.limits().of(tag) == 600
    assert parse(compiler.compile("without", {}).of_generation(1)).tier2 is None


@pytest.mark.django_db
def test_agents_hear_of_what_concerns_them_only(people: People) -> None:
    from console.control.models import Change

    admin = people.principal("org_admin")
    for policy, concerns in ((Policy(share=7), False), (Policy(share=7, ttl_last_use_seconds=60), True)):
        Change.objects.all().delete()
        with transaction.atomic():
            org = orgs.for_change(admin, "acme")
            services.set_policy(admin, org, OrgPolicies(policy=policy), reason="asked for")
        assert Change.objects.filter(targets=[["node", "*"]]).exists() == concerns
