"""Jobs on real agents and real drivers: their shards are made, grow, shrink and move under them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import transaction

from console.accounts.roles import Role
from console.fleet.models import Node
from console.operations import services as operations
from console.operations.core import State
from console.placement.topology import Tier
from console.sessions import services
from console.sessions.changes import drains, moves
from console.sessions.models import Phase, Session
from telemetry.models import Event
from tests.conftest import People
from tests.console.sessions.planes import Plane, plane, push, run
from tests.console.sessions.requests import create, resize, shards, start_job
from tests.live import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def two_nodes(db: None, tmp_path: Path) -> Iterator[Plane]:
    with plane(tmp_path) as made:
        yield made


def test_a_job_gets_its_shards_and_they_grow_and_shrink_with_its_session(
    people: People, two_nodes: Plane
) -> None:
    run(create(people, boxes=2, bytes_per_token=512))
    driver = two_nodes.add_driver("job7")
    started = run(start_job(people, driver))
    assert started.state == State.SUCCEEDED, started.message
    observed = two_nodes.drivers["job7"].control("observed").json()
    assert [shard["state"] for shard in observed["shards"]] == ["here"] * 4
    before = {shard.name: shard.slots for shard in shards()}
    assert len(before) == 4
    assert {**two_nodes.slots("ax1"), **two_nodes.slots("ax2")} == before

    grown = run(resize(people, 4))
    assert grown.state == State.SUCCEEDED, grown.message
    larger = {shard.name: shard.slots for shard in shards()}
    assert all(2 * before[name] - 2 <= larger[name] for name in before)
    assert {**two_nodes.slots("ax1"), **two_nodes.slots("ax2")} == larger

    shrunk = run(resize(people, 2))
    assert shrunk.state == State.SUCCEEDED, shrunk.message
    assert {shard.name: shard.slots for shard in shards()} == before
    assert {**two_nodes.slots("ax1"), **two_nodes.slots("ax2")} == before


def test_a_shard_moves_and_the_former_node_gives_its_memory_back(
    people: People, two_nodes: Plane
) -> None:
    run(create(people, boxes=2, bytes_per_token=512))
    driver = two_nodes.add_driver("job7")
    run(start_job(people, driver))
    on_call = people.principal("platform_on_call")
    one = next(shard for shard in shards() if shard.node.name == "ax1")
    with transaction.atomic():
        session = services.for_change(on_call, "chat", at_least=Role.ON_CALL)
        moving = moves.move(on_call, session, one, Node.objects.get(name="ax2"))
    moved = run(moving)
    assert moved.state == State.SUCCEEDED, moved.message
    push()
    assert one.name not in two_nodes.slots("ax1")
    assert two_nodes.slots("ax2")[one.name] == one.slots
    seen = two_nodes.drivers["job7"].control("observed").json()["shards"]
    assert {shard["state"] for shard in seen} == {"here"}
    assert seen[one.index]["address"].endswith("ax2/data.sock")


def test_a_job_that_finds_no_driver_is_taken_back(people: People, two_nodes: Plane) -> None:
    run(create(people, boxes=2, bytes_per_token=512))
    driver = two_nodes.add_driver("job7")
    two_nodes.drivers["job7"].process.kill()
    starting = start_job(people, driver)
    for _ in range(3):
        operations.advance(starting.pk)
        push()
    operations.cancel(people.principal("platform_admin"), starting.pk)
    ended = run(starting)
    assert ended.state == State.CANCELLED
    push()
    assert shards() == []
    assert two_nodes.slots("ax1") == two_nodes.slots("ax2") == {}


def test_a_node_is_drained_and_used_again_while_the_job_goes_on(
    people: People, two_nodes: Plane
) -> None:
    run(create(people, boxes=2, bytes_per_token=512))
    run(start_job(people, two_nodes.add_driver("job7")))
    on_call = people.principal("platform_on_call")
    drained = run(drains.drain(on_call, "ax1"))
    assert drained.state == State.SUCCEEDED, drained.message
    push()
    assert Node.objects.get(name="ax1").state == "draining"
    assert {shard.node.name for shard in shards()} == {"ax2"}
    assert two_nodes.slots("ax1") == {}
    seen = two_nodes.drivers["job7"].control("observed").json()["shards"]
    assert [shard["state"] for shard in seen] == ["here"] * 4
    upgraded = drains.upgrade(on_call, "ax1", version="2.0")
    for _ in range(3):
        while operations.advance(upgraded.pk):
            pass
    upgraded.refresh_from_db()
    assert Node.objects.get(name="ax1").state == "maintenance"
    assert "Install 2.0 on ax1" in upgraded.message
    Node.objects.filter(name="ax1").update(software_version="2.0")
    assert run(upgraded).response == {"node": "ax1", "software_version": "2.0"}
    assert Node.objects.get(name="ax1").state == "ready"


def test_a_drain_that_finds_no_room_says_so_and_can_be_taken_back(
    people: People, two_nodes: Plane
) -> None:
    run(create(people, boxes=4, bytes_per_token=512))
    run(start_job(people, two_nodes.add_driver("job7")))
    Node.objects.filter(name="ax2").update(memory_bytes=1 << 12, shards_max=1)
    before = {shard.name: shard.node.name for shard in shards()}
    operation = drains.drain(people.principal("platform_on_call"), "ax1")
    for _ in range(5):
        operations.advance(operation.pk)
        push()
    operation.refresh_from_db()
    assert operation.state == State.RUNNING
    assert "has no node" in operation.message
    operations.cancel(people.principal("platform_on_call"), operation.pk)
    assert run(operation).state == State.CANCELLED
    assert Node.objects.get(name="ax1").state == "ready"
    assert {shard.name: shard.node.name for shard in shards()} == before


def test_streams_across_the_spine_warn_once_and_come_back_on_rails(
    people: People, db: None, tmp_path: Path
) -> None:
    with plane(tmp_path, nodes=0, boxes=2) as made:
        made.add_node("far", "l9")
        run(create(people, boxes=1, bytes_per_token=512))
        run(start_job(people, made.add_driver("job7")))
        assert {Tier(shard.tier) for shard in shards()} == {Tier.SPINE}
        warned = Event.objects.filter(kind="session.spine")
        assert warned.count() == 4
        made.add_node("near", "l1", "l2", "l3", "l4")
        on_call = people.principal("platform_on_call")
        with transaction.atomic():
            session = services.for_change(on_call, "chat", Role.ON_CALL)
            plan = moves.plan_rails(session)
            assert (plan.before.spine_wio - plan.after.spine_wio, len(plan.moves)) == (12, 4)
            moving = moves.restore_rails(on_call, session)
        moved = run(moving)
        assert moved.state == State.SUCCEEDED, moved.message
        assert {Tier(shard.tier) for shard in shards()} == {Tier.RAIL}
        assert warned.count() == 4
        homes = made.drivers["job7"].control("observed").json()["shards"]
        assert {home["address"] for home in homes} == {f"unix:{made.agents['near'].directory}/data.sock"}
        one = shards()[0]
        with transaction.atomic():
            session = services.for_change(on_call, "chat", Role.ON_CALL)
            moving = moves.move(on_call, session, one, Node.objects.get(name="far"))
        assert run(moving).state == State.SUCCEEDED
        newest = warned.latest("pk").sentence
        assert newest.startswith(f"{one.name} of chat crosses the spine")
        assert newest.endswith(": it was moved there by hand"), "rails had room"


def test_a_resize_and_a_move_that_are_cancelled_half_way_return_to_what_was(
    people: People, two_nodes: Plane
) -> None:
    """Promise 8: it reaches its goal, or returns to where it was."""
    admin = people.principal("platform_admin")
    run(create(people, boxes=1, bytes_per_token=512))
    run(start_job(people, two_nodes.add_driver("job7")))
    before = {shard.name: (shard.node.name, shard.slots) for shard in shards()}

    growing = resize(people, 2)
    operations.advance(growing.pk)  # it was placed with the request
    operations.advance(growing.pk)  # its shards begin to grow
    push()
    wait_until("a shard has grown", lambda: max(all_slots(two_nodes).values()) > largest(before))
    operations.advance(growing.pk)
    operations.cancel(admin, growing.pk)
    assert run(growing).state == State.CANCELLED
    push()
    assert {shard.name: (shard.node.name, shard.slots) for shard in shards()} == before
    wait_until(
        "agents have it as it was",
        lambda: all_slots(two_nodes) == {name: slots for name, (_, slots) in before.items()},
    )
    assert Session.objects.get().boxes_desired == 1

    one = shards()[0]
    other = "ax2" if one.node.name == "ax1" else "ax1"
    with transaction.atomic():
        session = services.for_change(admin, "chat")
        moving = moves.move(admin, session, one, Node.objects.get(name=other))

    def is_on_its_way() -> bool:
        """Its driver is told to go on elsewhere, in the document that is pushed next."""
        operations.advance(moving.pk)
        one.refresh_from_db()
        if one.phase == Phase.MAKING:
            push()
        return one.phase == Phase.MOVING

    wait_until("the shard is on its way", is_on_its_way)
    operations.cancel(admin, moving.pk)
    assert run(moving).state == State.CANCELLED
    push()
    assert {shard.name: (shard.node.name, shard.slots) for shard in shards()} == before
    seen = two_nodes.drivers["job7"].control("observed").json()["shards"]
    assert [shard["state"] for shard in seen] == ["here"] * 4


def test_a_move_to_a_node_that_dies_before_its_driver_went_there_can_be_cancelled(
    people: People, two_nodes: Plane
) -> None:
    admin = people.principal("platform_admin")
    run(create(people, boxes=1, bytes_per_token=512))
    run(start_job(people, two_nodes.add_driver("job7")))
    one = next(shard for shard in shards() if shard.node.name == "ax1")
    with transaction.atomic():
        session = services.for_change(admin, "chat")
        moving = moves.move(admin, session, one, Node.objects.get(name="ax2"))

    def is_to_move() -> bool:
        operations.advance(moving.pk)
        one.refresh_from_db()
        if one.phase == Phase.MAKING:
            push()
        return one.phase == Phase.MOVING

    wait_until("its driver is to move it", is_to_move)
    two_nodes.agents["ax2"].kill()
    Node.objects.filter(name="ax2").update(state="lost", held_state="ready")
    push()
    operations.cancel(admin, moving.pk)
    assert run(moving).state == State.CANCELLED
    one.refresh_from_db()
    assert (one.node.name, one.next_node, one.phase) == ("ax1", None, Phase.SETTLED)
    push()

    def stays() -> bool:
        observed = two_nodes.drivers["job7"].control("observed").json()["shards"]
        seen = next(shard for shard in observed if shard["index"] == one.index)
        return (seen["state"], seen["address"].endswith("ax1/data.sock")) == ("here", True)

    wait_until("its driver stays", stays)


def all_slots(fleet: Plane) -> dict[str, int]:
    return {**fleet.slots("ax1"), **fleet.slots("ax2")}


def largest(before: dict[str, tuple[str, int]]) -> int:
    return max(slots for _, slots in before.values())
