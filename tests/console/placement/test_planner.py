"""Promise 7 and its kin: what a plan never does, and that nothing better was possible."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.placement import exact, planner, sentences, windows
from console.placement.grants import Stream
from console.placement.loads import NOWHERE, Problem, cost
from console.placement.plan import Cost, Placed, Plan, Reason, Unplaced
from console.placement.planner import plan
from console.placement.rails import restore_rails
from console.placement.rules import Cause, Limit
from console.placement.topology import Box, Domain, Fleet, Misconfigured, Nic, Node, State, Tier
from tests.console.placement.worlds import (
    EXAMPLES,
    LIMITS,
    fits,
    fleets,
    node,
    path,
    places_of,
    running_worlds,
    stream,
    streams_of,
    two_leaves,
    used,
    worlds,
)

BOTH_WAYS = pytest.mark.parametrize("exact_pairs_max", [0, 25], ids=["rounds", "exact"])


def planned(
    exact_pairs_max: int,
    fleet: Fleet,
    wanted: tuple[Stream, ...],
    running: dict[Stream, str] | None = None,
) -> Plan:
    """As problems of more pairs are planned; with 0 as the largest are."""
    with mock.patch.multiple(
        planner, EXACT_PAIRS_MAX=exact_pairs_max, EXACT_PATH_PAIRS_MAX=exact_pairs_max
    ):
        return plan(fleet, wanted, running)


@BOTH_WAYS
@settings(max_examples=EXAMPLES)
@given(running_worlds(), st.data())
def test_no_plan_breaks_a_limit(
    exact_pairs_max: int, world: tuple[Fleet, dict[Stream, str]], data: st.DataObject
) -> None:
    fleet, running = world
    wanted = data.draw(streams_of(fleet))
    found = planned(exact_pairs_max, fleet, wanted, running)
    assert fits(fleet, {**running, **places_of(found)})
    assert {one.stream for one in everything(found)} == set(wanted)
    for one in found.placed:
        assert fleet.node[one.node].state is State.READY
        assert one.tier == path(fleet, one.stream, one.node) <= one.stream.limit.worst


@pytest.mark.slow
@BOTH_WAYS
@settings(max_examples=EXAMPLES)
@given(running_worlds(), st.data())
def test_the_order_of_the_input_makes_no_difference(
    exact_pairs_max: int, world: tuple[Fleet, dict[Stream, str]], data: st.DataObject
) -> None:
    fleet, running = world
    wanted = data.draw(streams_of(fleet))
    other = Fleet(
        tuple(data.draw(st.permutations(fleet.nodes))), tuple(data.draw(st.permutations(fleet.boxes)))
    )
    shuffled = tuple(data.draw(st.permutations(wanted)))
    again = dict(data.draw(st.permutations(list(running.items()))))
    assert planned(exact_pairs_max, fleet, wanted, running) == planned(
        exact_pairs_max, other, shuffled, again
    )


@BOTH_WAYS
@settings(max_examples=EXAMPLES)
@given(running_worlds(), st.data())
def test_every_better_node_was_refused_for_a_true_reason(
    exact_pairs_max: int, world: tuple[Fleet, dict[Stream, str]], data: st.DataObject
) -> None:
    fleet, running = world
    wanted = data.draw(streams_of(fleet))
    found = planned(exact_pairs_max, fleet, wanted, running)
    places = {**running, **places_of(found)}
    for one in everything(found):
        worst = one.tier if isinstance(one, Placed) else len(Tier)
        better = {at.name for at in fleet.nodes if path(fleet, one.stream, at.name) < worst}
        told = [(name, refusal) for refusal in one.refused for name in refusal.nodes]
        assert sorted(name for name, _ in told) == sorted(better)
        for name, refusal in told:
            assert refusal.tier == path(fleet, one.stream, name)
            judge(fleet, places, one, name, refusal.reason)


def everything(found: Plan) -> list[Placed | Unplaced]:
    return [*found.placed, *found.unplaced]


def judge(
    fleet: Fleet, places: dict[Stream, str], one: Placed | Unplaced, name: str, reason: Reason
) -> None:
    at = fleet.node[name]
    taken, shards = used(places, name)
    match reason:
        case Reason.FULL_MEMORY:
            assert taken + one.stream.memory_bytes > at.memory_bytes
        case Reason.CPU_GUARD:
            assert shards == at.shards_max
        case Reason.RULE:
            assert path(fleet, one.stream, name) > one.stream.limit.worst
        case Reason.CORDONED | Reason.DRAINING | Reason.MAINTENANCE | Reason.LOST:
            assert at.state.value == reason.value
        case _:
            pytest.fail(f"{reason} is no reason here")


def every_cost(problem: Problem, before: list[int]) -> Iterator[Cost]:
    for places in product(
        *([NOWHERE, *problem.candidates[one].all.tolist()] for one in range(len(problem.streams)))
    ):
        loads = problem.empty.copy()
        for one, at in enumerate(places):
            if at != NOWHERE:
                loads.add(one, at)
        if (loads.free >= 0).all() and (loads.shards >= 0).all():
            yield cost(problem, loads, places, before)


@settings(max_examples=EXAMPLES)
@given(worlds())
def test_a_small_plan_is_the_best_of_all_that_there_are(
    world: tuple[Fleet, tuple[Stream, ...]],
) -> None:
    found = planned(25, *world)
    problem = Problem(*world, {})
    costs = list(every_cost(problem, [NOWHERE] * len(problem.streams)))
    paths = min(one[:4] for one in costs)
    assert found.proven
    assert found.cost[:4] == paths
    costs = [one for one in costs if one[:4] == paths]
    least = min(one.load for one in costs)
    assert found.cost.load == pytest.approx(least, rel=1e-6)
    assert found.cost.parts <= min(one.parts for one in costs if one.load <= least * (1 + 1e-9))


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(worlds())
def test_what_rounds_call_proven_is(world: tuple[Fleet, tuple[Stream, ...]]) -> None:
    found, best = planned(0, *world), planned(25, *world)
    assert found.cost[:4] >= best.cost[:4]
    if found.proven:
        assert found.cost[:4] == best.cost[:4]


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(worlds(), st.data())
def test_more_capacity_never_makes_a_plan_worse(
    world: tuple[Fleet, tuple[Stream, ...]], data: st.DataObject
) -> None:
    fleet, wanted = world
    new = data.draw(fleets(1)).nodes[0]
    grown = data.draw(st.sampled_from(fleet.nodes))
    larger = replace(
        grown,
        memory_bytes=grown.memory_bytes + data.draw(st.integers(0, 50)),
        shards_max=grown.shards_max + data.draw(st.integers(0, 2)),
    )
    kept = tuple(one for one in fleet.nodes if one != grown)
    more = Fleet((*kept, larger, replace(new, name="new")), fleet.boxes)
    before, after = planned(25, fleet, wanted).cost, planned(25, more, wanted).cost
    assert after[:4] <= before[:4]
    if after[:4] == before[:4] and larger.memory_bytes == grown.memory_bytes:
        assert after.load <= before.load * (1 + 1e-6)


@pytest.mark.slow
@BOTH_WAYS
@settings(max_examples=EXAMPLES)
@given(running_worlds(), st.data())
def test_what_runs_stays_where_it_may(
    exact_pairs_max: int, world: tuple[Fleet, dict[Stream, str]], data: st.DataObject
) -> None:
    """A resize: of one session's streams some are new, some have another size."""
    fleet, running = world
    own = [one for one in running if one.session == "s1"]
    sizes = {one: data.draw(st.integers(1, 80)) for one in own}
    new = [one for one in data.draw(streams_of(fleet)) if one.session == "s1"]
    wanted = (*(replace(one, memory_bytes=sizes[one]) for one in own), *new)
    found = planned(exact_pairs_max, fleet, wanted, running)
    others = {one: at for one, at in running.items() if one.session != "s1"}
    assert fits(fleet, {**others, **places_of(found)})
    moved = {one.stream.key for one in found.placed if one.moves}
    gone = {one.stream.key for one in found.unplaced}
    for one in own:
        at = fleet.node[running[one]]
        if one.key in moved | gone and at.state.keeps:
            grown = {**others, **{other: running[other] for other in own}}
            here = sum(
                sizes.get(other, other.memory_bytes) for other, name in grown.items() if name == at.name
            )
            assert here > at.memory_bytes


def test_a_rail_is_better_than_a_leaf_and_that_than_the_spine() -> None:
    fleet = two_leaves(node("far", "l3"), node("near", "l2"), node("rail", "l1", shards=1))
    wanted = [stream("cs1", group=group) for group in "abcd"]
    found = plan(fleet, wanted)
    tiers = {"rail": Tier.RAIL, "near": Tier.LEAF, "far": Tier.SPINE}
    assert sorted(one.node for one in found.placed) == ["far", "near", "near", "rail"]
    assert all(one.tier is tiers[one.node] for one in found.placed)


def test_of_two_streams_the_one_with_less_wio_crosses_the_spine() -> None:
    fleet = two_leaves(node("rail", "l1", shards=1), node("far", "l3"))
    heavy, light = stream("cs1", wio=6, group="b"), stream("cs1", wio=5, group="a")
    assert {one.stream: one.node for one in plan(fleet, [light, heavy]).placed} == {
        heavy: "rail",
        light: "far",
    }


def test_loads_are_even() -> None:
    fleet = two_leaves(*(node(f"ax{number}", "l1", memory=400) for number in range(4)))
    found = plan(fleet, [stream("cs1", group=str(number)) for number in range(8)])
    assert [used(places_of(found), at.name)[1] for at in fleet.nodes] == [2, 2, 2, 2]


def test_a_larger_node_gets_more() -> None:
    fleet = two_leaves(node("large", "l1", "l1", memory=300, shards=9), node("small", "l1", memory=150))
    found = plan(fleet, [stream("cs1", group=str(number)) for number in range(6)])
    assert used(places_of(found), "large")[1] == 4


def test_what_is_equal_stays_together_by_session() -> None:
    fleet = two_leaves(node("ax1", "l1"), node("ax2", "l1"))
    streams = [replace(stream("cs1", group=group), session=name) for name in "ab" for group in "xy"]
    found = plan(fleet, streams)
    assert found.cost.parts == 2


def test_a_byte_too_much_is_too_much() -> None:
    """The solver would not see it: it is a millionth of a millionth."""
    tera = 10**12
    fleet = two_leaves(node("rail", "l1", memory=tera), node("far", "l3", memory=tera))
    halves = [stream("cs1", memory=tera // 2 + extra, group=str(extra)) for extra in (0, 1)]
    assert [one.node for one in plan(fleet, halves).placed].count("rail") == 1
    exactly = [replace(one, memory_bytes=tera // 2) for one in halves]
    assert [one.node for one in plan(fleet, exactly).placed].count("rail") == 2


def test_a_byte_too_much_is_too_much_beside_a_node_that_has_more_than_it_may_have() -> None:
    tera = 10**12
    fleet = two_leaves(node("crowded", "l1", memory=tera // 2), node("rail", "l1", memory=tera))
    halves = [stream("cs1", memory=tera // 2 + extra, group=str(extra)) for extra in (0, 1)]
    found = plan(fleet, halves, {stream("cs1", memory=tera, group="older"): "crowded"})
    assert [one.node for one in found.placed] == ["rail"]


@pytest.mark.parametrize("memory", [1, 1 << 20])
def test_a_node_with_next_to_no_memory_is_in_nobodys_way(memory: int) -> None:
    """Streams are a million times what it has: no number for a solver."""
    fleet = two_leaves(node("large", "l1", memory=1 << 40), node("tiny", "l1", memory=memory))
    found = plan(fleet, [stream("cs1", memory=1 << 38, group=str(number)) for number in range(2)])
    assert [one.node for one in found.placed] == ["large", "large"]
    assert found.proven


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (State.CORDONED, Cause.NODE_CORDONED),
        (State.DRAINING, Cause.WAITING_FOR_DRAIN),
        (State.LOST, Cause.WAITING_FOR_CAPACITY),
    ],
)
def test_what_waits_says_for_what(state: State, cause: Cause) -> None:
    found = plan(two_leaves(node("ax1", "l1", state=state)), [stream("cs1")])
    assert [one.cause for one in found.unplaced] == [cause]


@pytest.mark.parametrize("limit", LIMITS[1:])
def test_room_that_a_rule_refuses_is_a_rule_and_not_a_lack(limit: Limit) -> None:
    fleet = two_leaves(node("rail", "l1", shards=0), node("far", "l3"))
    assert [one.cause for one in plan(fleet, [stream("cs1", limit=limit)]).unplaced] == [
        Cause.EXCEEDS_CLUSTER_CAPACITY
    ]
    fleet = two_leaves(node("rail", "l1", memory=40), node("far", "l3"))
    full = {stream("cs1", group="other"): "rail"}
    assert [one.cause for one in plan(fleet, [stream("cs1", limit=limit)], full).unplaced] == [
        limit.because
    ]


def test_what_is_missing_is_told_to_the_byte() -> None:
    fleet = two_leaves(node("ax1", "l1", memory=60), node("ax2", "l1", memory=70, shards=1))
    busy = {stream("cs1", group="a", memory=30): "ax1", stream("cs1", group="b", memory=30): "ax2"}
    (one,) = plan(fleet, [stream("cs1", memory=45)], busy).unplaced
    assert (one.cause, one.missing_bytes, one.missing_shards) == (Cause.WAITING_FOR_CAPACITY, 15, 0)


def test_a_drained_node_is_left_and_a_cordoned_one_is_not() -> None:
    fleet = two_leaves(
        node("old", "l1", state=State.DRAINING),
        node("shut", "l1", state=State.CORDONED),
        node("new", "l1"),
    )
    running = {stream("cs1", group="a"): "old", stream("cs1", group="b"): "shut"}
    found = plan(fleet, running, running)
    assert [(one.before, one.node, one.moves) for one in found.placed] == [
        ("old", "new", True),
        ("shut", "shut", False),
    ]


def test_a_stream_whose_path_is_forbidden_by_now_moves() -> None:
    fleet = two_leaves(node("far", "l3"), node("rail", "l1"))
    running = {stream("cs1"): "far"}
    assert plan(fleet, running, running).placed[0].node == "far"
    strict = replace(stream("cs1"), limit=LIMITS[1])
    assert plan(fleet, [strict], running).placed[0].node == "rail"


def test_a_stream_that_stays_says_that_there_is_room_elsewhere() -> None:
    fleet = two_leaves(node("far", "l3"), node("rail", "l1"))
    running = {stream("cs1"): "far"}
    (one,) = plan(fleet, running, running).placed
    assert [(refusal.reason, refusal.nodes) for refusal in one.refused] == [
        (Reason.RUNS_ELSEWHERE, ("rail",))
    ]


def test_a_window_makes_room_that_rounds_did_not_see() -> None:
    """The only rail of `b` goes to the larger stream first, which has another."""
    fleet = two_leaves(node("one", "l1"), node("two", "l1", "l2"), node("far", "l3"))
    problem = Problem(fleet, [stream("cs1", memory=60), stream("cs1", 1, memory=50)], {})
    first, second = 0, 1
    places, loads = [problem.node("two"), problem.node("far")], problem.empty.copy()
    for one, at in enumerate(places):
        loads.add(one, at)
    changed = windows.improve(problem, loads, places, [first, second], [NOWHERE, NOWHERE], second)
    assert changed == {first: problem.node("one"), second: problem.node("two")}


@pytest.mark.slow
def test_a_search_that_reaches_its_limit_gives_what_it_has() -> None:
    fleet = two_leaves(*(node(f"ax{number}", "l1", memory=97) for number in range(4)))
    rng = random.Random(7)
    wanted = [stream("cs1", group=f"{n:02}", memory=rng.randrange(15, 50)) for n in range(10)]
    with mock.patch.object(exact, "NODES_MAX", 1), mock.patch.object(planner, "EXACT_PAIRS_MAX", 200):
        found = plan(fleet, wanted)
    assert fits(fleet, places_of(found))
    assert len(found.placed) == 10
    assert found.cost.load == pytest.approx(plan(fleet, wanted).cost.load, rel=0.02)


def test_a_level_that_the_solver_calls_impossible_leaves_what_was_found() -> None:
    """HiGHS does so here: loads that it has just found are a little less than it can find again."""
    tera, half, quarter = 10**12, 1 << 39, 1 << 38
    nodes = (
        Node("left", (Nic("l0", 4),), 1 << 41, 9, State.LOST),
        Node("large", (Nic("l0", 4),), 1 << 41, 9),
        Node("guarded", (Nic("l1", 4),), 1 << 41, 0),
        Node("odd", (Nic("l0", 4),), tera + 7, 9),
        Node("small", (Nic("l0", 1), Nic("l0", 16)), 1 << 36, 9),
    )
    fleet = Fleet(
        nodes,
        (
            Box("cs0", (Domain(("l1",), 7), Domain(("l0", "l1"), 2))),
            Box("cs1", (Domain(("l0", "l1"), 8),)),
        ),
    )
    growing = stream("cs0", 1, memory=half, wio=2, group="b")
    moving = replace(stream("cs0", 1, memory=half + 4096, wio=2, group="e"), session="s0")
    wanted = [
        replace(stream("cs0", memory=tera, wio=7, group="a"), session="s0"),
        growing,
        replace(stream("cs0", memory=quarter, wio=7, group="c"), session="s0"),
        replace(stream("cs1", memory=tera, wio=8, group="d"), session="s2"),
        moving,
    ]
    running = {replace(growing, memory_bytes=quarter): "guarded", moving: "left"}
    found = plan(fleet, wanted, running)
    assert fits(fleet, places_of(found))
    assert found.cost[:3] == (2, 0, 14)


@BOTH_WAYS
def test_a_node_with_more_than_it_may_have_gets_nothing_and_harms_nobody(exact_pairs_max: int) -> None:
    """It had more memory once, or a higher guard."""
    fleet = two_leaves(
        node("small", "l1", memory=30), node("guarded", "l1", shards=1), node("far", "l3", shards=1)
    )
    running = {
        stream("cs1", group="a"): "small",
        stream("cs1", group="b"): "guarded",
        stream("cs1", group="c"): "guarded",
    }
    wanted = (stream("cs1", group="x"), stream("cs1", group="y", memory=1))
    found = planned(exact_pairs_max, fleet, wanted, running)
    assert [one.node for one in found.placed] == ["far"]
    assert len(found.unplaced) == 1
    assert restore_rails(fleet, {**running, wanted[0]: "far"}).moves == ()


def test_streams_that_would_have_to_change_places_at_once_are_stuck() -> None:
    fleet = two_leaves(node("one", "l1", memory=100), node("two", "l2", memory=100))
    here, there = (stream("cs1", domain, memory=80, limit=LIMITS[2]) for domain in (0, 1))
    found = plan(fleet, [here, there], {here: "two", there: "one"})
    assert [(one.stream, one.node) for one in found.stuck] == [(here, "one"), (there, "two")]
    assert "wait for each other's memory" in sentences.stuck(found)
    larger = two_leaves(node("one", "l1", memory=160), node("two", "l2", memory=100))
    found = plan(larger, [here, there], {here: "two", there: "one"})
    assert (len(found.placed), found.cost.moves, found.stuck) == (2, 2, ())


def test_a_stream_that_grows_into_the_room_of_one_that_moves_is_not_stuck() -> None:
    fleet = two_leaves(node("one", "l1", memory=100), node("two", "l1", memory=100))
    grows, moves = stream("cs1", memory=40, group="a"), stream("cs1", memory=60, group="b")
    found = plan(fleet, [replace(grows, memory_bytes=90), moves], {grows: "one", moves: "one"})
    assert (len(found.placed), found.cost.moves, found.stuck) == (2, 1, ())


def test_contradictions_are_refused() -> None:
    fleet = two_leaves(node("ax1", "l1"))
    with pytest.raises(Misconfigured, match="is there twice"):
        plan(fleet, [stream("cs1"), stream("cs1")])
    with pytest.raises(Misconfigured, match="no node ax9"):
        plan(fleet, [stream("cs1")], {stream("cs1", group="a"): "ax9"})
    with pytest.raises(Misconfigured, match="no domain 7 of a box cs1"):
        plan(fleet, [stream("cs1", 7)])
    with pytest.raises(Misconfigured, match=r"nodes are there twice: ax1\."):
        two_leaves(node("ax1", "l1"), node("ax1", "l2"))


def test_nothing_wanted_is_nothing_planned() -> None:
    assert plan(two_leaves(), []).placed == ()
    assert len(plan(two_leaves(), [stream("cs1")]).unplaced) == 1
