"""Rates are learned from first tokens: they follow the truth, and no single time spoils them."""

from __future__ import annotations

import random

import pytest

from inference_brain.choice import Asked, Candidate, Load, Mode, Outcome, Rates, choose
from inference_brain.choice.rates import Traffic
from tests.inference_brain.choice.worlds import Truth, World, error


@pytest.mark.parametrize("seed", range(3))
def test_estimates_converge(seed: int) -> None:
    world = World({f"r{index}": Truth(token=1e-4 * (1 + index % 3)) for index in range(4)}, seed)
    assert error(world.run(400)[300:]) < 0.15  # of which a twentieth part is the world's noise
    assert world.rates.mode is Mode.ESTIMATE


def test_estimates_follow_a_truth_that_drifts() -> None:
    truths = {f"r{index}": Truth() for index in range(4)}
    world = World(truths)
    world.run(300)
    for _ in range(300):
        for truth in truths.values():
            truth.token *= 1.003  # to two and a half times as much
        world.step()
    assert error(world.run(100)) < 0.2


def test_a_stalled_request_does_not_change_the_picture() -> None:
    world = World({"r0": Truth(), "r1": Truth()})
    world.run(300)
    rates = world.rates.of("r0")
    before = rates.seconds
    choice = next(choice for choice, _ in world.run(50) if choice.replica == "r0")
    world.rates.observe(choice, Outcome(600.0), world.now)
    assert rates.seconds[1] == pytest.approx(before[1], rel=0.3)


def test_a_new_replica_begins_as_the_others_are() -> None:
    world = World({f"r{index}": Truth(token=3e-3) for index in range(3)})
    world.run(200)
    assert world.rates.of("new").seconds[1] == pytest.approx(3e-3, rel=0.3)


def test_a_replica_that_lies_about_its_hits_only_loses() -> None:
    truths = {f"r{index}": Truth(token=5e-4) for index in range(4)}
    honest = World(truths, seed=1)
    honest.run(300)
    fair = [choice.replica for choice, _ in honest.run(300)].count("r0")
    lies = World(truths | {"r0": Truth(token=5e-4, says=0.0)}, seed=1)
    lies.run(300)
    steps = lies.run(300)
    assert [choice.replica for choice, _ in steps].count("r0") < fair
    assert lies.rates.of("r0").trust < 0.3
    assert lies.rates.of("r1").trust > 0.9
    assert error([step for step in steps if step[0].replica != "r0"]) < 0.15


def test_times_that_are_none_are_left_out() -> None:
    world = World({"r0": Truth()})
    [(choice, _)] = world.run(1)
    before = world.rates.of("r0").seconds
    for seconds in (None, float("nan"), float("inf"), -1.0):
        world.rates.observe(choice, Outcome(seconds), world.now)
    assert world.rates.of("r0").seconds == before


def test_a_busy_stream_of_requests_makes_work_cost_more_than_it_takes() -> None:
    idle, busy = Traffic(), Traffic()
    for number in range(200):
        idle.add(0.1, 4, 100.0 * number)
        busy.add(3.0, 4, float(number))  # each of four replicas is busy for three quarters of the time
    assert idle.pressure < 0.01
    assert busy.pressure == pytest.approx(0.25 / (2 * 0.25), rel=0.1)
    busy.add(1e6, 4, 201.0)
    assert busy.pressure < 2  # it is bounded


def test_a_prompt_stays_with_its_cache_where_others_would_wait_for_its_work() -> None:
    """It would have its own first token a little sooner at the idle replica."""

    def chosen(traffic: Traffic) -> str:
        candidates = [
            Candidate("has it", Rates(traffic=traffic), 20_000, load=Load(24_000)),
            Candidate("idle", Rates(traffic=traffic)),
        ]
        return choose(Asked(21_000), candidates, 0.0, random.Random(1)).replica

    assert chosen(Traffic()) == "idle"
    busy = Traffic()
    for number in range(200):
        busy.add(2.0, 4, float(number))
    assert chosen(busy) == "has it"
