"""Emulated replicas take the time that their constants say, and every router's requests are answered."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.routing import shared
from benchmarks.routing.calibrate import of_model, raised, requests_at
from benchmarks.routing.fleet import Fleet, Result, Router, Transfers
from benchmarks.routing.policies import Exact, LeastLoaded, Ours, RoundRobin, Sharing, WouldBorrow, floor
from benchmarks.routing.timing import Engine, Timing, Work, constants, served
from benchmarks.routing.traffic import Asking, orgs, spread
from inference_brain.choice.candidates import Candidate
from swdriver_shim.replay.traces import Request

TIMING = Timing(
    step=0.01,
    token=1e-4,
    pair=1e-8,
    running=1e-3,
    context=1e-7,
    request=0.001,
    cached_token=0.0,
    step_tokens=1000,
    running_max=64,
)
COLUMNS = 4_000


def answered(*works: Work) -> dict[object, float]:
    """When each has its first token."""
    found: dict[object, float] = {}

    def first(work: Work, now: float) -> None:
        found[work.tag] = now

    engine = Engine(TIMING, lambda _work, _now: 0, first, lambda _work, _now: None)
    for work in works:
        while engine.due <= work.arrived:
            engine.advance()
        engine.arrive(work, work.arrived)
    while engine.due < math.inf:
        engine.advance()
    return found


def test_a_prompt_takes_its_steps_its_tokens_and_its_attention() -> None:
    [seconds] = answered(Work(2_500, 1, 0.0, tag="one")).values()
    assert seconds == pytest.approx(3 * 0.01 + 2_500 * 1e-4 + 2_500 * 2_501 / 2 * 1e-8)


def test_prompts_are_computed_in_the_order_of_arrival_and_share_steps() -> None:
    found = answered(
        *(Work(1_500, 1, 0.0, tag="first"), Work(300, 1, 0.001, tag="second")),
        Work(900, 1, 0.002, tag="third"),
    )
    assert found["first"] == found["second"] < found["third"]


def test_a_request_keeps_its_place_in_the_queue_while_what_it_borrows_is_on_its_way() -> None:
    seconds = answered(Work(900, 1, 0.0, tag="asked"))["asked"]
    assert answered(Work(900, 1, 0.0, 0.5, tag="asked"))["asked"] == pytest.approx(0.5 + seconds)
    found = answered(
        Work(900, 1, 0.0, 0.05, tag="borrows"),
        Work(900, 1, 0.0, tag="beside"),
        Work(900, 1, 0.02, tag="behind"),
    )
    assert found["beside"] == pytest.approx(seconds)
    assert found["beside"] < found["borrows"] < found["behind"]
    runs = [Work(10, 400, 0.0, tag=number) for number in range(20)]
    beside = answered(*runs, Work(900, 1, 1.0, 1.5, tag="asked"))["asked"]
    step = 0.01 + 20 * (1e-3 + 1e-7 * 410)
    assert 1.5 + seconds < beside < 1.5 + seconds + 2 * step


def test_a_fit_takes_as_long_as_what_was_measured_although_its_errors_are_on_one_side() -> None:
    rng = np.random.default_rng(1)
    expected = rng.uniform(0.01, 0.2, 2_000)
    slowed = np.where(rng.random(2_000) < 0.2, 1.5, 1.0)
    assert raised(expected, expected * slowed) == pytest.approx(1.1, rel=0.01)
    stalled = expected.copy()
    stalled[::500] *= 1_000
    assert raised(expected, stalled) == pytest.approx(1.0)


def test_what_is_compared_is_busy_and_not_overloaded() -> None:
    means = {}
    for load in (0.2, 0.75, 1.5):
        found = of_model(TIMING, requests_at(load, TIMING, 400))
        early, late = [
            sum(found[number] for number in half) / 200 for half in (range(200), range(200, 400))
        ]
        means[load] = early + late
        assert (late < 2 * early) is (load < 1), "queues only grow beyond what it can do"
    assert means[0.2] * 1.5 < means[0.75] < means[1.5] / 3


def test_running_requests_slow_prompts_down_and_a_prompt_waits_for_one_step() -> None:
    alone = answered(Work(900, 1, 1.0, tag="asked"))["asked"]
    runs = [Work(10, 400, 0.0, tag=number) for number in range(20)]
    beside = answered(*runs, Work(900, 1, 1.0, tag="asked"))["asked"]
    step = 0.01 + 20 * (1e-3 + 1e-7 * 410)
    assert alone < beside < alone + 2 * step


def test_the_constants_are_there_and_the_model_that_is_served_is_wider() -> None:
    assert 0 < served().pair < constants().pair
    assert served().token == constants().token


def requests(count: int) -> list[Asking]:
    """Conversations of four turns, each longer by three blocks."""
    made, keys = [], orgs()
    for number in range(count):
        conversation, turn = number % 10, number // 10 % 4
        blocks = tuple(1000 * conversation + block for block in range(3 * turn + 3))
        request = Request(number / 10, str(conversation), blocks, 512, 512 * len(blocks), 20, "made up")
        made.append(Asking(number, request.at_s, request, keys[conversation % len(keys)]))
    return made


@pytest.mark.parametrize("router", [Exact, LeastLoaded, Ours, RoundRobin])
async def test_every_request_is_answered_and_hits_what_its_replica_has(router: type[Router]) -> None:
    fleet = Fleet(TIMING, 3, COLUMNS, [keys.org for keys in orgs()])
    result = await fleet.play(requests(40), router(), speed=0.5)
    assert len(result.seconds) == 40
    assert min(result.seconds) > 0
    assert 0 <= result.cached < result.asked


async def test_no_router_is_below_the_floor() -> None:
    least = floor(TIMING, requests(40))
    for router in (Exact, Ours):
        fleet = Fleet(TIMING, 3, COLUMNS, [keys.org for keys in orgs()])
        result = await fleet.play(requests(40), router(), speed=0.5)
        for share in (0.05, 0.5, 0.95):
            assert result.at(share) >= least.at(share) - 1e-9
        assert result.mean > least.mean
        assert result.cached <= least.cached


async def test_ours_finds_what_was_sent_before_any_map_knows() -> None:
    """Four times faster than maps."""
    hits = {}
    for router in (Ours, RoundRobin):
        fleet = Fleet(TIMING, 3, COLUMNS, [keys.org for keys in orgs()])
        hits[router] = (await fleet.play(requests(40), router(), speed=4.0)).hit_rate
    assert hits[Ours] > 1.5 * hits[RoundRobin]


async def test_at_capacity_no_session_gets_ahead_of_itself() -> None:
    fleet = Fleet(TIMING, 2, COLUMNS, [keys.org for keys in orgs()])
    asked = requests(40)
    result = await fleet.play(asked, Exact(), speed=1.0, at_once=16)
    assert len(result.seconds) == 40
    for one in asked:
        later = [other for other in asked if other.request.session == one.request.session]
        assert [other.sent for other in later] == sorted(other.sent for other in later)


def test_requests_of_one_moment_are_spread_until_the_next() -> None:
    keys = orgs()[0]
    at = [0.0, 0.0, 0.0, 3.0, 3.0, 9.0]
    request = Request(0.0, "one", (1,), 512, 512, 1, "made up")
    found = spread([Asking(number, one, request, keys) for number, one in enumerate(at)])
    assert [one.at for one in found] == [0.0, 1.0, 2.0, 3.0, 6.0, 9.0]
    assert [one.number for one in found] == list(range(6))


@pytest.mark.parametrize("count", [shared.JUDGED_FROM - 1, shared.JUDGED_FROM])
def test_what_borrowing_gives_is_judged_by_enough_requests_or_not_at_all(count: int) -> None:
    requests = range(count)
    alone = Result([2.0], dict.fromkeys(requests, 2.0), asked=1)
    borrowed = Result([1.0], dict.fromkeys(requests, 1.0), dict.fromkeys(requests, 64), asked=1)
    row = next(shared.rows("60.memory", [(alone, borrowed, ())], shared.GOAL))
    assert (row.ratio, row.more["requests"]) == (2.0, count)
    assert row.holds == (True if count == shared.JUDGED_FROM else None)


def test_requests_of_either_run_are_compared_as_if_the_runs_could_change_places() -> None:
    """Each is busy where the other is not; of one run alone the choice says that this run is slower."""
    one, other = {0: 4.0, 1: 1.0, 2: 9.0}, {0: 1.0, 1: 4.0, 2: 9.0}
    alone = Result([1.0], one, {}, asked=1)
    borrowed = Result([1.0], other, {1: 64}, asked=1)
    found = {row.id: row for row in shared.rows("60.memory", [(alone, borrowed, {0})], shared.GOAL)}
    ratios = {name.rpartition(".")[2]: row.ratio for name, row in found.items()}
    assert ratios == {"memory": 0.25, "would": 4.0, "either": 1.0, "of_all": 1.0}


async def test_who_would_borrow_is_noted_and_placed_as_if_nobody_could() -> None:
    async def play(router: Router) -> Result:
        fleet = Fleet(TIMING, 3, COLUMNS, [keys.org for keys in orgs()], Transfers(0.001, 1e-6))
        return await fleet.play(requests(80), router, speed=2.0)

    router = WouldBorrow()
    assert (await play(router)).by_request == (await play(Ours())).by_request
    assert len(router.which) > 2


class LeavesOut(Sharing):
    """Borrows, but not for this request."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._borrows = True

    async def place(self, asking: Asking, now: float) -> int:
        self._borrows = asking.number != self._number
        return await super().place(asking, now)

    def _with_siblings(self, candidates: list[Candidate], hits: Sequence[int]) -> list[Candidate]:
        return super()._with_siblings(candidates, hits) if self._borrows else candidates


async def test_what_a_borrow_brings_by_itself_is_what_the_run_had_been_without_it() -> None:
    async def play(router: Router) -> Result:
        fleet = Fleet(TIMING, 3, COLUMNS, [keys.org for keys in orgs()], Transfers(0.001, 1e-6))
        return await fleet.play(requests(80), router, speed=2.0)

    borrowing = await play(Sharing())
    router = shared.LeavingOut(borrowing.borrowed)
    assert (await play(router)).by_request == borrowing.by_request
    assert router.seconds.keys() == borrowing.borrowed.keys()
    assert len(router.seconds) > 2
    for number, seconds in router.seconds.items():
        assert seconds == (await play(LeavesOut(number))).by_request[number]
    assert any(seconds != borrowing.by_request[number] for number, seconds in router.seconds.items())


def test_what_borrows_bring_by_themselves_is_compared_and_judged() -> None:
    numbers = range(shared.JUDGED_FROM)
    run = Result(by_request=dict.fromkeys(numbers, 1.0), borrowed=dict.fromkeys(numbers, 64))
    left_out = {**dict.fromkeys(numbers, 2.0), 0: 0.5}
    [row] = shared.by_itself("60.memory", [(run, left_out), (Result(), {})], shared.GOAL)
    assert (row.ratio, row.holds) == (2.0, True)
    assert (row.more["requests"], row.more["later with it"]) == (len(numbers), 1)
    assert not list(shared.by_itself("60.memory", [(Result(), {})], shared.GOAL))


def test_draws_are_of_whole_speeds() -> None:
    """Of two speeds, each is drawn twice by a fourth of all draws."""
    speeds = [([2.0] * 9, [1.0] * 9), ([3.0] * 10, [1.0] * 10)]
    [row] = shared._compared("of.two", "without", speeds, None)
    assert (row.ratio, row.more["draws from %"], row.more["draws to %"]) == (3.0, 200.0, 300.0)
