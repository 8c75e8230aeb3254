"""A simulated fleet answers each request once, moves each byte over its links, and is the same again."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from benchmarks.harness import traces_folder
from benchmarks.scale import cache, limits, traffic
from benchmarks.scale.brains import spec_of
from benchmarks.scale.costs import Curve
from benchmarks.scale.fleet import leaf_of, paths, places_of, site
from benchmarks.scale.limits import Part, sentence
from benchmarks.scale.links import Fluid
from benchmarks.scale.sizes import FULL, GBIT, MODELS, WARM, rate, replicas
from benchmarks.scale.world import World
from console.environment import PROJECT
from console.placement.planner import plan
from swdriver_shim.keys import COLUMN_TOKENS

SECONDS = 3.0
SHARE = 0.01  # of the requests of a stamp


def test_the_whole_fleet_is_as_large_as_it_says() -> None:
    assert replicas(FULL) == 1_000
    assert rate(FULL) == pytest.approx(100_000)
    one = site(1)
    assert (len(one.fleet.nodes) * FULL, len(one.fleet.boxes) * FULL) == (10_000, 2_500)


def test_what_was_measured_elsewhere_is_what_the_docs_say_of_it() -> None:
    rows = (PROJECT / "docs" / "benchmarks.md").read_text()

    def value(name: str) -> float:
        [found] = re.findall(rf"^\| `{re.escape(name)}` \| ([0-9.,]+) \|", rows, re.MULTILINE)
        return float(found.replace(",", ""))

    assert value("proxy.cpu.2k") * 1e-6 == pytest.approx(limits.HTTP_SECONDS)
    assert value("ingest.records") == limits.RECORDS


def played(stamps: int, *, loses: bool) -> World:
    world = World(stamps, SECONDS, share=SHARE)
    world.warm()
    world.run(WARM + 1)
    if loses:
        cut = world.lose_leaf(leaf_of(0, 0))
        assert cut == {one.number for one in world.replicas if "-000-" in one.name}
        world.run(WARM + 1.5)
        found = world.replan_leaf(leaf_of(0, 0), cut)
        assert found.kept == found.streams, "nothing that a leaf carried is lost"
        gone = world.lose_stamp(1)
        world.run(WARM + 2)
        world.notice(gone)
    world.run(WARM + SECONDS)
    world.finish()
    return world


@pytest.mark.parametrize("loses", [False, True])
def test_each_request_is_answered_once_and_bytes_are_those_of_its_links(loses: bool) -> None:  # noqa: FBT001
    world = played(2 if loses else 1, loses=loses)
    asked = {one.number for one in world.asks if one.at >= WARM}
    assert len(asked) > 10
    assert set(world.answered) == set(world.finished) == asked
    assert set(world.answered.values()) == set(world.finished.values()) == {1}
    for fluid in (world.inward, world.outward):
        moved, links = fluid.totals()
        assert moved > 0
        for kind in ("nic", "port"):
            its = sum(size for link, size in links.items() if link[0] == kind)
            assert its == pytest.approx(moved)
        crossed = sum(size for link, size in links.items() if link[0] == "spine")
        assert crossed == 0, "even without a leaf there is a way within the stamp"
    if not loses:
        world.run(world.now + 1)  # until all is reported
        caches = [(one.model.name, one.cache.kept) for one in world.replicas]
        stored = {(model, key) for model, kept in caches for its in kept.values() for key in its}
        assert world.maps.table.rows == len(stored), "a name that several have is one row"


def test_a_run_is_the_same_again() -> None:
    one, other = (played(2, loses=True).digest() for _ in range(2))
    assert one == other
    lengths = [[ask.tokens for ask in traffic.asks(1, 1.0, seed, SHARE)] for seed in (1, 2)]
    assert lengths[0] != lengths[1]


def test_transfers_share_links_equally() -> None:
    link = ("nic", "ax", "leaf")
    fluid = Fluid(["one", "other"], {link: 8.0}, {"one": {link: 1.0}, "other": {link: 0.5}})
    fluid.begin(0, GBIT * 4.0, "first")
    assert fluid.tick(0.0) == []
    assert [one.tag for one in fluid.tick(0.5)] == ["first"], "alone it has all of the link"
    fluid.begin(0, GBIT * 4.0, "whole")
    fluid.begin(1, GBIT * 4.0, "half")
    assert fluid.tick(0.5) == []
    assert fluid.tick(1.2) == []
    ended = fluid.tick(0.5 + 4 / (8 / 1.5) + 1e-9)
    assert [one.tag for one in ended] == ["whole", "half"], "equal shares, of which one uses half"
    assert fluid.totals() == (GBIT * 12.0, {link: GBIT * 10.0})


def test_streams_of_a_replica_carry_all_its_bytes() -> None:
    one = site(1)
    found = plan(one.fleet, one.streams())
    for path in paths({p.stream: p.route for p in found.placed}, places_of(found)).values():
        for kind in ("nic", "port"):
            assert sum(share for link, share in path.items() if link[0] == kind) == pytest.approx(1)


LRU = structs.replace(cache.KEPT, displacement="lru")


def compared(asked: list[traffic.Ask], orgs: int, columns: int) -> tuple[cache.Compared, cache.Compared]:
    makers = traffic.makers(spec_of(MODELS[1].name).namespace(), orgs)
    return cache.of_ledger(asked, makers, columns, LRU), cache.of_model(asked, makers, columns)


def test_the_model_of_a_cache_keeps_what_a_ledger_keeps() -> None:
    asked = [
        replace(one, org=one.org % 20, conversation=one.conversation % 40, tokens=one.tokens // 4 + 64)
        for one in traffic.asks(1, 1.0, 1, 0.005)
    ]
    real, model = compared(asked, 20, 4_000)
    assert model.asked == real.asked
    assert model.hit_rate == pytest.approx(real.hit_rate, abs=0.02)
    assert model.entries == pytest.approx(real.entries, rel=0.1)
    assert 0.1 < real.hit_rate < 0.9


def test_what_was_used_longest_ago_goes_first() -> None:
    """One conversation comes back between others that never do: first to come, last to go."""
    one = traffic.Ask(0, 0.0, 1, 0, 0, 0, 4_096, 1)
    asked = [
        replace(one, at=float(number), conversation=0 if number % 3 == 0 else number)
        for number in range(120)
    ]
    real, model = compared(asked, 1, 512)
    assert real.hit_rate > 0.4, "in the order of arrival it would go when it is wanted"
    assert model.hit_rate == pytest.approx(real.hit_rate, abs=0.02)


def test_the_org_with_the_most_gives_up() -> None:
    one = traffic.Ask(0, 0.0, 1, 0, 0, 0, 4_096, 1)
    large = [replace(one, at=float(number), conversation=number) for number in range(60)]
    small = [
        replace(each, at=each.at + 0.5, org=1, conversation=each.conversation % 2) for each in large
    ]
    asked = sorted([*large, *small], key=lambda each: each.at)
    real, model = compared(asked, 2, 512)
    assert model.kept == pytest.approx(real.kept, abs=8)
    assert model.kept[1] >= 15, "of all 16 that a small org uses"
    assert model.hit_rate == pytest.approx(real.hit_rate, abs=0.02)


def test_equal_columns_are_equal_prefixes() -> None:
    one = traffic.Ask(0, 0.0, 1, 3, 17, 1, 4_000, 10)
    longer = replace(one, tokens=5_000)
    other = replace(one, conversation=18)
    assert traffic.columns(longer)[: 4_000 // COLUMN_TOKENS] == traffic.columns(one)
    assert traffic.chunk_ends(one) == traffic.columns(one)[7::8]
    both = zip(traffic.columns(one), traffic.columns(other), strict=True)
    assert [mine == theirs for mine, theirs in both] == [True] * 16 + [False] * 46


def test_a_power_is_found() -> None:
    curve = Curve("", "", tuple((float(n), 3.0 * n**1.5) for n in (1, 10, 100, 1_000)))
    factor, power, error = curve.fit()
    assert [factor, power, error] == pytest.approx([3, 1.5, 0], abs=1e-6)
    assert curve.at(50) == pytest.approx(3 * 50**1.5)
    assert curve.at(10_000) == pytest.approx(3e6)


def test_what_breaks_first_is_what_nothing_helps() -> None:
    found = [Part("brains", 9.0, "of one", "more brains"), Part("maps", 4.0, "of a processor")]
    assert sentence(found).startswith("maps breaks first: at full size it would need 4.0")
    assert "250 replicas" in sentence(found)
    assert sentence([Part("maps", 0.5, "of it")]).startswith("Nothing breaks")


def test_lengths_and_pauses_are_those_of_the_trace() -> None:
    file = traces_folder() / "conversation.jsonl"
    if not file.exists():
        pytest.skip("the public traces are not here")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    answers = np.quantile([row["output_length"] for row in rows], traffic.AT[2:-1])
    assert answers == pytest.approx(traffic.ANSWERS[2:-1], rel=0.1)
    conversations: dict[int, list[dict[str, float]]] = {}
    for row in rows:
        blocks = row["hash_ids"]
        conversations.setdefault(blocks[min(1, len(blocks) - 1)], []).append(row)
    first = [each[0]["input_length"] for each in conversations.values()]
    assert np.quantile(first, traffic.AT[1:-1]) == pytest.approx(traffic.FIRST[1:-1], rel=0.1)
    pauses = [
        (later["timestamp"] - row["timestamp"]) / 1_000
        for each in conversations.values()
        for row, later in itertools.pairwise(each)
    ]
    assert np.quantile(pauses, traffic.AT[1:-1]) == pytest.approx(traffic.PAUSES[1:-1], rel=0.1)
    assert len(rows) / len(conversations) == pytest.approx(traffic.turns_mean(), rel=0.05)
    assert math.isclose(sum(len(each) for each in conversations.values()), len(rows))
