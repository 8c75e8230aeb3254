"""Places are given out as long as there are some, and all are given back, whatever happens."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from inference_brain.admission import Admission, Reason, Rejected, Room
from inference_brain.admission.pool import BURST, Pool, State, Waiting
from tests.inference_brain.admission.tickets import Rooms, ticket

ORGS = ("a", "b", "c")
PREFIXES = {org: tuple(b"%s %d" % (org.encode(), number) for number in range(40)) for org in ORGS}
STEPS = some.lists(
    some.tuples(
        some.sampled_from(["enter", "enter", "enter", "first", "leave", "pass"]),
        some.integers(0, 1000),
        some.floats(0, 3),
    ),
    max_size=120,
)


def entering(pool: Pool, number: int, now: float, *, at_once: bool = False) -> Waiting | Rejected:
    org = ORGS[number % 3]
    chain = PREFIXES[org] if number % 2 else ()
    asked = ticket(
        org=org, prompt=100 + number * 3, chain=chain, compute_rate=1000.0, wait_seconds=5.0, queued=8
    )
    try:
        return pool.enter(asked, now, at_once=at_once)
    except Rejected as refused:
        return refused


@given(STEPS)
def test_who_goes_ahead_at_once_leaves_all_as_who_was_queued(
    steps: list[tuple[str, int, float]],
) -> None:
    now, pools = 0.0, (Pool(Room(3, 2000, 2)), Pool(Room(3, 2000, 2)))
    there: list[tuple[Waiting, ...]] = []
    for what, number, seconds in steps:
        if what == "enter":
            outcomes = [entering(pool, number, now, at_once=pool is pools[0]) for pool in pools]
            both = tuple(one for one in outcomes if isinstance(one, Waiting))
            assert len(both) != 1
            there += [both] if both else []
        elif what == "pass":
            now += seconds
        elif there:
            both = there[number % len(there)]
            for pool, one in zip(pools, both, strict=True):
                if what == "first" and one.state is State.PLACED:
                    pool.first_token(one, now)
                elif what == "leave":
                    pool.leave(one, number % 7, number % 5)
            if what == "leave":
                there.remove(both)
        for pool in pools:
            pool.pump(now)
        assert all(one.state is other.state for one, other in there)
        first, second = ([pool.counters[org] for org in ORGS] for pool in pools)
        assert first == second
        assert pools[0].report() == pools[1].report()
        assert pools[0].expected_wait(ticket(), now) == pools[1].expected_wait(ticket(), now)


@given(STEPS)
def test_all_places_are_given_back_whatever_happens(steps: list[tuple[str, int, float]]) -> None:
    pool, now = Pool(Room(3, 2000, 2)), 0.0
    there: list[Waiting] = []
    for what, number, seconds in steps:
        if what == "enter":
            outcome = entering(pool, number, now)
            there += [outcome] if isinstance(outcome, Waiting) else []
        elif what == "pass":
            now += seconds
        elif there:
            one = there[number % len(there)]
            if what == "first" and one.state is State.PLACED:
                pool.first_token(one, now)
            elif what == "leave":
                pool.leave(one, number % 7, number % 5)
                there.remove(one)
        for one in pool.pump(now):
            assert one.state is State.PLACED
        placed = [one for one in there if one.state is State.PLACED]
        assert pool.placed == len(placed) == sum(pool.placed_of.values())
        assert pool.placed <= 3 * BURST + 1
        assert pool.prefilling == sum(one.prefilling for one in placed)
        if pool.queue and not any(one.state is State.QUEUED and one.parked_until for one in there):
            # Somebody waits, so there is no room: work is conserved.
            assert pool.placed >= 3 or pool.prefilling >= 2000
    for one in there:
        pool.leave(one, 0, 0)
        pool.leave(one, 0, 0)
    assert (pool.placed, pool.prefilling, len(pool.queue), len(pool.flights)) == (0, 0, 0, 0)
    assert pool.next_pump() is None
    assert not pool.demand()


@pytest.mark.parametrize("seed", range(3))
async def test_requests_that_are_cut_off_anywhere_leave_nothing_behind(seed: int) -> None:
    randomness = random.Random(seed)
    admission = Admission(Rooms(4, prefill_tokens=500))

    async def one(number: int) -> None:
        asked = ticket(
            org=ORGS[number % 3],
            prompt=randomness.randrange(50, 3000),
            chain=PREFIXES[ORGS[number % 3]],
            compute_rate=1e6,
            wait_seconds=randomness.choice([0.001, 0.01, 5.0]),
            concurrent=30,
            tokens_per_minute=10_000_000,
        )
        try:
            with await admission.enter(asked) as place:
                await asyncio.sleep(randomness.uniform(0, 0.003))
                place.routed("r1")
                await asyncio.sleep(randomness.uniform(0, 0.003))
                place.first_token()
                if number % 5 == 0:
                    1 / 0  # noqa: B018 - something fails
                await asyncio.sleep(randomness.uniform(0, 0.003))
                place.leave(number)
        except (Rejected, ZeroDivisionError):
            pass

    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(one(number)))
        if number % 3 == 0:
            asyncio.get_running_loop().call_later(
                randomness.uniform(0, 0.02), randomness.choice(tasks).cancel
            )
        if number % 10 == 0:
            await asyncio.sleep(0.002)
    await asyncio.gather(*tasks, return_exceptions=True)
    pool = admission.pools["m"]
    assert (pool.placed, pool.prefilling, len(pool.queue), len(pool.flights)) == (0, 0, 0, 0)
    assert {admission.limits.running(org) for org in ORGS} == {0}
    async with asyncio.timeout(1):
        (await admission.enter(ticket())).leave()


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    pool, now = Pool(Room(1, 1 << 30)), 0.0
    first = [pool.enter(ticket(answer=100, wait_seconds=60.0), now) for _ in range(10)]
    for one in first:  # one leaves each second
        pool.pump(now)
        now += 1.0
        pool.leave(one, 100, 100)
    backlog = [pool.enter(ticket(wait_seconds=60.0), now) for _ in range(10)]
    pool.pump(now)
    with pytest.raises(Rejected) as refused:
        pool.enter(ticket(wait_seconds=4.0), now)
    assert (refused.value.status, refused.value.code) == (503, Reason.DEADLINE)
    assert 3 <= (refused.value.retry_after or 0) <= 8  # nine wait before it, and it may wait for 4 s
    with pytest.raises(Rejected):
        pool.enter(ticket(deadline=5.0, first_token_seconds=2.0), now)
    pool.enter(ticket(wait_seconds=20.0), now)
    pool.enter(ticket(org="other", wait_seconds=4.0), now)  # it has its own turn
    assert len(pool.queue) == len(backlog) - 1 + 2


def test_who_may_not_wait_is_refused_where_there_is_no_place() -> None:
    """Also if nobody waits."""
    pool = Pool(Room(1, 1 << 30))
    pool.enter(ticket(queued=0), 0.0, at_once=True)
    with pytest.raises(Rejected) as refused:
        pool.enter(ticket(queued=0), 0.0, at_once=True)
    assert (refused.value.status, refused.value.code) == (429, Reason.QUEUE)


def test_an_org_that_has_less_than_its_share_need_not_wait_for_a_place() -> None:
    pool = Pool(Room(16, 1 << 30))
    for _ in range(20):
        pool.enter(ticket(org="greedy"), 0.0)
    assert len(pool.pump(0.0)) == 16
    small = pool.enter(ticket(org="small"), 1.0)
    assert pool.pump(1.0) == [small]
    assert not pool.pump(1.0)


def test_a_priority_is_at_most_what_the_org_may_name() -> None:
    pool = Pool(Room(0, 1 << 30))
    told = [90, 10, None, 35, 100]
    entered = [pool.enter(ticket(priority=one), 0.0) for one in told]
    pool.room = Room(9, 1 << 30)
    assert [told[entered.index(one)] for one in pool.pump(0.0)] == [90, None, 35, 100, 10]
