"""Limits hold over all brains, in every minute, and what is left of them can be used."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable

import pytest

from inference_brain.admission import Reason, Rejected
from inference_brain.admission.limits import LimitTable, Use
from inference_brain.desired import Limits
from tests.inference_brain.admission.brains import Brain, World

MINUTE = 60.0
ORG = "acme"


def most_in_a_minute(events: Iterable[tuple[float, float]]) -> float:
    """The largest sum of any minute."""
    ordered = sorted(events)
    most = total = 0.0
    first = 0
    for at, amount in ordered:
        total += amount
        while ordered[first][0] <= at - MINUTE:
            total -= ordered[first][1]
            first += 1
        most = max(most, total)
    return most


class Clock:
    """Lets the time pass, with each brain in step with Redis at moments of its own."""

    def __init__(self, world: World, randomness: random.Random) -> None:
        self.world = world
        self._randomness = randomness
        self._next = {brain: 0.0 for brain in world.brains}  # noqa: C420 - mypy wants floats

    def passes(self, seconds: float) -> None:
        self.world.now += seconds
        for brain, at in self._next.items():
            if at <= self.world.now:
                brain.sync()
                self._next[brain] = self.world.now + self._randomness.uniform(0.05, 0.2)

    def stop(self, brain: Brain) -> None:
        del self._next[brain]


@pytest.mark.slow
@pytest.mark.parametrize("brains", [1, 2, 5])
@pytest.mark.parametrize("limit", [1, 7, 300])
def test_no_minute_has_more_requests_than_the_limit(world: World, brains: int, limit: int) -> None:
    randomness = random.Random(brains * limit)
    several = [world.brain(skew=randomness.uniform(0, 1000)) for _ in range(brains)]
    clock = Clock(world, randomness)
    limits = Limits(requests_per_minute=limit)
    served, refused = [], []
    while world.now < 200:
        clock.passes(randomness.expovariate(max(0.5, limit / 20)))  # thrice what may
        brain = randomness.choice(several)
        outcome = brain.take(ORG, limits, 10)
        if isinstance(outcome, Use):
            brain.limits.leave(outcome)
            served.append((world.now, 1.0))
        else:
            refused.append(outcome)
    assert most_in_a_minute(served) <= limit
    assert len(served) >= 0.9 * 3 * limit
    assert {one.code for one in refused} == {Reason.RATE}
    assert all(one.retry_after and 1 <= one.retry_after <= 61 for one in refused)


@pytest.mark.slow
@pytest.mark.parametrize("brains", [1, 3])
def test_tokens_of_a_minute_are_what_answers_really_had(world: World, brains: int) -> None:
    """All tokens are charged in the end, and none twice; only what answers have more than was expected
    can exceed the limit, while they run."""
    randomness = random.Random(brains)
    several = [world.brain() for _ in range(brains)]
    clock = Clock(world, randomness)
    limits = Limits(tokens_per_minute=100_000)
    running: list[tuple[float, int, Brain, Use, int]] = []
    charged, expected = [], 1000
    for number in range(3000):
        clock.passes(randomness.expovariate(10))
        while running and running[0][0] <= world.now:
            _, _, brain, use, tokens = heapq.heappop(running)
            brain.limits.leave(use)
            brain.limits.settle(use, 1, tokens, brain.now)
            charged.append((world.now, tokens))
        brain = randomness.choice(several)
        outcome = brain.take(ORG, limits, expected)
        if isinstance(outcome, Use):
            tokens = randomness.randrange(100, 1900)
            heapq.heappush(
                running, (world.now + randomness.uniform(0.1, 5), number, brain, outcome, tokens)
            )
    most = most_in_a_minute(charged)
    assert 80_000 < most <= 100_000 + 60 * 900  # at most about 60 run at once


@pytest.mark.slow
@pytest.mark.parametrize("brains", [1, 2, 5])
@pytest.mark.parametrize("limit", [1, 3, 50])
def test_never_more_requests_run_at_once_than_may(world: World, brains: int, limit: int) -> None:
    randomness = random.Random(brains * limit)
    several = [world.brain() for _ in range(brains)]
    clock = Clock(world, randomness)
    limits = Limits(concurrent=limit)
    running: list[tuple[float, int, Brain, Use]] = []
    full = 0
    for number in range(1500):
        clock.passes(randomness.expovariate(2 * limit))
        while running and running[0][0] <= world.now:
            _, _, brain, use = heapq.heappop(running)
            brain.limits.leave(use)
        brain = randomness.choice(several)
        outcome = brain.take(ORG, limits, 10)
        if isinstance(outcome, Use):
            until = world.now + randomness.expovariate(0.5)
            heapq.heappush(running, (until, number, brain, outcome))
        else:
            assert outcome.code == Reason.CONCURRENT
        assert len(running) <= limit
        full += len(running) >= 0.75 * limit
    assert full > 1000  # with four times as many requests as may


def test_what_a_killed_brain_had_running_vanishes(world: World) -> None:
    dead, alive = world.brain(), world.brain()
    clock = Clock(world, random.Random(1))
    limits = Limits(concurrent=4)
    clock.passes(1)
    assert [isinstance(dead.take(ORG, limits, 1), Use) for _ in range(5)] == [True] * 4 + [False]
    clock.passes(1)
    clock.stop(dead)
    assert isinstance(alive.take(ORG, limits, 1), Rejected)
    for _ in range(50):
        clock.passes(0.1)
    assert isinstance(alive.take(ORG, limits, 1), Use)


def test_uses_that_were_sent_twice_count_once(world: World) -> None:
    """As when Redis was stopped: it reads all questions later, and answers the last."""
    brain, other = world.brain(), world.brain()
    clock = Clock(world, random.Random(1))
    limits = Limits(requests_per_minute=100)
    clock.passes(1)
    for _ in range(20):
        assert isinstance(brain.take(ORG, limits, 1), Use)
    for _ in range(5):
        question = brain.exchange.question(brain.now, world.server_time)
        world.ask(question)
        brain.exchange.failed()
    clock.passes(1)
    admitted = sum(isinstance(other.take(ORG, limits, 1), Use) for _ in range(100))
    assert 70 <= admitted <= 80  # a little is granted to the first


def test_without_redis_all_brains_admit_at_most_twice_the_limit(world: World) -> None:
    several = [world.brain() for _ in range(4)]
    clock = Clock(world, random.Random(1))
    limits = Limits(requests_per_minute=100)
    clock.passes(1)
    for _ in range(60):
        several[0].take(ORG, limits, 1)
        clock.passes(0.1)
    for brain in several:
        clock.stop(brain)
        brain.exchange.failed()
    world.now += 30
    admitted = 60 + sum(
        isinstance(brain.take(ORG, limits, 1, is_away=True), Use)
        for brain in several
        for _ in range(100)
    )
    assert 100 <= admitted <= 200


def test_a_brain_alone_keeps_the_limits_itself() -> None:
    table, limits = LimitTable(), Limits(requests_per_minute=3, concurrent=2)
    uses = [table.take(ORG, limits, 1, now) for now in (100.0, 101.0)]
    with pytest.raises(Rejected) as refused:
        table.take(ORG, limits, 1, 102.0)
    assert refused.value.code == Reason.CONCURRENT
    for use in uses:
        assert use
        table.leave(use)
    assert table.take(ORG, limits, 1, 103.0)
    with pytest.raises(Rejected) as refused:
        table.take(ORG, limits, 1, 104.0)
    assert (refused.value.code, refused.value.retry_after) == (Reason.RATE, 57.0)
    assert table.take(ORG, limits, 1, 161.0)


def test_a_request_that_was_not_served_gives_back_all_that_it_was_counted_for() -> None:
    table, limits = LimitTable(), Limits(requests_per_minute=1, tokens_per_minute=100)
    use = table.take(ORG, limits, 100, 10.0)
    assert use
    table.leave(use)
    table.settle(use, 0, 0, 12.0)
    assert table.take(ORG, limits, 100, 13.0)


def test_orgs_that_are_away_are_forgotten() -> None:
    table, limits = LimitTable(), Limits(requests_per_minute=5)
    use = table.take(ORG, limits, 1, 10.0)
    assert use
    table.to_ask(500.0, 10)
    assert len(table) == 1  # it runs
    table.leave(use)
    table.to_ask(1000.0, 10)
    assert len(table) == 0


def test_what_redis_was_not_told_for_long_is_forgotten() -> None:
    table, limits = LimitTable(is_shared=True), Limits(requests_per_minute=5)
    for now in range(1000):
        use = table.take(ORG, limits, 1, float(now * 20))
        assert use
        table.leave(use)
    assert len(table.take_unsent(ORG).seconds) <= 62


@pytest.mark.parametrize("is_shared", [False, True])
def test_orgs_without_limits_take_no_memory_of_their_past(*, is_shared: bool) -> None:
    table = LimitTable(is_shared=is_shared)
    for second in range(1000):
        use = table.take(ORG, Limits(), 500, 1000.0 + second)
        assert use
        table.leave(use)
        table.settle(use, 1, 600, 1000.0 + second)
        table.to_ask(1000.0 + second, 256)
    one = table._orgs[ORG]
    assert len(one.own.seconds) <= MINUTE + 1
    assert not one.unsent.seconds
    table.to_ask(1000.0 + 10_000, 256)
    assert ORG not in table
