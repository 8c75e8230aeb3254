"""The story of the demo: always the same, and one that a fleet of this size can hold."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from console.demo import places, story
from console.fleet.descriptions import document
from swdriver_shim.keys import COLUMN_TOKENS

SECONDS = 900.0


def told(served: story.Served, seconds: float = SECONDS) -> list[story.Ask]:
    return list(itertools.takewhile(lambda ask: ask.at < seconds, story.asks(served)))


@pytest.mark.parametrize("served", story.SERVED, ids=lambda served: served.name)
def test_it_is_the_same_each_time_and_in_order(served: story.Served) -> None:
    once = told(served)
    assert once == told(served)
    assert [ask.at for ask in once] == sorted(ask.at for ask in once)
    assert {ask.served for ask in once} == {served}
    assert 0.2 < len(once) / SECONDS < 4, "a machine that does something else is not to notice"
    assert max(len(ask.tokens) + len(ask.answer) for ask in once) < 8192


@pytest.mark.slow
def test_orgs_have_different_habits() -> None:
    """How much of a prompt its org has asked before, in columns."""
    seen: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    again, asked = Counter[str](), Counter[str]()
    for ask in (*told(story.ASSISTANT), *told(story.CODING)):
        for end in range(COLUMN_TOKENS, len(ask.tokens), COLUMN_TOKENS):
            column = tuple(ask.tokens[:end])
            again[ask.org] += column in seen[ask.org]
            asked[ask.org] += 1
            seen[ask.org].add(column)
    reuse = {org: again[org] / asked[org] for org in asked}
    assert reuse["foundry"] > 0.85
    assert reuse["lighthouse"] > 0.7
    assert reuse["archive"] < 0.2


def test_archive_comes_in_waves() -> None:
    times = [ask.at for ask in told(story.ASSISTANT) if ask.org == "archive"]
    assert max(after - before for before, after in itertools.pairwise(times)) > 120


def leaves_of(things: document.Things, node: str) -> set[str]:
    return {nic["leaf"] for nic in things[document.NODE, node]["nics"].values()}


def test_the_fleet_is_a_description_and_holds_every_model() -> None:
    things = document.parse(story.fleet(Path("/a directory")))
    assert sorted(name for kind, name in things if kind == document.NODE) == list(places.NODES)
    for box in story.BOXES:
        its = {leaf for domain in things[document.BOX, box]["domains"] for leaf in domain["leaves"]}
        away = [name for name in places.NODES if its.isdisjoint(leaves_of(things, name))]
        assert len(away) == 2, "nodes that only the spine leads to: `make incident` needs one"
    [domains] = {len(things[document.BOX, box]["domains"]) for box in story.BOXES}
    assert {served.emulator.domains for served in story.SERVED} == {domains}
    assert sum(served.replicas for served in story.SERVED) == len(story.BOXES)
