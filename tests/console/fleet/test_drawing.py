"""The picture of a stamp: everything is in it, nothing lies over anything, and many are few."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from console.fleet.insight.diagram import BOX_HEIGHT, SPOTS_MAX, Drawing, Link, Look, Spot, draw, fold

LEAVES = [f"leaf-{number}" for number in range(6)]
LOOKS: list[Look] = ["ok", "warn", "bad", "off"]


def node(name: str, *leaves: str, look: Look = "ok", said: str = "ready") -> Spot:
    return Spot("node", name, leaves, look, said)


def some(spots: int, links: int, seed: int) -> tuple[list[Spot], list[Link]]:
    """Anything, plugged in anywhere."""
    chance = random.Random(seed)
    return (
        [
            node(f"ax-{number}", *chance.choices(LEAVES, k=2), look=chance.choice(LOOKS))
            for number in range(spots)
        ],
        [
            Link(f"up-{number}", chance.choice(LEAVES), chance.choice("ab"), 400)
            for number in range(links)
        ],
    )


def assert_clear(drawing: Drawing) -> None:
    for column in (drawing.spots, drawing.leaves, drawing.spines):
        ys = sorted(place.y for place in column)
        assert all(later - earlier >= BOX_HEIGHT for earlier, later in itertools.pairwise(ys))
        assert all(place.y >= 0 and place.y + BOX_HEIGHT <= drawing.height for place in column)
        assert all(place.x >= 0 and place.x + place.width <= drawing.width for place in column)


@given(st.integers(0, 120), st.integers(0, 12), st.integers())
def test_nothing_lies_over_anything_and_everything_is_counted(spot: int, link: int, seed: int) -> None:
    spots, links = some(spot, link, seed)
    drawing = draw(LEAVES, links, spots)
    assert_clear(drawing)
    assert sum(place.spot.count for place in drawing.spots if place.spot) == len(spots)
    assert {place.name for place in drawing.leaves} == set(LEAVES)
    assert {place.name for place in drawing.spines} == {link.spine for link in links}
    assert sum(line.kind == "spine" for line in drawing.lines) == len(links)


def test_few_are_drawn_one_by_one() -> None:
    few = [node(f"ax-{number}", "leaf-0") for number in range(SPOTS_MAX)]
    assert fold(few) == few


def test_of_many_those_that_are_well_are_drawn_together_and_the_others_are_found() -> None:
    many = [node(f"ax-{number}", "leaf-0", "leaf-1") for number in range(500)]
    many += [node("ax-lost", "leaf-0", "leaf-1", look="bad", said="lost")]
    many += [Spot("box", f"cs-{number}", ("leaf-0",), "box", "4 domains") for number in range(4)]
    folded = {spot.name: (spot.said, spot.count) for spot in fold(many)}
    assert folded == {
        "ax-lost": ("lost", 1),
        "500 nodes": ("500 ready", 500),
        "4 boxes": ("cs-0, cs-1, cs-2, …", 4),
    }


def test_a_stamp_without_anything_can_be_drawn() -> None:
    assert_clear(draw([], [], []))
    assert_clear(draw(["leaf-1"], [], []))
