"""Bringing streams back on rails: every step has room at its time, and none is for nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from console.placement import sentences
from console.placement.grants import Stream
from console.placement.rails import restore_rails
from console.placement.topology import Fleet, State, Tier
from tests.console.placement.worlds import EXAMPLES, fits, node, path, running_worlds, stream, two_leaves


@settings(max_examples=EXAMPLES)
@given(running_worlds(), st.none() | st.integers(0, 3))
def test_moves_can_be_made_one_after_the_other_and_only_help(
    world: tuple[Fleet, dict[Stream, str]], moves_max: int | None
) -> None:
    fleet, running = world
    found = restore_rails(fleet, running, moves_max)
    places = dict(running)
    for move in found.moves:
        assert places[move.stream] == move.source
        both = {**places, replaced(move.stream): move.target}
        assert fits(fleet, both), "a stream takes both places while it moves"
        assert fleet.node[move.target].state is State.READY
        assert move.tier_after == path(fleet, move.stream, move.target) <= move.stream.limit.worst
        places[move.stream] = move.target
    assert len({move.stream for move in found.moves}) == len(found.moves)
    assert moves_max is None or len(found.moves) <= moves_max
    assert found.before[:3] == (0, *wio(fleet, running))
    assert found.after[:3] == (0, *wio(fleet, places))
    assert found.after[:3] < found.before[:3] if found.moves else found.after == found.before
    assert {one.stream for one in found.left} == {
        one for one, at in places.items() if path(fleet, one, at) is not Tier.RAIL
    }


def replaced(one: Stream) -> Stream:
    return Stream("moving", one.job, one.group, one.box, one.domain, one.wio, one.memory_bytes)


def wio(fleet: Fleet, places: dict[Stream, str]) -> tuple[int, int]:
    found = dict.fromkeys(Tier, 0)
    for one, at in places.items():
        found[path(fleet, one, at)] += one.wio
    return found[Tier.SPINE], found[Tier.LEAF]


def test_a_stream_goes_straight_to_a_free_rail() -> None:
    fleet = two_leaves(node("far", "l3"), node("near", "l2"), node("rail", "l1"))
    running = {stream("cs1", group="a"): "far", stream("cs1", group="b"): "rail"}
    found = restore_rails(fleet, running)
    assert [(move.stream.group, move.source, move.target) for move in found.moves] == [
        ("a", "far", "rail")
    ]
    assert found.before.spine_wio - found.after.spine_wio == 4
    assert found.bytes == 40
    assert sentences.restore_rails(found) == (
        "1 move of 40 B at most: WIO across the spine 4 → 0, over other leaves 0 → 0."
    )


def test_another_gives_way_first_if_that_is_what_it_takes() -> None:
    """`a` has one node with a rail, and `b`, which is there, has two."""
    fleet = two_leaves(
        node("far", "l3"), node("rail", "l1", memory=50), node("both", "l1", "l2", memory=50)
    )
    running = {stream("cs1", 1, group="a"): "far", stream("cs1", 0, group="b"): "both"}
    found = restore_rails(fleet, running)
    assert [(move.stream.group, move.source, move.target) for move in found.moves] == [
        ("b", "both", "rail"),
        ("a", "far", "both"),
    ]
    assert found.left == ()
    (only,) = restore_rails(fleet, running, moves_max=1).moves
    assert (only.stream.group, only.target, only.tier_after) == ("a", "rail", Tier.LEAF)


def test_two_that_would_have_to_change_places_at_once_stay() -> None:
    fleet = two_leaves(node("one", "l1", memory=40), node("two", "l2", memory=40))
    running = {stream("cs1", 0): "two", stream("cs1", 1): "one"}
    found = restore_rails(fleet, running)
    assert found.moves == ()
    assert sentences.restore_rails(found) == "No move helps; 2 streams are not on a rail."


def test_with_everything_on_rails_there_is_nothing_to_do() -> None:
    fleet = two_leaves(node("one", "l1"))
    assert (
        sentences.restore_rails(restore_rails(fleet, {stream("cs1"): "one"}))
        == "Everything is on rails."
    )


def test_a_node_that_is_drained_gets_nobody_back() -> None:
    fleet = two_leaves(node("far", "l3"), node("rail", "l1", state=State.DRAINING))
    found = restore_rails(fleet, {stream("cs1"): "far"})
    assert found.moves == ()
    assert sentences.placed(found.left[0]) == (
        "s1/chat.full of cs1:0 stays on far across the spine (leaf l1 to leaf l3): "
        "rail with a NIC on its leaf is draining."
    )
