"""Memory: a fair share for each session, split so that every shard keeps as many columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.placement.grants import (
    Job,
    Session,
    Shard,
    effective,
    fair_share_bytes,
    job_bytes,
    spread,
    streams,
)
from console.placement.planner import plan
from console.placement.rules import Rules
from console.placement.topology import Box, Domain, Fleet, Misconfigured, Nic, Node, State
from tests.console.placement.worlds import EXAMPLES

GIB = 1 << 30
FLEET = Fleet(
    tuple(Node(f"ax{number}", (Nic("l1"), Nic("l2")), 64 * GIB, 16) for number in range(8)),
    tuple(
        Box(f"cs{number}", tuple(Domain((leaf,), wio) for leaf, wio in (("l1", 10), ("l2", 6))))
        for number in range(4)
    ),
)


def job(*boxes: str, name: str = "chat") -> Job:
    return Job(name, spread(FLEET, boxes, "full", 160_000))


def test_a_share_is_by_boxes() -> None:
    half = Session("s1", (job("cs0", "cs1"),))
    assert fair_share_bytes(FLEET, half) == 256 * GIB
    assert fair_share_bytes(FLEET, replace(half, rules=Rules(grant_percent=75))) == 192 * GIB


def test_jobs_divide_a_share_by_their_boxes() -> None:
    one, other = job("cs0", "cs1", name="large"), job("cs2", name="small")
    session = Session("s1", (one, other), Rules(grant_percent=75))
    assert [job_bytes(FLEET, session, each) for each in (one, other)] == [192 * GIB, 96 * GIB]


def test_a_few_boxes_get_no_more_than_nodes_can_hold() -> None:
    """Six times the memory of one node, for two domains: each shard fits on a node."""
    nodes = tuple(Node(f"ax{number}", (Nic("l1"), Nic("l2")), 64 * GIB, 16) for number in range(6))
    few = Fleet(nodes, FLEET.boxes[:1])
    session = Session("s1", (job("cs0"),))
    wanted = streams(few, [session])
    assert 60 * GIB < max(stream.memory_bytes for stream in wanted) <= 64 * GIB
    assert not plan(few, wanted).unplaced


@pytest.mark.parametrize("state", [State.DRAINING, State.MAINTENANCE, State.LOST])
def test_a_large_node_that_has_to_be_left_makes_no_shard_larger_than_the_others_hold(
    state: State,
) -> None:
    large = Node("large", (Nic("l1"), Nic("l2")), 512 * GIB, 16, state)
    fleet = Fleet((*FLEET.nodes[:6], large), FLEET.boxes[:1])
    wanted = streams(fleet, [Session("s1", (job("cs0"),))])
    assert 60 * GIB < max(stream.memory_bytes for stream in wanted) <= 64 * GIB
    assert not plan(fleet, wanted).unplaced
    cordoned = replace(fleet, nodes=(*FLEET.nodes[:6], replace(large, state=State.CORDONED)))
    assert max(one.memory_bytes for one in streams(cordoned, [Session("s1", (job("cs0"),))])) > 64 * GIB


def test_where_every_node_has_to_be_left_the_share_is_as_before() -> None:
    """It is not too small: it waits for a node."""
    lost = replace(FLEET, nodes=tuple(replace(node, state=State.LOST) for node in FLEET.nodes))
    session = Session("s1", (job("cs0"),))
    assert streams(lost, [session]) == streams(FLEET, [session])


def test_domains_with_more_wio_keep_more_of_a_token() -> None:
    assert [shard.bytes_per_token for shard in spread(FLEET, ["cs0"], "full", 160)] == [100, 60]


def test_every_shard_keeps_as_many_columns() -> None:
    wanted = streams(FLEET, [Session("s1", (job("cs0", "cs1"),), Rules(grant_percent=75))])
    sizes = [shard.slot_bytes for shard in job("cs0", "cs1").shards]
    columns = {one.memory_bytes // size for one, size in zip(wanted, sizes, strict=True)}
    assert len(columns) == 1
    left = 192 * GIB - sum(one.memory_bytes for one in wanted)
    assert 0 <= left < sum(sizes)
    assert plan(FLEET, wanted).proven


@settings(max_examples=EXAMPLES)
@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=16), st.integers(0, 1 << 40))
def test_an_equal_split_is_never_better(bytes_per_token: list[int], memory_bytes: int) -> None:
    shards = tuple(Shard("full", "cs0", 0, each) for each in bytes_per_token)
    found = effective(Job("chat", shards), memory_bytes)
    assert found.tokens_equal <= found.tokens
    assert found.tokens // 64 * sum(shard.slot_bytes for shard in shards) <= memory_bytes


@pytest.mark.parametrize(
    ("skew", "lost"), [((1, 1, 1, 1), 0), ((5, 4, 4, 3), 20), ((5, 3, 2, 2), 40), ((3, 1, 1, 1), 50)]
)
def test_what_equal_memory_loses_is_how_far_the_largest_shard_is_above_the_mean(
    skew: tuple[int, ...], lost: float
) -> None:
    shards = tuple(Shard("full", "cs0", number, 65_536 * part) for number, part in enumerate(skew))
    assert effective(Job("chat", shards), 1 << 43).lost_percent == pytest.approx(lost, abs=0.1)


def test_a_state_group_gets_a_slot_for_several_columns() -> None:
    """A state of 1 MB for 1,024 tokens, beside 64 columns of 64 kB."""
    kv = tuple(Shard("full", "cs0", number, each) for number, each in enumerate((1000, 600)))
    states = tuple(
        Shard("state", "cs0", number, 0, each, 16) for number, each in enumerate((1 << 20, 600_000))
    )
    mixed = Job("chat", kv + states)
    wanted = streams(FLEET, [Session("s1", (mixed,))])
    slots = [
        one.memory_bytes // shard.slot_bytes for one, shard in zip(wanted, mixed.shards, strict=True)
    ]
    assert slots[0] == slots[1]
    assert slots[2] == slots[3] == -(-slots[0] // 16)
    used = sum(one.memory_bytes for one in wanted)
    share = job_bytes(FLEET, Session("s1", (mixed,)), mixed)
    assert used <= share < mixed.bytes_of(slots[0] + 1)
    assert effective(mixed, share).tokens == 64 * slots[0]


def test_a_share_below_one_column_is_refused() -> None:
    large = Job("chat", spread(FLEET, ["cs0"], "full", 1 << 40))
    with pytest.raises(
        Misconfigured, match="too small for a single column: give the session more boxes"
    ):
        streams(FLEET, [Session("s1", (large,))])
    with pytest.raises(Misconfigured, match="Job chat needs shards"):
        Job("chat", ())
