"""Every byte is counted by the path that it took, and the sums are what agents have counted."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from swdriver_shim.data_plane.paths import PATHS_MAX, PathSpec, PathTraffic, TrafficCounter, path_between
from telemetry import topics
from telemetry.metrics import Kind
from telemetry.shapes import Series
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, CONTROL, EACH, C, Daemon, kv, told
from tests.swdriver_shim.fleets import tokens
from tests.swdriver_shim.halves import halves
from tests.swdriver_shim.paths import RAIL, SPINE
from tests.swdriver_shim.prompts import prompt


def test_what_took_a_path_is_added_to_what_took_it_before() -> None:
    tally = TrafficCounter()
    for path, size in [(RAIL, 5), (SPINE, 7), (None, 1), (RAIL, 5), (SPINE, 0)]:
        tally.add(path, "out", size)
    tally.add(RAIL, "in", 3)
    assert set(tally.counted()) == {
        PathTraffic(RAIL, "out", 10),
        PathTraffic(SPINE, "out", 7),
        PathTraffic(None, "out", 1),
        PathTraffic(RAIL, "in", 3),
    }


def test_a_shard_that_has_been_everywhere_knows_the_paths_that_it_took_last() -> None:
    tally = TrafficCounter()
    for number in range(3 * PATHS_MAX):
        tally.add(RAIL, "out", 1)
        tally.add(structs.replace(SPINE, node=f"ax{number}"), "out", 1)
    carried = tally.counted()
    assert len(carried) == PATHS_MAX
    assert PathTraffic(RAIL, "out", 3 * PATHS_MAX) in carried
    assert carried[-1].path == structs.replace(SPINE, node=f"ax{3 * PATHS_MAX - 1}")


def test_many_threads_add_and_nothing_is_lost() -> None:
    tally = TrafficCounter()

    def add() -> None:
        for _ in range(500):
            tally.add(RAIL, "out", 3)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.counted() == [PathTraffic(RAIL, "out", 8 * 500 * 3)]


def test_how_long_it_took_is_counted_where_somebody_has_looked() -> None:
    tally = TrafficCounter()
    tally.add(RAIL, "out", 5, 0.001)
    tally.add(RAIL, "out", 5, 0.1)
    tally.add(RAIL, "pull", 5)
    out, pull = tally.counted()
    assert out.seconds == pytest.approx(0.101)
    assert [sum(one.counts) for one in (out, pull)] == [2, 0]


def test_a_move_goes_from_nic_to_nic() -> None:
    over = path_between(RAIL, SPINE)
    assert over == structs.replace(
        SPINE, tier="spine", box="", domain=0, port_leaf="leaf1", nic_leaf="leaf2", link=""
    )
    beside = path_between(RAIL, structs.replace(RAIL, node="ax3"))
    assert beside is not None
    assert (beside.tier, beside.node) == ("rail", "ax3")
    assert path_between(RAIL, None) is None
    assert path_between(None, RAIL) is None


def test_bytes_are_summed_up_by_session_and_node_with_their_paths_and_in_the_fleet_by_leaves() -> None:
    labels = {
        "stream": "full.3",
        "session": "chat",
        "node": "ax2",
        "tier": "spine",
        "port_leaf": "leaf1",
        "nic_leaf": "leaf2",
        "link": "leaf1-spine1",
        "box": "cs1",
        "direction": "out",
    }
    wide = dict(topics.wider(Series(Kind.COUNTER, "bytes_total", tuple(labels.items()))))
    assert set(wide) == {"fleet", "session:chat", "node:ax2"}
    assert [name for name, _ in wide["node:ax2"].labels] == [
        *("session", "tier", "port_leaf", "nic_leaf", "link", "box", "direction")
    ]
    assert [name for name, _ in wide["session:chat"].labels] == [
        *("node", "tier", "port_leaf", "nic_leaf", "link", "box", "direction")
    ]
    assert [name for name, _ in wide["fleet"].labels] == [
        *("session", "tier", "port_leaf", "nic_leaf", "link", "direction")
    ]
    nobodys = Series(Kind.COUNTER, "bytes_total", (("session", ""),))
    assert set(dict(topics.wider(nobodys))) == {"fleet"}


@contextlib.contextmanager
def two_agents(directory: Path) -> Iterator[list[AgentProcess]]:
    options = ("--tcp", "127.0.0.1:0", "--plain-tcp", "yes")
    with agent(directory / "one", *options) as one, agent(directory / "two", *options) as two:
        yield [one, two]


def homes_at(node: AgentProcess, path: PathSpec) -> dict[str, Any]:
    document = told([node])
    document["homes"][0] |= {
        "address": f"tcp:127.0.0.1:{node.tcp}",
        "path": {
            name: getattr(path, name)
            for name in (
                *("session", "tier", "box", "domain", "port_leaf", "nic_leaf", "node", "link"),
                "allowed",
            )
        },
    }
    return document


def moved_by(node: AgentProcess) -> Counter[str]:
    """What an agent has counted, by direction as it sees it."""
    found = re.findall(
        r'^kvss_bytes_total{.*direction="(\w+)"} (\d+)', node.http.get("/metrics").text, re.MULTILINE
    )
    return Counter({direction: int(size) for direction, size in found})


def carried_by(daemon: Daemon) -> Counter[tuple[str, str, str]]:
    """What a driver has counted, by node, tier and direction."""
    text = daemon.http.get("/metrics", headers={"authorization": f"Bearer {CONTROL}"}).text
    sums: Counter[tuple[str, str, str]] = Counter()
    for line, size in re.findall(r"^tidegate_driver_path_bytes_total{(.*)} (\d+)", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        assert labels["stream"] == "full.0"
        sums[labels["node"], labels["tier"], labels["direction"]] += int(size)
    return sums


@pytest.mark.slow
def test_the_paths_of_all_bytes_add_up_to_what_agents_have_counted_also_through_a_move(
    tmp_path: Path,
) -> None:
    with two_agents(tmp_path) as (one, two):
        one.tell(document(1, spec("s", 40, EACH * C)))
        daemon = Daemon(tmp_path / "driver")
        assert daemon.control("desired", homes_at(one, RAIL)).status_code == 202
        wait_until("it is ready", daemon.is_ready)
        first, second = list(range(5 * C)), list(range(1000, 1000 + 3 * C + 7))
        third = list(range(2000, 2000 + 2 * C))
        daemon.store(ACME, first, kv(5 * C))
        assert daemon.load(ACME, first)[0] == 5 * C

        two.tell(document(1, spec("s", 40, EACH * C, applied=daemon.shard()["count_from"])))
        elsewhere = {**homes_at(two, SPINE), "generation": 2}
        assert daemon.control("desired", elsewhere).status_code == 202
        daemon.store(ACME, second, kv(len(second)))
        assert daemon.load(ACME, first)[0] == 5 * C, "from wherever they are"
        wait_until("it has moved", lambda: daemon.shard()["state"] == "here")
        assert daemon.load(ACME, first)[0] == 5 * C
        assert daemon.load(ACME, second)[0] == len(second)
        daemon.store(ACME, third, kv(2 * C))

        rerouted = {**homes_at(two, structs.replace(SPINE, tier="leaf")), "generation": 3}
        assert daemon.control("desired", rerouted).status_code == 202
        assert daemon.load(ACME, first)[0] == 5 * C

        paths, at_one, at_two = carried_by(daemon), moved_by(one), moved_by(two)
        daemon.stop()
    out = sum(size for (_, _, direction), size in paths.items() if direction == "out")
    came = sum(size for (_, _, direction), size in paths.items() if direction == "in")
    pulled = paths["ax2", "spine", "pull"]
    assert out == (7 * C + len(second)) * EACH == at_one["in"] + at_two["in"]
    assert came + pulled == at_one["out"] + at_two["out"], "a pull is read from the old home"
    assert pulled == at_one["in"], "all of it, since nothing was written again"
    assert paths["ax1", "rail", "out"] == at_one["in"]
    assert paths["ax2", "spine", "out"] == at_two["in"]
    assert paths["ax2", "leaf", "in"] == 5 * C * EACH, "as the last document has it"
    assert paths["ax2", "spine", "in"] + paths["ax2", "leaf", "in"] == at_two["out"]


def test_whoever_decides_is_told_what_workers_have_moved(tmp_path: Path) -> None:
    with halves(tmp_path) as both:
        both.far["0.0"].set_path(RAIL)
        asked = prompt(tokens(1, 2))
        both.store(asked)
        assert both.load(asked) == asked.tokens
        size = sum(one.bytes for one in both.far["0.0"].traffic())
        assert {(one.path, one.direction) for one in both.far["0.0"].traffic()} == {
            (RAIL, "out"),
            (RAIL, "in"),
        }
        assert size == sum(one.bytes for one in both.workers[0].shards["0.0"].traffic())
        assert {one.path for one in both.far["0.1"].traffic()} == {None}
        slowest = both.far["0.0"].take_slowest()
        assert {(one.path, one.direction) for one in slowest} == {(RAIL, "out"), (RAIL, "in")}
        assert {one.tag for one in slowest} == {asked.maker.tag}
        assert not both.far["0.0"].take_slowest()
        both.workers[1].close()
        wait_until("it is gone", lambda: not both.far["0.1"].is_open)
        assert {one.direction for one in both.far["0.1"].traffic()} == {"out", "in"}, "what was known"
