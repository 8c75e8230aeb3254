"""The first of many requests with the same long prefix computes it; the others follow, and never wait
longer than it would take them."""

from __future__ import annotations

import pytest

from inference_brain.admission import Rejected, Room
from inference_brain.admission.pool import Pool, State, Waiting
from inference_brain.admission.ticket import Reason
from tests.inference_brain.admission.tickets import ticket

RATE = 1000.0
PREFIX = tuple(bytes([number]) for number in range(64))  # 4096 tokens


@pytest.fixture
def pool() -> Pool:
    return Pool(Room(100, 1 << 30))


def entered(pool: Pool, now: float, **more: object) -> Waiting:
    given = {"prompt": 4096, "chain": PREFIX, "compute_rate": RATE, **more}
    waiting = pool.enter(ticket(**given), now)  # type: ignore[arg-type]
    pool.pump(now)
    return waiting


def test_one_goes_ahead_and_the_others_follow_it(pool: Pool) -> None:
    leader = entered(pool, 0.0)
    others = [entered(pool, 0.1) for _ in range(5)]
    assert leader.state is State.PLACED
    assert {one.state for one in others} == {State.QUEUED}
    pool.flights.routed(leader, "r1")
    pool.first_token(leader, 1.0)
    assert pool.pump(1.0) == others
    assert {one.followed for one in others} == {("r1", 4096)}


def test_nobody_waits_longer_than_computing_would_take(pool: Pool) -> None:
    entered(pool, 0.0)
    follower = entered(pool, 1.0)
    assert pool.next_pump() == pytest.approx(1.0 + 4096 / RATE)
    assert not pool.pump(5.0)
    assert pool.pump(5.1) == [follower]
    assert pool.flights.gave_up == 1


def test_a_leader_that_fails_is_followed_by_the_next_leader(pool: Pool) -> None:
    leader = entered(pool, 0.0)
    others = [entered(pool, 0.0) for _ in range(3)]
    pool.leave(leader, 0, 0)
    assert pool.pump(1.0) == others[:1]
    assert others[1].state is State.QUEUED
    assert pool.next_pump() == pytest.approx(4096 / RATE)  # not once more from here on


def test_after_a_purge_nothing_is_known_of_an_orgs_prompts(pool: Pool) -> None:
    leaders = [entered(pool, 0.0, org=org) for org in ("acme", "globex")]
    follower = entered(pool, 0.1, org="acme")
    pool.flights.forget("acme")
    assert {org for org, _ in pool.flights._by_key} == {"globex"}
    pool.first_token(leaders[0], 1.0)
    assert pool.pump(1.0) == [follower]
    pool.flights.forget("acme")
    assert entered(pool, 1.1, org="acme").state is State.PLACED
    assert entered(pool, 1.1, org="globex").state is State.QUEUED
    pool.first_token(leaders[1], 1.2)
    pool.flights.forget(None)
    assert not pool.flights._by_key
    assert not any(flight.keys for flight in pool.flights._landed)


def test_a_leader_that_fails_at_the_very_end_leaves_nobody_behind(pool: Pool) -> None:
    leader = entered(pool, 0.0)
    others = [entered(pool, 0.0) for _ in range(3)]
    pool.leave(leader, 0, 0)
    assert pool.pump(4.2) == others  # they have waited for as long as they may


def test_orgs_do_not_wait_for_each_other(pool: Pool) -> None:
    entered(pool, 0.0, org="acme")
    assert entered(pool, 0.0, org="other").state is State.PLACED


@pytest.mark.parametrize(
    "more",
    [
        {"uncached_tokens": 900},  # too little to wait for
        {"chain": (b"x", *PREFIX[1:20])},  # which shares nothing, as keys are chained
        {"compute_rate": 0.0},  # nobody knows how long to wait
    ],
)
def test_who_has_little_to_gain_goes_on(pool: Pool, more: dict[str, object]) -> None:
    entered(pool, 0.0, chain=PREFIX[:15] if "chain" in more else PREFIX)
    assert entered(pool, 0.0, **more).state is State.PLACED


def test_who_shares_a_part_waits_for_as_long_as_that_part_takes(pool: Pool) -> None:
    entered(pool, 0.0)
    longer = (*PREFIX[:32], *(b"other %d" % number for number in range(40)))
    follower = entered(pool, 0.0, prompt=72 * 64, chain=longer)
    assert follower.parked_until == pytest.approx(2048 / RATE)


def test_who_comes_just_after_the_first_token_is_told_where_the_prefix_is(pool: Pool) -> None:
    leader = entered(pool, 0.0)
    pool.flights.routed(leader, "r1")
    pool.first_token(leader, 1.0)
    assert entered(pool, 2.0).followed == ("r1", 4096)
    assert entered(pool, 9.0).followed is None  # the cache map has it


def test_a_follower_that_leaves_is_forgotten(pool: Pool) -> None:
    leader = entered(pool, 0.0)
    follower = entered(pool, 0.0)
    pool.leave(follower, 0, 0)
    assert pool.next_pump() is None
    pool.first_token(leader, 1.0)
    assert not pool.pump(1.0)


def test_a_place_is_not_kept_for_who_waits_for_another(pool: Pool) -> None:
    pool.room = Room(2, 1 << 30)
    leader = entered(pool, 0.0)
    entered(pool, 0.0)
    assert entered(pool, 0.0, chain=()).state is State.PLACED
    assert leader.state is State.PLACED


def test_who_follows_is_among_those_who_wait(pool: Pool) -> None:
    leader = entered(pool, 0.0, queued=5)
    others = [entered(pool, 0.1, queued=5) for _ in range(5)]
    with pytest.raises(Rejected) as refused:
        entered(pool, 0.1, queued=5)
    assert refused.value.code == Reason.QUEUE
    assert entered(pool, 0.1, org="globex", chain=()).is_placed
    pool.leave(others[0], 0, 0)
    entered(pool, 0.1, queued=5)
    pool.first_token(leader, 1.0)
    pool.pump(1.0)
    assert sum(pool._parked_of.values()) == len(pool._parked)
    for one in [*others, *pool._parked]:
        pool.leave(one, 0, 0)
    assert not pool._parked_of
