"""What people read: word for word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.placement import sentences
from console.placement.plan import Reason, Refusal
from console.placement.planner import plan
from console.placement.topology import State, Tier
from tests.console.placement.worlds import LIMITS, node, stream, two_leaves

GiB = 1 << 30


def test_a_plan_explains_itself() -> None:
    fleet = two_leaves(
        node("ax1", "l1", memory=100 * GiB, shards=1),
        node("ax2", "l1", memory=50 * GiB, state=State.CORDONED),
        node("ax3", "l2", memory=30 * GiB),
        node("ax4", "l3", memory=100 * GiB),
    )
    wanted = [
        stream("cs1", group=group, memory=40 * GiB, wio=wio) for group, wio in (("a", 6), ("b", 4))
    ]
    found = plan(fleet, wanted)
    assert [sentences.placed(one) for one in found.placed] == [
        "s1/chat.a of cs1:0 goes to ax1 on a rail (leaf l1).",
        (
            "s1/chat.b of cs1:0 goes to ax4 across the spine (leaf l1 to leaf l3): "
            "ax1 with a NIC on its leaf is at the CPU guard, ax2 with a NIC on its leaf is cordoned, "
            "ax3 on another leaf of its box is full (10 GiB of 40 GiB missing)."
        ),
    ]
    assert sentences.plan(found) == (
        "Of 2 streams, 1 on a rail, 1 across the spine; "
        "proven: none has better paths while the others stay where they are."
    )
    assert [line[:5] for line in sentences.table(found)] == [
        ("s1/chat.a of cs1:0", "ax1", "rail", 6, "40 GiB"),
        ("s1/chat.b of cs1:0", "ax4", "spine", 4, "40 GiB"),
    ]


def test_what_has_no_node_says_what_is_missing_and_what_would_help() -> None:
    fleet = two_leaves(node("ax1", "l1", memory=60 * GiB), node("ax2", "l1", memory=70 * GiB))
    running = {
        stream("cs1", group="x", memory=30 * GiB): "ax1",
        stream("cs1", group="y", memory=30 * GiB): "ax2",
    }
    wanted = [stream("cs1", memory=45 * GiB), stream("cs1", 1, memory=45 * GiB, limit=LIMITS[2])]
    found = plan(fleet, wanted, running)
    assert [sentences.unplaced(one) for one in found.unplaced] == [
        (
            "s1/chat.full of cs1:0 has no node for 45 GiB; the nearest that it may use lacks 5 GiB: "
            "it waits for room on a node that it may use."
        ),
        (
            "s1/chat.full of cs1:1 has no node for 45 GiB; the nearest that it may use lacks 45 GiB and "
            "a shard below the CPU guard: no node that it may use is large enough: make the grant "
            "smaller, or add a larger node."
        ),
    ]


def test_a_refused_spine_says_who_refuses_it() -> None:
    fleet = two_leaves(node("rail", "l1", memory=50 * GiB), node("far", "l3", memory=50 * GiB))
    running = {stream("cs1", group="x", memory=30 * GiB): "rail"}
    (one,) = plan(fleet, [stream("cs1", memory=30 * GiB, limit=LIMITS[1])], running).unplaced
    assert sentences.unplaced(one) == (
        "s1/chat.full of cs1:0 has no node for 30 GiB; the nearest that it may use lacks 10 GiB: there "
        "is room across the spine, which the rules refuse: add a node on its leaf, or allow it."
    )
    assert sentences.why(one.refused, one) == (
        "rail with a NIC on its leaf is full (10 GiB of 30 GiB missing), "
        "far across the spine is refused by rule"
    )


def test_a_box_without_a_rail_is_told_so() -> None:
    found = plan(two_leaves(node("far", "l3")), [stream("cs1")])
    assert sentences.placed(found.placed[0]).endswith(
        "(leaf l1 to leaf l3): no node has a NIC on its leaf."
    )


def test_many_nodes_are_counted_and_not_listed() -> None:
    full = [node(f"ax{number}", "l1", shards=0) for number in range(6)]
    found = plan(two_leaves(*full, node("far", "l3")), [stream("cs1")])
    assert "ax0, ax1, ax2 and 3 more with a NIC on its leaf are at the CPU guard" in sentences.placed(
        found.placed[0]
    )


def test_an_empty_plan_says_so() -> None:
    assert sentences.plan(plan(two_leaves(), [])) == "Nothing is to be placed."


NODE_NAMES = st.lists(
    st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True).map(lambda name: f"{name}-zq"),
    min_size=1,
    max_size=5,
)
REFUSALS = st.builds(
    Refusal,
    st.sampled_from([reason for reason in Reason if reason is not Reason.NO_NIC]),
    st.sampled_from(Tier),
    NODE_NAMES.map(tuple),
    st.integers(0, 1 << 50),
)


@pytest.mark.slow
@given(
    refusals=st.lists(REFUSALS | st.just(Refusal(Reason.NO_NIC, Tier.RAIL)), max_size=4),
    at=st.integers(0, 900),
)
def test_who_does_not_see_the_fleet_reads_why_but_not_which(refusals: list[Refusal], at: int) -> None:
    """Also of a text that was cut to fit its column."""
    [one] = plan(two_leaves(node("ax1", "l1", memory=9 * GiB)), [stream("cs1", memory=GiB)]).placed
    whole = sentences.why(tuple(refusals), one)
    shown = sentences.unnamed(whole)
    assert "-zq" not in shown
    assert "-zq" not in sentences.unnamed(whole[:at])
    assert bool(shown) == bool(refusals)
    for refusal in refusals:
        reason = "no node has a NIC" if refusal.reason is Reason.NO_NIC else " are "
        assert reason in shown
    assert sentences.unnamed(shown) == shown, "it is one of its own"


def test_a_text_of_unknown_make_is_not_shown() -> None:
    assert sentences.unnamed("ax2 was cordoned") == ""
    assert sentences.unnamed("") == ""
    known = (
        "ax1, ax2 and 3 more with a NIC on its leaf are cordoned, "
        "ax9 across the spine is at the CPU guard"
    )
    assert sentences.unnamed(known) == (
        "nodes with a NIC on its leaf are cordoned, nodes across the spine are at the CPU guard"
    )
    earlier = "other nodes with a NIC on its leaf are cordoned"
    assert sentences.unnamed(earlier) == "nodes with a NIC on its leaf are cordoned"
