"""Workloads under people, deaths and lost messages: what holds at any time, and where it ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from console.workloads.spec import RolloutSpec
from tests.console.workloads.leader.worlds import Behaviour, Chaos, World

GOOD, COLD = Behaviour(), Behaviour(epoch=2)
BAD = (
    Behaviour(ends=True),
    Behaviour(hangs=True),
    Behaviour(fails=0.5),
    Behaviour(cannot_be_compiled=True),
    Behaviour(fails=0.5, epoch=3),
)
RULES = st.builds(
    RolloutSpec,
    max_surge=st.integers(0, 3),
    max_unavailable=st.integers(0, 2),
    deadline_seconds=st.just(60.0),
    ready_seconds=st.sampled_from((0.0, 3.0)),
    warm_seconds=st.just(20.0),
).map(lambda one: one if one.max_surge or one.max_unavailable else RolloutSpec(deadline_seconds=60.0))
LOSSY = st.builds(
    Chaos,
    loses_apply=st.sampled_from((0.0, 0.3)),
    loses_publish=st.sampled_from((0.0, 0.3)),
    loses_observation=st.sampled_from((0.0, 0.5)),
    leader_dies=st.sampled_from((0.0, 0.2)),
)
SEEDS = st.integers(0, 1 << 32)
# A seed can't be made smaller, and what failed is repeated by it.
lives = settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
pytestmark = [pytest.mark.sim, pytest.mark.slow]


@lives
@given(SEEDS, RULES, st.integers(1, 5), LOSSY, st.lists(st.sampled_from("rrgcddm"), max_size=3))
def test_a_healthy_roll_out_keeps_its_promises_whatever_is_lost(
    seed: int, rules: RolloutSpec, replicas: int, chaos: Chaos, changes: list[str]
) -> None:
    """`World.check` after each step: surge, available replicas, warm switches, drains announced."""
    world = World(seed, rules, replicas, chaos)
    world.run_until(world.is_reached)
    for change in changes:
        if change == "r":
            world.restart()
        elif change == "d":
            world.drain(world.chance.choice(world.boxes))
        elif change == "m":
            world.move_console()
        else:
            world.change(GOOD if change == "g" else COLD)
        world.run_until(world.is_reached)
    assert not world.rolled_back


@lives
@given(SEEDS, RULES, st.integers(1, 4), st.sampled_from(BAD))
def test_a_bad_revision_is_rolled_back_and_nobody_notices(
    seed: int, rules: RolloutSpec, replicas: int, bad: Behaviour
) -> None:
    world = World(seed, rules, replicas)
    world.run_until(world.is_reached)
    good = world.intent.revision
    world.change(bad)
    world.run_until(lambda: world.rolled_back > 0)
    world.run_until(world.is_reached)
    assert world.rolled_back == 1
    assert world.intent.revision.digest == good.digest


@pytest.mark.parametrize("seed", range(30))
def test_the_goal_is_reached_or_a_person_asked_after_any_life(seed: int) -> None:
    chance = random.Random(seed)
    world = World(
        seed,
        RolloutSpec(
            max_surge=chance.choice((0, 1, 2)),
            max_unavailable=chance.choice((1, 2)),
            deadline_seconds=60.0,
            ready_seconds=chance.choice((0.0, 5.0)),
            warm_seconds=20.0,
        ),
        chance.randint(1, 4),
        Chaos(
            loses_apply=0.2,
            loses_publish=0.2,
            loses_observation=0.2,
            leader_dies=0.1,
            process_dies=chance.choice((0.0, 0.01)),
            engine_dies=chance.choice((0.0, 0.02)),
        ),
    )
    for _ in range(chance.randint(3, 12)):
        world.run(chance.choice((0.5, 2.0, 5.0, 20.0, 60.0)))
        match chance.randrange(10):
            case 0:
                world.scale(chance.randint(1, 5))
            case 1 | 2:
                world.change(chance.choice((GOOD, GOOD, COLD)))
            case 3:
                world.change(chance.choice(BAD))
            case 4:
                world.restart()
            case 5:
                world.pause()
            case 6:
                world.resume()
            case 7 if world.boxes:
                world.drain(chance.choice(world.boxes))
            case 8:
                world.move_console()
    if chance.random() < 0.3:
        world.delete()
    elif world.intent.paused:
        world.resume()
    world.come_to_rest()
    if world.intent.deleting:
        world.check_nothing_is_left()


def test_a_cold_revision_gets_homes_of_its_own_and_the_old_ones_go() -> None:
    world = World(1, RolloutSpec(max_surge=1), 3)
    world.run_until(world.is_reached)
    world.change(COLD)
    most = 0
    while not world.is_reached():
        world.step()
        most = max(most, len(world.homes))
    assert most == 4
    assert {home.epoch for home in world.homes} == {2}


def test_without_room_for_more_boxes_a_cold_roll_out_is_done_in_place() -> None:
    world = World(1, RolloutSpec(max_surge=1, max_unavailable=1), 3, capacity=3)
    world.run_until(world.is_reached)
    world.change(COLD)
    world.run_until(world.is_reached)
    assert {home.epoch for home in world.homes} == {2}


def test_nothing_of_a_deleted_workload_is_left() -> None:
    world = World(3, replicas=4)
    world.run_until(world.is_reached)
    world.change(GOOD)
    world.run(6.0)
    world.delete()
    world.run_until(lambda: world.is_forgotten)
    world.check_nothing_is_left()


@pytest.mark.parametrize("replicas", [0, 1])
def test_who_leaves_does_not_wait_for_a_job_whose_driver_has_gone(replicas: int) -> None:
    """The start of a job is cancelled, which would wait for its driver for minutes."""
    world = World(3, replicas=3)
    world.run_until(lambda: any(one.is_starting for one in world.homes.values()))
    world.break_engines()
    if replicas:
        world.scale(replicas)
    else:
        world.delete()
    world.run_until(lambda: {one.ordinal for one in world.homes} <= {*range(replicas)}, 60.0)
    assert world.counts["cancelled"]
    if not replicas:
        world.run_until(lambda: world.is_forgotten, 30.0)
        world.check_nothing_is_left()


@pytest.mark.parametrize(
    "rules", [RolloutSpec(max_surge=1), RolloutSpec(max_surge=0, max_unavailable=1)]
)
def test_who_is_on_a_box_that_is_drained_goes_to_another_one(rules: RolloutSpec) -> None:
    """`World.check` sees that it serves all the time where the rules let it have another instance."""
    world = World(5, rules, 3)
    world.run_until(world.is_reached)
    left = {box for box in world.boxes if box != world.boxes[2]}
    for box in left:
        world.drain(box)
    world.run_until(lambda: world.is_reached() and not left & {*world.boxes})
    assert world.counts["moved"] == 2 or not rules.max_surge
    assert {one.boxes for one in world.homes.values()} == {(box,) for box in world.boxes}
    assert not world.rolled_back


def test_without_another_box_it_stays_and_says_why() -> None:
    world = World(5, RolloutSpec(max_surge=1, max_unavailable=1), 3, capacity=3)
    world.run_until(world.is_reached)
    names = world.rows.keys()
    world.drain("box1")
    world.run(300.0)
    assert world.rows.keys() == names
    assert world.ready() == 3
    world.draining.clear()
    world.capacity = 4
    world.drain("box1")
    world.run_until(lambda: world.is_reached() and "box1" not in world.boxes)


def test_a_drain_goes_on_while_roll_outs_are_paused() -> None:
    world = World(5, RolloutSpec(max_surge=1), 2)
    world.run_until(world.is_reached)
    world.pause()
    world.drain("box0")
    world.run_until(lambda: world.is_reached() and "box0" not in world.boxes)


@pytest.mark.parametrize(
    "rules", [RolloutSpec(max_surge=1), RolloutSpec(max_surge=0, max_unavailable=1)]
)
def test_after_the_console_has_moved_all_get_new_instances_also_while_roll_outs_are_paused(
    rules: RolloutSpec,
) -> None:
    world = World(5, rules, 3)
    world.run_until(world.is_reached)
    before = set(world.rows)
    world.pause()
    world.move_console()
    world.run_until(world.is_reached)
    assert not before & world.rows.keys()
    assert not world.rolled_back
    assert world.intent.paused
