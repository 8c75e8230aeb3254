"""Strangers never take the places of peers that have proved who they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvss_agent.limits.admission import Admission, Places
from kvss_agent.limits.origins import origin_of

PLACES = Places(strangers_max=6, strangers_per_origin=3, proven_max=8, reserved_per_owner=2)


def admission(*owners: str) -> Admission[int]:
    return Admission(PLACES, lambda: owners)


def test_a_flood_of_one_origin_displaces_its_own_oldest_only() -> None:
    gate = admission()
    assert gate.enter(0, "other") is None
    assert [gate.enter(n, "flood") for n in range(1, 7)] == [None, None, None, 1, 2, 3]
    assert gate.prove(0, "driver")


def test_when_all_places_of_strangers_are_taken_the_largest_origin_makes_way() -> None:
    gate = admission()
    for number, origin in enumerate(["a", "b", "b", "c", "c", "c"]):
        assert gate.enter(number, origin) is None
    assert gate.enter(6, "d") == 3
    assert gate.strangers == 6


def test_who_was_displaced_can_not_prove_anything_any_more() -> None:
    gate = admission()
    for number in range(4):
        gate.enter(number, "a")
    assert not gate.prove(0, "driver")
    assert gate.prove(1, "driver")


def test_the_proven_are_never_displaced_and_one_owner_does_not_take_all_places() -> None:
    gate = admission("greedy", "modest")
    let_in = 0
    for number in range(20):
        gate.enter(number, "a")
        let_in += gate.prove(number, "greedy")
        gate.leave(number) if number >= 6 else None
    assert let_in >= 6
    for number in range(100, 102):
        gate.enter(number, "a")
        assert gate.prove(number, "modest")


def test_places_are_free_again_when_a_peer_leaves() -> None:
    gate = admission("a", "b")
    for number in range(6):
        gate.enter(number, "x")
        assert gate.prove(number, "a")
    gate.enter(6, "x")
    assert not gate.prove(6, "a"), "two places are b's"
    gate.leave(0)
    assert gate.prove(6, "a")
    assert (gate.strangers, gate.proven, gate.refused) == (0, 6, 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "prove", "leave"]), st.integers(0, 15), st.sampled_from("abc"))
)


@given(STEPS)
def test_the_bounds_hold_whatever_happens(steps: list[tuple[str, int, str]]) -> None:
    gate = admission("a", "b")
    inside: dict[int, bool] = {}  # whether it is proven
    for what, peer, name in steps:
        if what == "enter" and peer not in inside:
            displaced = gate.enter(peer, name)
            if displaced is not None:
                assert not inside.pop(displaced)
            inside[peer] = False
        elif what == "prove":
            is_proven = gate.prove(peer, name)
            assert peer in inside or not is_proven
            if is_proven:
                inside[peer] = True
        elif what == "leave":
            gate.leave(peer)
            inside.pop(peer, None)
        assert gate.strangers == sum(not proven for proven in inside.values()) <= PLACES.strangers_max
        assert gate.proven == sum(inside.values()) <= PLACES.proven_max


def test_an_ipv6_origin_is_its_64_and_others_are_themselves() -> None:
    assert origin_of("2001:db8::1") == origin_of("2001:db8::ffff:2") == "2001:db8::/64"
    assert origin_of("2001:db8:0:1::1") != origin_of("2001:db8::1")
    assert origin_of("10.0.0.1") == origin_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert origin_of("fe80::1%eth0") == "fe80::/64"
    assert origin_of("no address") == origin_of("") == "unknown"
