"""Names of orgs, which may be given again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.orgs import services
from telemetry.events import note
from telemetry.topics import of_org
from tests.conftest import People


def test_who_gets_the_name_of_a_former_org_reads_none_of_its_events(
    people: People, api_of: Callable[..., Any]
) -> None:
    note("policy.update", [of_org("zed")], "A secret of the former zed.")
    zed = services.create_org(people.principal("platform_admin"), slug="zed", name="Zed")
    services.set_member(SYSTEM, zed, people.stranger.username, Role.ORG_ADMIN)
    note("policy.update", [of_org("zed")], "What the new one does.")
    told = api_of(people.stranger).get("/api/v1/events?topic=org:zed").json()["items"]
    sentences = [one["sentence"] for one in told]
    assert "What the new one does." in sentences
    assert not any("secret" in one for one in sentences)
