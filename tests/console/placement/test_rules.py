"""Rules: which sizes a session may have, which paths its streams, and what two sets of rules allow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.placement.rules import Borrow, Cause, Limit, Path, Redundancy, Rules
from console.placement.topology import Misconfigured, Tier
from tests.console.placement.worlds import EXAMPLES

RULES = st.builds(
    Rules,
    path=st.sampled_from(Path),
    refuse_spine=st.booleans(),
    wait_for_rail_seconds=st.integers(0, 3),
    boxes_min=st.integers(1, 4),
    boxes_increment=st.sampled_from([1, 2, 4]),
    boxes_max=st.none() | st.integers(8, 12),
    grant_percent=st.integers(1, 100),
    borrow=st.sampled_from(Borrow),
    redundancy=st.sampled_from(Redundancy),
    replace_lost=st.booleans(),
    replace_lost_after_seconds=st.integers(0, 3),
)


@pytest.mark.parametrize(
    ("rules", "waited", "limit"),
    [
        (Rules(Path.ANY), 0, Limit()),
        (Rules(Path.PREFER_RAIL), 0, Limit()),
        (
            Rules(Path.PREFER_RAIL, wait_for_rail_seconds=60),
            59,
            Limit(Tier.LEAF, Cause.WAITING_FOR_RAIL),
        ),
        (Rules(Path.PREFER_RAIL, wait_for_rail_seconds=60), 60, Limit()),
        (Rules(Path.ANY, wait_for_rail_seconds=60), 0, Limit()),
        (Rules(Path.REQUIRE_RAIL), 999, Limit(Tier.RAIL, Cause.WAITING_FOR_RAIL)),
        (Rules(Path.ANY, refuse_spine=True), 999, Limit(Tier.LEAF, Cause.SPINE_REFUSED_BY_RULE)),
        (Rules(Path.REQUIRE_RAIL, refuse_spine=True), 0, Limit(Tier.RAIL, Cause.WAITING_FOR_RAIL)),
    ],
)
def test_a_path_is_what_rules_and_waiting_allow(rules: Rules, waited: float, limit: Limit) -> None:
    assert rules.limit(waited) == limit


def test_every_broken_rule_is_told_with_what_to_ask_for() -> None:
    rules = Rules(boxes_min=4, boxes_increment=2, boxes_max=8)
    assert list(rules.refusals(6)) == []
    assert [(one.cause, one.sentence) for one in rules.refusals(3)] == [
        (Cause.BELOW_MINIMUM_SIZE, "A session has at least 4 boxes: ask for 4."),
        (Cause.NOT_MULTIPLE_OF_INCREMENT, "A session grows by 2 boxes at a time: ask for 4."),
    ]
    assert [(one.cause, one.sentence) for one in rules.refusals(5)] == [
        (Cause.NOT_MULTIPLE_OF_INCREMENT, "A session grows by 2 boxes at a time: ask for 4 or 6.")
    ]
    assert [(one.cause, one.sentence) for one in rules.refusals(10)] == [
        (Cause.EXCEEDS_MAXIMUM, "A session has at most 8 boxes: ask for 8.")
    ]


@settings(max_examples=EXAMPLES)
@given(RULES, st.integers(1, 14))
def test_what_is_to_be_asked_for_is_allowed(rules: Rules, boxes: int) -> None:
    for refused in rules.refusals(boxes):
        sizes = [int(size) for size in re.findall(r"\d+", refused.sentence.partition(": ")[2])]
        assert all(not list(rules.refusals(size)) for size in sizes)
        if not sizes:
            assert all(list(rules.refusals(size)) for size in range(1, 40))


@settings(max_examples=EXAMPLES)
@given(RULES, RULES, st.integers(0, 14), st.integers(0, 4))
def test_stricter_rules_allow_what_both_allow(one: Rules, other: Rules, boxes: int, waited: int) -> None:
    both = one.stricter(other)
    assert both == other.stricter(one)
    assert (not list(both.refusals(boxes))) == (
        not list(one.refusals(boxes)) and not list(other.refusals(boxes))
    )
    assert both.limit(waited).worst <= min(one.limit(waited).worst, other.limit(waited).worst)
    assert both.grant_percent == min(one.grant_percent, other.grant_percent)
    far = list(Borrow)
    assert far.index(both.borrow) == min(far.index(one.borrow), far.index(other.borrow))
    assert both.redundancy in (one.redundancy, other.redundancy)
    assert both.redundancy.parity == max(one.redundancy.parity, other.redundancy.parity)
    assert both.replace_lost == (one.replace_lost and other.replace_lost)
    assert both.replace_lost_after_seconds == max(
        one.replace_lost_after_seconds, other.replace_lost_after_seconds
    )


def test_rules_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(Misconfigured, match=r"largest session \(2\) is below the smallest \(4\)"):
        Rules(boxes_min=4, boxes_max=2)
    with pytest.raises(Misconfigured, match="increment of 2 boxes and one of 3"):
        Rules(boxes_increment=2).stricter(Rules(boxes_increment=3))
    with pytest.raises(Misconfigured, match="are 1 to 100 %"):
        Rules(grant_percent=0)
    with pytest.raises(Misconfigured, match="what moves take of a link, are 1 to 100 %"):
        Rules(moves_percent=101)


def test_a_cause_says_whether_waiting_helps() -> None:
    assert Cause.EXCEEDS_CLUSTER_CAPACITY.is_never
    assert not Cause.WAITING_FOR_RAIL.is_never


def test_what_survives_more_losses_is_stricter_and_then_what_has_fewer_fragments() -> None:
    ordered = sorted(Redundancy, key=lambda one: one.strictness)
    assert [one.value for one in ordered] == ["none", "4+1", "2+1", "1+1", "8+2", "4+2"]


def test_a_redundancy_says_what_it_survives_and_what_it_costs() -> None:
    assert Redundancy("4+1").label == "4+1: survives the loss of 1 agent, 25 % more bytes"
    assert Redundancy("1+1").label == "1+1: survives the loss of 1 agent, 100 % more bytes"
    assert Redundancy("4+2").label == "4+2: survives the loss of 2 agents, 50 % more bytes"
    assert [one.holders for one in Redundancy] == [0, 2, 3, 5, 6, 10]
