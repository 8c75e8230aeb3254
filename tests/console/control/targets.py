"""Targets of desired documents."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from console.control.models import Change, Target
from console.orgs import services as orgs
from console.policies import services as policies
from swdriver_shim.policy import OrgPolicies, Policy
from tests.conftest import People


def save(people: People, **policy: Any) -> Change:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        wanted = OrgPolicies(policy=Policy(**policy))
        held = policies.set_policy(people.principal("org_admin"), org, wanted, reason="asked for")
    assert held.version
    assert held.version.change
    return held.version.change


def target(name: str) -> Target:
    return Target.objects.get(kind="driver", name=name)
