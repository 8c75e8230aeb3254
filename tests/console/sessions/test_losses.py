"""What becomes of streams on lost nodes: the decision alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.placement.rules import Rules
from console.sessions.plans.losses import (
    Attempt,
    Case,
    Decision,
    Held,
    Limits,
    Standing,
    Surroundings,
    Verdict,
    decide,
)

LOST, HERE, UNKNOWN = Standing.LOST, Standing.HERE, Standing.UNKNOWN
RULES = Rules(replace_lost_after_seconds=20)
TEN = Surroundings(nodes=10)


def held(*standings: Standing, **more: Any) -> tuple[Held, ...]:
    return tuple(Held(f"job7.full.{i}", "job7", one, **more) for i, one in enumerate(standings))


CASE = Case(
    session="chat",
    node="ax2",
    rules=RULES,
    silent_seconds=21,
    lost_seconds=11,
    agent_answers=False,
    streams=held(LOST, LOST),
)


def one(case: Case = CASE, around: Surroundings = TEN, **more: Any) -> Decision:
    [decision] = decide([replace(case, **more)], around)
    return decision


def test_streams_are_placed_anew_when_all_three_witnesses_agree_for_long_enough() -> None:
    decision = one()
    assert decision.verdict is Verdict.REPLACING
    assert decision.streams == ("job7.full.0", "job7.full.1")
    assert decision.sentence == (
        "ax2 has sent no heartbeat for 21 s, does not answer, and driver job7 has lost it."
    )


@pytest.mark.parametrize(
    "alive",
    [
        {"agent_answers": True},  # the console's network, or its web process
        {"streams": held(HERE, HERE)},  # only the console is cut off
        {"streams": held(HERE, UNKNOWN)},
    ],
)
def test_a_node_that_somebody_has_seen_alive_is_left_alone(alive: dict[str, Any]) -> None:
    assert decide([replace(CASE, **alive)], TEN) == []


def test_streams_that_a_driver_still_uses_stay() -> None:
    assert one(streams=held(LOST, HERE)).streams == ("job7.full.0",)


def test_it_waits_for_the_grace_period_and_says_how_long() -> None:
    early = one(silent_seconds=14)
    assert (early.verdict, early.streams) == (Verdict.WAITING, ())
    assert early.sentence == "ax2 is lost: it is replaced in 6 s unless it returns."


def test_a_connection_that_has_just_broken_is_no_loss() -> None:
    """The console may not have heard of a node for an hour, while its driver reconnects."""
    blip = one(silent_seconds=3600, lost_seconds=0)
    assert (blip.verdict, blip.streams) == (Verdict.WAITING, ())


def test_where_the_driver_cannot_be_asked_nobody_knows_and_a_person_is_told_after_a_while() -> None:
    nobody = held(UNKNOWN, UNKNOWN)
    waits = one(streams=nobody)
    assert (waits.verdict, waits.streams, waits.confirms) == (Verdict.WAITING, (), False)
    assert "driver job7 can't be asked" in waits.sentence
    assert one(streams=nobody, silent_seconds=141).verdict is Verdict.BLOCKED


def test_rules_switch_it_off_and_then_a_person_is_told() -> None:
    off = one(rules=Rules(replace_lost=False, replace_lost_after_seconds=20))
    assert (off.verdict, off.streams) == (Verdict.BLOCKED, ())
    assert "the rules say not to replace it" in off.sentence


def test_more_than_a_third_of_the_nodes_at_once_wait_for_a_person() -> None:
    cases = [replace(CASE, node=f"ax{number}", session=f"s{number}") for number in range(4)]
    found = decide(cases, TEN)
    assert {one.verdict for one in found} == {Verdict.BLOCKED}
    assert "4 of 10 nodes are lost at once" in found[0].sentence
    assert {one.verdict for one in decide(cases[:3], TEN)} == {Verdict.REPLACING}
    earlier = Surroundings(nodes=10, replaced=frozenset({"ax8", "ax9"}))
    assert {one.verdict for one in decide(cases[:2], earlier)} == {Verdict.BLOCKED}


def test_one_lost_node_is_replaced_however_small_the_fleet_is() -> None:
    assert one(around=Surroundings(nodes=2)).streams


def test_so_many_nodes_are_replaced_in_ten_minutes_and_no_more() -> None:
    large = Surroundings(nodes=1000, replaced=frozenset({"a", "b", "c"}))
    cases = [replace(CASE, node=f"ax{number}", session=f"s{number}") for number in range(2)]
    first, second = decide(cases, large)
    assert (bool(first.streams), bool(second.streams)) == (True, False)
    assert (second.verdict, second.sentence) == (
        Verdict.WAITING,
        "ax1 is lost, and waits: 4 nodes were replaced within 10 min.",
    )
    again = Surroundings(nodes=1000, replaced=frozenset({"ax0", "b", "c", "d"}))
    assert one(CASE, again, node="ax0").streams  # its other sessions are no other node


def test_a_session_has_one_node_replaced_at_a_time() -> None:
    both = [CASE, replace(CASE, node="ax3")]
    first, second = decide(both, TEN)
    assert (first.node, bool(first.streams), bool(second.streams)) == ("ax2", True, False)
    assert second.sentence == "ax3 is lost, and waits: ax2 is replaced first."
    assert not one(around=Surroundings(nodes=10, replacing={"chat": "ax9"})).streams


def test_what_is_under_way_goes_on_and_is_told_where_it_does_not() -> None:
    running = Attempt("Replace ax2 of chat", running=True, seconds=3)
    assert one(attempt=running).verdict is Verdict.REPLACING
    assert one(attempt=running).streams == ()
    late = replace(running, seconds=Limits().patience_seconds + 1, problem="ax3: no memory.")
    assert one(attempt=late).verdict is Verdict.BLOCKED
    assert one(attempt=replace(running, stuck=True)).verdict is Verdict.BLOCKED
    cancelled = Attempt("Replace ax2 of chat", running=False, seconds=3, problem="It was cancelled.")
    assert (one(attempt=cancelled).verdict, one(attempt=cancelled).streams) == (Verdict.BLOCKED, ())
    assert "It was cancelled: start its agent" in one(attempt=cancelled).sentence


def test_what_another_operation_moves_is_left_to_it_and_what_it_resizes_needs_a_person() -> None:
    drained = held(LOST, operation="An operation on the fleet", leaves=True)
    assert (one(streams=drained).verdict, one(streams=drained).streams) == (Verdict.REPLACING, ())
    resized = held(LOST, operation="“Resize session chat”")
    assert one(streams=resized).verdict is Verdict.BLOCKED
    assert "“Resize session chat” resizes job7.full.0 there: cancel it" in one(streams=resized).sentence


def test_what_moves_them_and_does_not_get_on_needs_a_person_as_well() -> None:
    by, late = "“Move job7.full.0 of chat to ax3”", Limits().patience_seconds + 1

    def moved(seconds: float, **more: Any) -> Held:
        return Held("job7.full.0", "job7", LOST, operation=by, leaves=True, seconds=seconds, **more)

    for_long = one(streams=(moved(late),), silent_seconds=RULES.replace_lost_after_seconds + late)
    assert (for_long.verdict, for_long.streams) == (Verdict.BLOCKED, ())
    assert f"{by} has not moved job7.full.0 yet: see why, or cancel it." in for_long.sentence
    has_just_begun = one(streams=(moved(1),), silent_seconds=3600)
    was_lost_just_now = one(streams=(moved(late),), silent_seconds=30)
    assert {has_just_begun.verdict, was_lost_just_now.verdict} == {Verdict.REPLACING}
    stuck = one(streams=(*held(LOST), moved(1, stuck=True)))
    assert (stuck.verdict, stuck.streams) == (Verdict.BLOCKED, ())
    assert f"{by} was to change job7.full.0, and is stuck: retry it." in stuck.sentence


@pytest.mark.parametrize("more", [{"stuck": True, "leaves": True}, {"stuck": True}, {}])
def test_no_person_is_told_before_a_node_has_had_its_time_to_return(more: dict[str, bool]) -> None:
    streams = held(LOST, operation="“Resize session chat”", **more)
    restarts = one(streams=streams, silent_seconds=19)
    assert (restarts.verdict, restarts.streams) == (Verdict.WAITING, ())
    lost = one(streams=streams)
    assert lost.verdict is Verdict.BLOCKED
    assert ("retry it" if "stuck" in more else "cancel it") in lost.sentence
