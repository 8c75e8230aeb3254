"""What streams wait for before they move, and moves that could never begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from django.db import transaction
from django.test import Client

from console.control.models import Change
from console.fleet.descriptions import changes, document
from console.fleet.models import Box, Node
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.placement.rules import Cause
from console.sessions import services
from console.sessions.changes import drains, moves
from console.sessions.models import Session, SessionBox, Stream
from console.sessions.plans.proposals import CannotPlan
from console.sessions.steps import relocation
from tests.conftest import People
from tests.console.operations.runs import run
from tests.console.sessions.fleets import (
    arrive,
    make_across,
    make_driver,
    make_fleet,
    make_node,
    run_job,
)
from tests.console.sessions.obeying import obeying
from tests.console.sessions.requests import create, resize, set_rules
from tests.html import compact

pytestmark = pytest.mark.django_db


def restore_rails(people: People) -> Operation:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        return moves.restore_rails(admin, services.for_change(admin, "chat"))


def test_a_move_whose_driver_does_not_answer_says_so(people: People) -> None:
    make_across(people.acme)
    operation = run(restore_rails(people))
    assert operation.message == "0 of 1 streams are in place. Driver job7 does not answer."


def test_a_page_says_which_streams_are_on_no_rail_until_they_are_moved(
    people: People, browser_of: Callable[..., Client]
) -> None:
    make_across(people.acme)
    hint = '1 not on a rail. <a href="/sessions/chat/restore-rails/">'
    browser = browser_of(people.on_call)
    assert hint in compact(browser.get("/sessions/chat/"))
    assert hint not in compact(browser_of(people.viewer).get("/sessions/chat/")), "who may not move it"
    restore_rails(people)
    assert hint not in compact(browser.get("/sessions/chat/")), "it is being moved"
    page = compact(browser.get("/sessions/chat/restore-rails/"))
    assert "1 stream is being moved or resized" in page
    assert "Everything is on rails" not in page


def test_rails_that_can_not_be_restored_now_are_another_thing_than_none_to_restore(
    people: People,
) -> None:
    make_across(people.acme)
    Node.objects.exclude(name="ax1").update(state="cordoned")
    with pytest.raises(CannotPlan, match="No move helps; 1 stream is not on a rail"):
        restore_rails(people)
    Stream.objects.all().delete()
    with pytest.raises(Impossible, match="Everything is on rails"):
        restore_rails(people)


def test_a_move_to_a_node_that_has_no_room_any_more_says_so(people: People) -> None:
    make_across(people.acme)
    operation = restore_rails(people)
    Node.objects.filter(name="ax2").update(memory_bytes=1)
    stream = Stream.objects.get(index=1)
    assert run(operation).message == (
        f"0 of 1 streams are in place. ax2 has no room for {stream.name} yet."
    )


def move_from_ax4(people: People) -> Operation:
    """A move of the stream on `ax4` to `ax5`, where it has arrived. The operation does not know yet."""
    make_across(people.acme)
    make_node("ax5", "l1")
    admin = people.principal("platform_admin")
    with transaction.atomic():
        session = services.for_change(admin, "chat")
        [stream] = services.streams_of(session).filter(node__name="ax4")
        operation = moves.move(admin, session, stream, Node.objects.get(name="ax5"))
    arrive(operation)
    return operation


def has_stayed_on_ax5(operation: Operation) -> bool:
    stream = Stream.objects.get(index=3)
    assert operation.state == "cancelled", operation.message
    return stream.node.name == "ax5" and stream.operation is None


def test_a_move_from_a_node_that_was_removed_since_can_be_cancelled(people: People) -> None:
    operation, admin = move_from_ax4(people), people.principal("platform_admin")
    left = {thing: said for thing, said in changes.current().items() if thing != ("node", "ax4")}
    changes.apply(admin, document.dump(left))
    operations.cancel(admin, operation.pk)
    assert has_stayed_on_ax5(run(operation))


@pytest.mark.parametrize("state", ["lost", "maintenance", "draining"])
def test_a_move_from_a_node_that_is_away_since_can_be_cancelled(people: People, state: str) -> None:
    operation = move_from_ax4(people)
    Node.objects.filter(name="ax4").update(state=state, held_state="ready" if state == "lost" else "")
    operations.cancel(people.principal("platform_admin"), operation.pk)
    assert has_stayed_on_ax5(run(operation))


def resized(people: People, *moved: str) -> Operation:
    """A session of one box, which is to have two: all has arrived, and what was on these nodes moved to
    new ones. The operation does not know yet."""
    make_fleet()
    run(create(people, boxes=1))
    run_job(people, make_driver("job7"))
    operation = resize(people, 2)
    for name in moved:
        [stream] = Stream.objects.filter(node__name=name)
        next_node, next_slots = make_node(f"{name}b", stream.port_leaf), stream.next_slots or 0
        place = replace(relocation.place_of(stream), node=next_node, slots=next_slots)
        relocation.send_to(stream, place, operation)
    arrive(operation)
    return operation


def cancel_to_its_end(people: People, operation: Operation) -> set[int]:
    """The slots of all streams then."""
    operations.cancel(people.principal("platform_admin"), operation.pk)
    with obeying():
        for _ in range(9):
            run(operation)
    assert operation.state == "cancelled", operation.message
    return set(Stream.objects.values_list("slots", flat=True))


@pytest.mark.parametrize("state", ["draining", "lost"])
def test_what_was_resized_on_a_node_that_is_away_since_returns_to_its_size(
    people: People, state: str
) -> None:
    operation = resized(people)
    [slots] = set(Stream.objects.values_list("slots", flat=True))
    Node.objects.filter(name="ax1").update(state=state, held_state="ready" if state == "lost" else "")
    assert cancel_to_its_end(people, operation) == {slots // 2}
    told = Change.objects.filter(why=operation.sentence).values_list("targets", flat=True)
    assert any(["node", "ax1"] in targets for targets in told)


def test_what_returns_to_its_size_on_a_node_that_is_lost_meanwhile_waits_for_no_agent(
    people: People,
) -> None:
    operation = resized(people)
    [slots] = set(Stream.objects.values_list("slots", flat=True))
    operations.cancel(people.principal("platform_admin"), operation.pk)
    assert run(operation).message.startswith("0 of 4 streams are in place.")
    Node.objects.filter(name="ax1").update(state="lost", held_state="ready")
    assert cancel_to_its_end(people, operation) == {slots // 2}


def test_no_stream_is_left_alone_at_a_new_size_whose_former_node_is_lost_on_the_way_back(
    people: People,
) -> None:
    operation = resized(people, "ax1")
    [slots] = set(Stream.objects.values_list("slots", flat=True))
    operations.cancel(people.principal("platform_admin"), operation.pk)
    run(operation)
    for stream in relocation.of_operation(operation).exclude(next_node__name="ax1"):
        assert stream.next_node is not None
        relocation._finish(stream, stream.next_node, relocation._Changes())
    assert run(operation).message.startswith("3 of 4 streams are in place.")
    Node.objects.filter(name="ax1").update(state="lost", held_state="ready")
    assert cancel_to_its_end(people, operation) == {slots // 2}
    assert Stream.objects.filter(node__name="ax1b").exists()


def test_no_job_is_left_with_streams_of_two_sizes_where_a_node_was_removed(people: People) -> None:
    operation = resized(people, "ax1")
    [slots] = set(Stream.objects.values_list("slots", flat=True))
    left = {thing: said for thing, said in changes.current().items() if thing != ("node", "ax1")}
    changes.apply(people.principal("platform_admin"), document.dump(left))
    assert cancel_to_its_end(people, operation) == {slots}


def test_a_stream_that_goes_back_to_a_node_that_is_lost_meanwhile_stays(people: People) -> None:
    operation = move_from_ax4(people)
    operations.cancel(people.principal("platform_admin"), operation.pk)
    operation = run(operation)
    assert operation.message == "0 of 1 streams are in place. Driver job7 does not answer."
    assert operation.percent == 0, "it sinks from where it was, and had not come further"
    Node.objects.filter(name="ax4").update(state="lost", held_state="ready")
    assert has_stayed_on_ax5(run(operation))


def test_a_drain_whose_driver_does_not_answer_says_so(people: People) -> None:
    make_across(people.acme)
    operation = run(run(drains.drain(people.principal("platform_admin"), "ax4")))
    assert operation.message == "0 of 1 streams are in place. Driver job7 does not answer."


def test_a_drain_counts_as_moved_only_what_has_left(people: People) -> None:
    make_across(people.acme)
    Node.objects.exclude(name__in=["ax1", "ax2"]).update(state="cordoned")
    room_for_one = 15 * Stream.objects.get(index=0).slot_bytes
    Node.objects.filter(name="ax2").update(memory_bytes=room_for_one)
    operation = run(drains.drain(people.principal("platform_admin"), "ax1"))  # which has two
    operation = run(operation)
    assert operation.message == "0 of 1 streams are in place. Driver job7 does not answer."
    assert operation.percent == 33, "the first of three steps"
    arrive(operation)
    operation = run(operation)
    assert "has no node for" in operation.message
    assert operation.percent == 50, "half of the second one, too"


def test_the_progress_of_a_drain_does_not_sink_while_it_gets_on(people: People) -> None:
    make_across(people.acme)
    Node.objects.exclude(name__in=["ax1", "ax2"]).update(state="cordoned")
    Node.objects.filter(name="ax2").update(memory_bytes=15 * Stream.objects.get(index=0).slot_bytes)
    operation = drains.drain(people.principal("platform_admin"), "ax1")  # there is room for one of two
    shown = []
    with obeying():
        for look in range(16):
            if look == 8:
                Node.objects.filter(name="ax2").update(memory_bytes=1 << 30)
            operations.advance(operation.pk)
            operation.refresh_from_db()
            shown.append(operation.percent)
    assert (shown[7], shown[-1]) == (50, 100)
    assert shown == sorted(shown)


def test_a_drain_has_moved_what_is_elsewhere_and_not_what_has_ended(people: People) -> None:
    make_across(people.acme)
    admin = people.principal("platform_admin")
    operation = run(drains.drain(admin, "ax1"))
    assert operation.message == "2 streams are left to move."
    Stream.objects.get(index=0).delete()
    arrive(operation)
    with obeying():
        operation = run(operation)
    assert operation.state == "succeeded", operation.message
    assert operation.response == {"node": "ax1", "moved": 1}


def test_a_resize_that_would_have_streams_change_places_between_full_nodes_is_refused(
    people: People,
) -> None:
    """Each needs room on the other's node while it moves: it would wait for ever."""
    make_fleet(boxes=1)
    Node.objects.exclude(name__in=["ax1", "ax2"]).update(state="cordoned")
    session = Session.objects.create(
        name="chat", org=people.acme, boxes_desired=1, boxes_min=1, boxes_increment=1
    )
    SessionBox.objects.create(session=session, box=Box.objects.get(name="cs1"), ready=True)
    model = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [192, 192]}]}
    run_job(people, make_driver("job7", model))
    one, other = Stream.objects.order_by("index")
    one.node, other.node = other.node, one.node
    for stream in (one, other):
        stream.save()
    set_rules(people, path="require_rail")
    with pytest.raises(CannotPlan, match="wait for each other's memory") as refused:
        resize(people, 1)
    assert refused.value.cause is Cause.WAITING_FOR_CAPACITY
    assert "ax" not in refused.value.sentence, "everybody may read it"
