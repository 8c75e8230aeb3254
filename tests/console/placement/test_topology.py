"""Fleets: what can't be true is refused, and they go through plain values and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from console.placement.planner import plan
from console.placement.topology import Box, Domain, Fleet, Misconfigured, Nic, Node, Tier
from tests.console.placement.worlds import EXAMPLES, fleets, node, path, stream, two_leaves


@settings(max_examples=EXAMPLES)
@given(fleets())
def test_a_fleet_survives_plain_values(fleet: Fleet) -> None:
    plan(fleet, [])  # which looks things up in it
    assert fleet.memory_bytes
    assert fleet.node[fleet.nodes[0].name].leaves
    plain = msgspec.json.decode(msgspec.json.encode(fleet))
    assert set(plain) == {"nodes", "boxes"}
    assert msgspec.convert(plain, Fleet) == fleet


@settings(max_examples=EXAMPLES)
@given(fleets())
def test_the_tier_is_told_by_the_leaves(fleet: Fleet) -> None:
    for box in fleet.boxes:
        for at in fleet.nodes:
            assert fleet.tier(box.name, 1, at) is path(fleet, stream(box.name, 1), at.name)


def test_a_domain_may_have_ports_on_several_leaves() -> None:
    fleet = Fleet((node("ax1", "l2"),), (Box("cs1", (Domain(("l1", "l2"), 4),)),))
    (one,) = plan(fleet, [stream("cs1")]).placed
    assert (one.tier, one.route.port_leaf, one.route.nic_leaf) == (Tier.RAIL, "l2", "l2")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Misconfigured, match="Node ax1 needs a NIC"):
        Node("ax1", (), 100, 1)
    with pytest.raises(Misconfigured, match="Node ax1 needs memory"):
        Node("ax1", (Nic("l1"),), 0, 1)
    with pytest.raises(Misconfigured, match="needs a port on a leaf"):
        Domain((), 4)
    with pytest.raises(Misconfigured, match="Box cs1 needs at least one domain"):
        Box("cs1", ())
    with pytest.raises(Misconfigured, match=r"boxes are there twice: cs1\."):
        Fleet((), (*two_leaves().boxes, two_leaves().boxes[0]))
