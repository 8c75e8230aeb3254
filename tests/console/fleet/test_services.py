"""Who sees the fleet, who changes it, and what a change leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.http import Http404
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.accounts.principal import Principal, Refused
from console.accounts.roles import Role
from console.audit import services as audit
from console.audit.models import AuditEntry
from console.fleet import nodes, services
from console.fleet.membership.versions import Fit, protocols_meet, skew
from console.fleet.models import Driver, Leaf, Nic, Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.placement.topology import State
from console.sessions.changes import drains
from telemetry.models import Event
from tests.conftest import People
from tests.console.fleet.worlds import World, refreshed


def cordon(principal: Principal, state: State = State.CORDONED, reason: str = "") -> Node:
    with transaction.atomic():
        node = services.for_change(principal, services.visible_nodes, "ax-1", Role.ON_CALL)
        return nodes.set_state(principal, node, state, reason=reason)


def test_the_fleet_is_for_who_has_a_role_on_the_platform(world: World, people: People) -> None:
    for name in ("stranger", "viewer", "org_admin"):
        with pytest.raises(Http404):
            services.visible_nodes(people.principal(name))
        with pytest.raises(Http404):
            cordon(people.principal(name))
    with pytest.raises(Refused, match="needs the role on-call on the platform; yours is viewer"):
        cordon(people.principal("platform_viewer"))
    assert services.visible_nodes(people.principal("platform_viewer")).count() == 2
    assert cordon(people.principal("platform_on_call")).state == "cordoned"


def test_labels_are_a_platform_admins_to_give(world: World, people: People, api_of: Any) -> None:
    def patch(user: Any, labels: dict[str, str], if_match: str = "*") -> Any:
        return api_of(user).patch(
            "/api/v1/nodes/ax-1",
            {"labels": labels},
            content_type="application/json",
            headers={"If-Match": if_match},
        )

    assert patch(people.platform_on_call, {"rack": "7"}).status_code == 403
    assert patch(people.platform_admin, {"rack": "7"}, '"99"').status_code == 412
    answer = patch(people.platform_admin, {"rack": "7"})
    assert (answer.status_code, answer.json()["labels"]) == (200, {"rack": "7"})
    assert answer["ETag"] == f'"{refreshed(world.here).version}"'
    assert patch(people.platform_admin, {"Rack!": "7"}).status_code == 409


def test_a_change_has_one_audit_row_one_event_and_a_way_back(world: World, people: People) -> None:
    on_call = people.principal("platform_on_call")
    cordon(on_call, reason="loud fan")
    cordon(on_call, reason="loud fan")
    entry = AuditEntry.objects.get(action="node.state")
    assert (entry.before, entry.after) == (
        {"state": "ready", "reason": "", "labels": {}},
        {"state": "cordoned", "reason": "loud fan", "labels": {}},
    )
    event = Event.objects.get(kind="node.state")
    assert (event.sentence, event.topics) == ("ax-1 is cordoned: loud fan.", ["node:ax-1", "fleet"])
    audit.undo(on_call, entry, "")
    assert refreshed(world.here).state == "ready"
    cordon(on_call, State.MAINTENANCE)
    latest = AuditEntry.objects.filter(action="node.state").latest("id")
    cordon(on_call, State.READY)
    with pytest.raises(audit.CannotUndo, match="ax-1 is ready by now"):
        audit.undo(on_call, latest, "")


def test_undo_of_a_cordon_leaves_the_cordon_that_somebody_else_made_since(
    world: World, people: People
) -> None:
    on_call = people.principal("platform_on_call")
    cordon(on_call, reason="loud fan")
    entry = AuditEntry.objects.get(action="node.state")
    cordon(on_call, State.READY)
    cordon(people.principal("platform_admin"), reason="smoke: do not use")
    with pytest.raises(audit.CannotUndo, match="ax-1 is cordoned for another reason by now"):
        audit.undo(on_call, entry, "")
    node = refreshed(world.here)
    assert (node.state, node.state_reason) == ("cordoned", "smoke: do not use")


def test_undo_of_a_cordon_works_while_the_node_is_lost(world: World, people: People) -> None:
    on_call = people.principal("platform_on_call")
    cordon(on_call, reason="loud fan")
    Node.objects.filter(pk=world.here.pk).update(
        state="lost", state_reason="", held_state="cordoned", held_reason="loud fan"
    )
    audit.undo(on_call, AuditEntry.objects.get(action="node.state"), "")
    assert refreshed(world.here).held_state == "ready"


def test_undo_that_would_change_nothing_says_so(world: World, people: People) -> None:
    on_call = people.principal("platform_on_call")
    cordon(on_call, reason="loud fan")
    cordon(on_call, reason="loud fan, ticket 7")
    entry = AuditEntry.objects.filter(action="node.state").latest("id")
    with pytest.raises(audit.CannotUndo, match="It is so already"):
        audit.undo(on_call, entry, "loud fan, ticket 7")


def test_while_a_node_is_drained_nobody_says_what_else_it_should_be(
    world: World, people: People
) -> None:
    on_call = people.principal("platform_on_call")
    drained = drains.drain(on_call, "ax-1")
    operations.advance(drained.pk)
    with pytest.raises(operations.Busy, match="“Drain ax-1” is not done yet"):
        cordon(on_call, State.READY)
    of_drain = AuditEntry.objects.filter(action="node.state").latest("id")
    with pytest.raises(audit.CannotUndo, match="“Drain ax-1” is not done yet"):
        audit.undo(people.principal("platform_admin"), of_drain, "")
    operations.cancel(on_call, drained.pk)
    while operations.advance(drained.pk):
        pass
    assert refreshed(world.here).state == "ready"
    assert cordon(on_call).state == "cordoned"


def test_nobody_decides_that_a_node_is_lost(world: World, people: People) -> None:
    with pytest.raises(Impossible, match="found out by the console"):
        cordon(people.principal("platform_admin"), State.LOST)


def test_no_maintenance_while_streams_run(
    world: World, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(kind: nodes.Kind, names: object) -> dict[str, int]:
        return {"ax-1": 2} if kind == "node" else {}

    monkeypatch.setattr(nodes, "_streams", [tell])
    with pytest.raises(Impossible, match="2 streams run on ax-1"):
        cordon(people.principal("platform_admin"), State.MAINTENANCE)
    monkeypatch.undo()
    assert cordon(people.principal("platform_admin"), State.MAINTENANCE).state == "maintenance"


FILTERS = {
    "": ["ax-1", "ax-2"],
    "?q=x-1": ["ax-1"],
    "?state=lost": [],
    "?state=ready": ["ax-1"],
    "?state=not+joined": ["ax-2"],
    "?stamp=east&leaf=leaf-2": ["ax-2"],
    "?stamp=west": [],
    "?label=rack": ["ax-1"],
    "?label=rack%3D7": ["ax-1"],
    "?label=rack%3D8": [],
}


@pytest.mark.parametrize("query", FILTERS)
def test_lists_are_filtered(
    query: str, world: World, people: People, api_of: Callable[..., Client]
) -> None:
    Node.objects.filter(name="ax-1").update(labels={"rack": "7"})
    found = api_of(people.platform_viewer).get(f"/api/v1/nodes{query}").json()["items"]
    assert [node["name"] for node in found] == FILTERS[query]


@pytest.mark.parametrize("what", ["nodes", "boxes", "leaves", "spine-links", "drivers"])
def test_a_list_asks_as_often_for_a_hundred_as_for_one(
    what: str,
    world: World,
    people: People,
    api_of: Callable[..., Client],
    django_assert_num_queries: Any,
) -> None:

    api = api_of(people.platform_viewer)
    Driver.objects.create(name="job-1")
    api.get(f"/api/v1/{what}")  # what is remembered of the token is written
    with CaptureQueriesContext(connection) as before:
        assert api.get(f"/api/v1/{what}").status_code == 200
    leaves = Leaf.objects.bulk_create(Leaf(name=f"l-{index}", stamp=world.stamp) for index in range(100))
    many = Node.objects.bulk_create(Node(name=f"n-{index}", stamp=world.stamp) for index in range(100))
    Nic.objects.bulk_create(
        Nic(node=node, leaf=leaf, name="eth0") for node, leaf in zip(many, leaves, strict=True)
    )
    Driver.objects.bulk_create(Driver(name=f"d-{index}") for index in range(100))
    with django_assert_num_queries(len(before)):
        assert api.get(f"/api/v1/{what}?limit=200").status_code == 200


@pytest.mark.parametrize(
    ("console", "process", "fit"),
    [
        ("0.3.1", "0.3.0", Fit.SAME),
        ("0.3.1", "tidegate 0.2.9", Fit.OLDER),
        ("0.3.1", "0.4.0", Fit.NEWER),
        ("0.3.1", "0.1.0", Fit.APART),
        ("0.3.1", "1.3.0", Fit.APART),
        ("0.3.1", "", Fit.SAME),
    ],
)
def test_which_versions_go_together(console: str, process: str, fit: Fit) -> None:
    found = skew(console, process)
    assert found.fit is fit
    assert bool(found.sentence) == (fit is not Fit.SAME)
    assert fit.works == (fit is not Fit.APART)


def test_protocols_meet_where_they_have_one_in_common() -> None:
    assert protocols_meet((1, 2), (2, 3))
    assert not protocols_meet((1, 2), (3, 4))
