"""Which sibling could lend what of a prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inference_brain.maps import NEVER, Hits, Siblings
from inference_brain.maps.siblings import EXPIRES_SECONDS_MIN, SILENT_SECONDS_MAX, Lent
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.lending import KEYS_MAX
from swdriver_shim.policy import Rules
from tests.inference_brain.map_worlds import MapWorld, tokens_of
from tests.swdriver_shim.prompts import FULL

NOW = 1000.0
MESH = Siblings({"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"], "d": []})


def hits(*tokens: int, expires_at: float = NEVER) -> Hits:
    count = len(tokens)
    return Hits(np.array(tokens), np.zeros(count, np.int64), np.full(count, expires_at))


class Found(NamedTuple):
    tokens: list[int]
    siblings: list[str]

    @classmethod
    def of(cls, lent: Lent) -> Found:
        return cls(lent.tokens.tolist(), [lent.sibling(at) for at in range(lent.tokens.size)])


def lent(siblings: Siblings, drivers: list[str], found: Hits, **ages: float | None) -> Found:
    asked = siblings.asked(drivers)
    assert asked
    assert len(asked.names) == len(found)
    return Found.of(siblings.lent(asked, found, NOW, lambda name: ages.get(name, 0.0)))


def test_of_several_siblings_the_one_with_most_lends_and_of_equals_the_first() -> None:
    assert lent(MESH, ["a", "b", "c", "d"], hits(640, 1280, 320, 6400)) == (
        [1280, 640, 1280, 0],
        ["b", "a", "b", ""],
    )
    assert lent(MESH, ["a", "b", "c"], hits(0, 640, 640)) == ([640, 640, 640], ["b", "c", "b"])
    assert lent(MESH, ["a", "b", "c"], hits(0, 0, 0)) == ([0, 0, 0], ["", "", ""])


def test_a_sibling_whose_replica_takes_no_requests_lends_as_well() -> None:
    asked = MESH.asked(["c", "", "d"])
    assert asked
    assert asked.names == ("c", "", "d", "a", "b")
    assert lent(MESH, ["c", "", "d"], hits(0, 9000, 9000, 640, 1280)) == ([1280, 0, 0], ["b", "", ""])


def test_who_has_no_siblings_is_not_asked_for_any() -> None:
    assert Siblings({}).asked(["a"]) is None
    assert Siblings({"a": [], "b": []}).asked(["a", "b"]) is None
    assert Siblings({"a": ["a", "unknown"], "b": []}).asked(["a", "b"]) is None
    assert MESH.asked(["d", ""]) is None


def test_a_map_that_is_not_known_or_old_promises_nothing() -> None:
    assert lent(MESH, ["a", "b", "c"], hits(0, -1, 640)) == ([640, 640, 0], ["c", "c", ""])
    found = hits(0, 1280, 640)
    assert lent(MESH, ["a", "b", "c"], found, b=SILENT_SECONDS_MAX + 1).siblings == ["c", "c", ""]
    assert lent(MESH, ["a", "b", "c"], found, b=None, c=None).siblings == ["", "", ""]
    assert lent(MESH, ["a", "b", "c"], found, b=SILENT_SECONDS_MAX).siblings == ["b", "c", "b"]


def test_what_expires_while_it_is_copied_is_not_borrowed() -> None:
    soon = hits(0, 1280, 0, expires_at=NOW + EXPIRES_SECONDS_MIN)
    later = hits(0, 1280, 0, expires_at=NOW + EXPIRES_SECONDS_MIN + 1)
    assert lent(MESH, ["a", "b", "c"], soon).tokens == [0, 0, 0]
    assert lent(MESH, ["a", "b", "c"], later).tokens == [1280, 0, 1280]


def test_whole_columns_are_borrowed_and_no_more_than_a_request_can_name() -> None:
    found = hits(0, 10 * COLUMN_TOKENS + 7, 0)
    assert lent(MESH, ["a", "b", "c"], found).tokens[0] == 10 * COLUMN_TOKENS
    found = hits(0, 1 << 23, 0)
    assert lent(MESH, ["a", "b", "c"], found).tokens[0] == KEYS_MAX * COLUMN_TOKENS


def test_what_a_sibling_reports_to_have_in_memory_is_what_it_can_lend() -> None:
    world = MapWorld(FULL)
    maps, siblings = world.maps, Siblings({"other": ["job"], "job": ["other"]})
    prompt = world.prompt(tokens_of([1] * 40))
    world.store(prompt, Rules(ttl_seconds=60))
    world.catch_up()
    asked = siblings.asked(["other"])
    assert asked
    assert asked.names == ("other", "job")

    def found() -> Found:
        hits = maps.hits(asked.names, {world.model: prompt}, world.wall)
        lent = siblings.lent(asked, hits, world.wall, lambda name: maps.age(name, world.wall))
        return Found.of(lent)

    assert found() == ([40 * COLUMN_TOKENS], ["job"])
    world.now += SILENT_SECONDS_MAX + 1
    assert found() == ([0], [""])
    world.catch_up()
    assert found().siblings == ["job"]
    world.now += 60.0
    world.catch_up()
    assert found() == ([0], [""])
