"""Which agents store the fragments of a shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.placement.rules import Redundancy
from console.sessions.plans.holders import Agent, Choice, Standing, choose

DISK = {"kind": "posix", "path": "/mnt/kv", "cap": "1TiB", "shared": False}
MIRROR, FOUR_AND_ONE = Redundancy.MIRROR, Redundancy.FOUR_AND_ONE


def agent(
    name: str, *leaves: str, standing: Standing = Standing.FREE, why: str = "", **tier2: Any
) -> Agent:
    return Agent(name, standing, frozenset(leaves or ("l1",)), DISK | tier2, f"unix:/{name}", why)


def chosen(code: Redundancy, *agents: Agent, **fragments: int) -> tuple[str, ...]:
    return choose(code, {}, agents, fragments).holders


def test_fragments_are_on_different_leaves_where_there_are_enough() -> None:
    agents = [agent("a1", "l1"), agent("a2", "l1"), agent("a3", "l1"), agent("b1", "l2")]
    assert chosen(MIRROR, *agents) == ("a1", "b1")
    assert chosen(Redundancy.TWO_AND_ONE, *agents) == ("a1", "b1", "a2")


def test_an_agent_on_two_leaves_is_not_lost_with_one_of_them() -> None:
    both = agent("z", "l1", "l2")
    assert chosen(MIRROR, agent("a1", "l1"), agent("a2", "l1"), both) == ("a1", "z")


def test_of_agents_that_are_as_good_those_with_fewest_fragments_take_more() -> None:
    agents = [agent(name) for name in ("a1", "a2", "a3")]
    assert chosen(MIRROR, *agents, a1=3, a2=1, a3=2) == ("a2", "a3")


def test_who_has_a_fragment_keeps_it() -> None:
    agents = [agent("a1", "l1"), agent("a2", "l1"), agent("b1", "l2")]
    assert choose(MIRROR, {0: "a2", 1: "a1"}, agents, {"a1": 9, "a2": 9}) == Choice(("a2", "a1"))
    cordoned = [replace(agents[0], standing=Standing.KEEPS), *agents[1:]]
    assert choose(MIRROR, {0: "a2", 1: "a1"}, cordoned, {}) == Choice(("a2", "a1"))
    assert choose(MIRROR, {}, cordoned, {}) == Choice(("a2", "b1")), "and takes no other"


def test_one_that_leaves_is_replaced_in_its_place() -> None:
    agents = [agent("a1", standing=Standing.LEAVES), agent("a2"), agent("a3")]
    assert choose(MIRROR, {0: "a1", 1: "a2"}, agents, {}) == Choice(("a3", "a2"))


def test_one_that_leaves_keeps_its_fragment_while_there_is_no_other() -> None:
    agents = [agent("a1", standing=Standing.LEAVES, why="is lost"), agent("a2")]
    found = choose(MIRROR, {0: "a1", 1: "a2"}, agents, {})
    assert found.holders == ("a1", "a2")
    assert found.why == (
        "a1 is lost, and no other agent can take its fragments over. "
        "1+1 needs 2 agents with tier 2 on a disk of their own; there is 1."
    )


def test_without_enough_agents_there_is_no_redundancy() -> None:
    agents = [agent("a1"), agent("a2"), agent("a3"), agent("a4", standing=Standing.LEAVES)]
    assert choose(FOUR_AND_ONE, {}, agents, {}) == Choice(
        (), "4+1 needs 5 agents with tier 2 on a disk of their own; there are 3."
    )
    assert choose(MIRROR, {}, [], {}).why.endswith("there are none.")
    assert choose(MIRROR, {0: "gone", 1: "a1"}, [agent("a1")], {}).holders == ()


def test_it_is_said_how_many_agents_may_share_their_disk_with_another() -> None:
    agents = [agent(f"a{number}", shared=True) for number in range(4)]
    gone = agent("b1", standing=Standing.LEAVES, shared=True)
    assert choose(Redundancy.TWO_AND_ONE, {}, [*agents, gone], {}).why == (
        "2+1 needs 3 agents with tier 2 on a disk of their own; there is 1. "
        "3 more may share theirs: `shared: false` says that they do not."
    )


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({}, {}, True),
        ({"shared": True}, {"shared": True}, False),
        ({"shared": True}, {}, False),
        ({"shared": True}, {"path": "/mnt/other"}, True),
        ({"shared": True, "path": "/mnt"}, {"shared": True}, False),
    ],
)
def test_no_two_are_in_one_place_that_agents_share(
    one: dict[str, Any], other: dict[str, Any], apart: object
) -> None:
    assert bool(chosen(MIRROR, agent("a1", **one), agent("a2", **other))) == apart


def test_no_two_are_at_one_address() -> None:
    assert chosen(MIRROR, agent("a1"), replace(agent("a2"), address="unix:/a1")) == ()


def test_of_two_that_come_to_share_a_place_one_is_replaced() -> None:
    agents = [agent("a1", shared=True), agent("a2", shared=True), agent("a3", path="/mnt/own")]
    current = {0: "a1", 1: "a2"}
    assert choose(MIRROR, current, agents, {}) == Choice(("a1", "a3"))
    found = choose(MIRROR, current, agents[:2], {})
    assert found.holders == ("a1", "a2")
    assert found.why.startswith("a2 shares its tier 2 with another one, and no other agent")


AGENTS = st.lists(
    st.builds(
        agent,
        st.sampled_from([f"n{number}" for number in range(12)]),
        st.sampled_from(["l1", "l2", "l3"]),
        standing=st.sampled_from(Standing),
        path=st.sampled_from(["/mnt/a", "/mnt/b", "/mnt/b/c"]),
        shared=st.booleans(),
    ),
    unique_by=lambda one: one.name,
)


@given(st.sampled_from(list(Redundancy)[1:]), AGENTS, AGENTS)
def test_what_is_chosen_is_whole_and_stays(
    code: Redundancy, agents: list[Agent], later: list[Agent]
) -> None:
    first = choose(code, {}, agents, {})
    assert bool(first.holders) != bool(first.why)
    assert choose(code, {}, list(reversed(agents)), {}) == first, "in any order of the agents"
    known = {one.name: one for one in agents}
    assert all(known[name].standing is Standing.FREE for name in first.holders)
    current = dict(enumerate(first.holders))
    assert choose(code, current, agents, Counter(first.holders)) == first, "nothing moves without need"
    after = choose(code, current, later, {})
    assert len(set(after.holders)) in (0, code.holders)
