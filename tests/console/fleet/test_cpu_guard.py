"""How many shards a node takes, by what its shards cost."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from console.fleet import cpu_guard, services
from console.fleet.membership import joins
from console.fleet.models import Node
from kvss_agent.metrics import SHARD_CPU
from telemetry.ingest.folder import Row
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.console.fleet.worlds import CONTROL_TOKEN, FACTS, PLUGGED, World, new_token, refreshed


@pytest.mark.parametrize(
    ("cpus", "cores", "shards", "most"),
    [
        (8, 3.2, 4, 8),  # 0.8 cores each: 6.4 cores are for shards
        (8, 6.4, 4, 4),  # none left
        (8, 7.9, 4, 4),  # more than there should be: nothing is moved away for that
        (8, 0.0, 2, 130),  # nobody asks them, for now
        (8, 1.0, 1, 6),
    ],
)
def test_shards_take_what_they_were_seen_to_take(
    cpus: int, cores: float, shards: int, most: int
) -> None:
    assert cpu_guard.shards_by_cpu(cpus, cores, shards) == most


def test_a_declared_number_is_the_most_and_holds_where_nothing_is_measured() -> None:
    assert cpu_guard.shards_max(6, 8, None, None) == 6
    assert cpu_guard.shards_max(6, 8, 0.1, 1) == 6
    assert cpu_guard.shards_max(6, 8, 6.4, 4) == 4
    assert cpu_guard.shards_max(6, 8, 0.0, 0) == 6
    assert cpu_guard.shards_max(6, 0, 6.4, 4) == 6, "nobody knows its processors"


def test_plans_use_what_was_measured_while_it_is_fresh(world: World) -> None:
    def most() -> int:
        return services.topology().node["ax-1"].shards_max

    before = most()
    assert before == 64
    Node.objects.filter(name="ax-1").update(
        cores_used=51.2, shards_measured=16, measured_at=timezone.now()
    )
    assert most() == 16
    Node.objects.filter(name="ax-1").update(measured_at=timezone.now() - timedelta(hours=1))
    assert most() == before


def seconds_of_cpu(topic: str, shard: str, at: int, seconds: float) -> None:
    """So much processor time of a shard in ten seconds."""
    series = Series(Kind.COUNTER, SHARD_CPU.name, (("shard", shard),))
    shape = Shape([series])
    rows = [Row(topic, at, shape, shape.cells({series: seconds}))]
    copy_in(FRESH, Names().stored(rows, day_of(at)))


def test_the_busiest_minute_of_all_shards_counts(world: World) -> None:
    now = int(time.time()) // 60 * 60
    RollUp().tend_days(now)
    for minutes, one, other in ((4, 0.5, 0.0), (3, 1.5, 2.0), (2, 0.25, 0.0)):
        for tens in range(0, 60, 10):
            at = now - 60 * minutes + tens
            seconds_of_cpu("node:ax-1", "a", at, 10 * one)
            seconds_of_cpu("node:ax-1", "b", at, 10 * other)
    seconds_of_cpu("node:gone", "c", now - 120, 70.0)
    cpu_guard.measure()
    node = refreshed(world.here)
    assert node.cores_used == pytest.approx(3.5, rel=0.01)
    assert node.shards_measured == 2
    assert node.measured_at


def test_small_shards_of_fragments_cost_something_and_are_no_streams(world: World) -> None:
    now = int(time.time()) // 60 * 60
    RollUp().tend_days(now)
    for at in range(now - 120, now - 60, 10):
        seconds_of_cpu("node:ax-1", "job1.full.0", at, 20.0)
        seconds_of_cpu("node:ax-1", "job2.full.0.f3", at, 5.0)
    cpu_guard.measure()
    node = refreshed(world.here)
    assert node.cores_used == pytest.approx(2.5, rel=0.01)
    assert node.shards_measured == 1


def test_a_node_that_reports_absurdly_many_shards_stops_the_guard_of_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_guard, "SHARDS_OF_NODE_MAX", 3)
    now = int(time.time()) // 60 * 60
    RollUp().tend_days(now)
    liar = joins.join_node(
        new_token(),
        "ax-9",
        CONTROL_TOKEN,
        FACTS,
        [replace(nic, name=f"{nic.name}-9") for nic in PLUGGED],
    )
    for number in range(5):
        seconds_of_cpu("node:ax-9", f"s{number}", now - 120, 5.0)
    seconds_of_cpu("node:ax-1", "a", now - 120, 30.0)
    cpu_guard.measure()
    assert refreshed(world.here).cores_used == pytest.approx(0.5, rel=0.01)
    assert refreshed(liar).measured_at is None
