"""Whose requests and bodies a server has time for, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kvss_agent.http.pace import (
    ADVANCE_SECONDS,
    ASKS_SECONDS,
    BYTE_SECONDS,
    MEASURED_REQUESTS,
    REQUEST_SECONDS,
    SHARE,
    UNWANTED_BYTES_PER_SECOND,
    Pace,
)

PIECE = 64 << 10
SPARED = int(ADVANCE_SECONDS * SHARE / BYTE_SECONDS)  # so many bytes wait for nothing


def moved_in_a_second(pace: Pace, owner: str, *, others: bool) -> int:
    """Bytes of an owner that sends as fast as it may, piece by piece, on a fast network."""
    now, size = 100.0, 0
    while now < 101.0:
        pace.asks(owner, now)
        if others:
            pace.asks("other", now)
        size += PIECE
        now += max(pace.moved(owner, PIECE, now), PIECE / 1e9)
    return size


def test_who_is_alone_has_all_of_it() -> None:
    assert moved_in_a_second(Pace(), "acme", others=False) > 0.9e9


def test_beside_others_an_owner_has_a_part_over_all_its_connections() -> None:
    moved = moved_in_a_second(Pace(), "acme", others=True)
    assert moved == pytest.approx(SHARE / BYTE_SECONDS, rel=0.1)


def test_a_pause_is_that_of_all_connections_of_the_owner_and_of_nobody_else() -> None:
    pace = Pace()
    for owner in ("acme", "globex"):
        pace.asks(owner, 0.0)
    first, second = (pace.moved("acme", SPARED, 0.0) for _ in range(2))
    assert (first, second) == pytest.approx((0, ADVANCE_SECONDS))
    assert pace.moved("globex", SPARED, 0.0) == 0


def test_requests_wait_for_what_their_own_owner_has_had_and_for_nothing_else() -> None:
    pace = Pace()
    for owner in ("acme", "globex"):
        pace.asks(owner, 0.0)
    assert pace.moved("acme", SPARED, 0.0) == 0, "an owner has a little in advance"
    waits = [pace.begins("acme", 0.0) for _ in range(4)]
    assert waits == pytest.approx([number * REQUEST_SECONDS / SHARE for number in range(4)], abs=1e-6)
    assert pace.begins("globex", 0.0) == 0
    pace.asks("globex", 1.0)
    assert pace.begins("acme", 1.0) == 0, "it has paid for all of that"


def begun_in_a_second(pace: Pace, spend: Callable[[], None]) -> int:
    """Requests of an owner that sends one after the other beside another owner."""
    now, count = 100.0, 0
    while now < 101.0:
        for owner in ("acme", "globex"):
            pace.asks(owner, now)
        now += pace.begins("acme", now) + 1e-5
        spend()
        count += 1
    return count


@pytest.mark.parametrize(
    ("each", "charged"), [(0.0002, 0.0002), (0.0005, 0.0005), (0.005, REQUEST_SECONDS)]
)
def test_requests_that_take_less_than_thought_are_charged_what_they_take(
    each: float, charged: float
) -> None:
    spent = [50.0]

    def spend() -> None:
        spent[0] += each

    pace = Pace(lambda: spent[0])
    for _ in range(2 * MEASURED_REQUESTS + 1):  # what came before the first ones is not theirs
        pace.begins("acme", 0.0)
        spend()
    assert begun_in_a_second(pace, spend) == pytest.approx(SHARE / charged, rel=0.1)


def spent_in_two_seconds(takes: Mapping[str, float]) -> dict[str, float]:
    """By owners whose requests take so long, and who send one after the other to one processor."""
    spent = dict.fromkeys(takes, 0.0)
    pace, now = Pace(lambda: sum(spent.values())), 100.0
    begins_at = dict.fromkeys(takes, now)
    while now < 102.0:
        owner = min(takes, key=lambda one: begins_at[one])
        now = max(now, begins_at[owner]) + takes[owner]
        spent[owner] += takes[owner]
        pace.asks(owner, now)
        begins_at[owner] = now + pace.begins(owner, now)
    return spent


def test_short_requests_of_others_do_not_pay_for_long_ones() -> None:
    takes = {"acme": REQUEST_SECONDS} | dict.fromkeys("abcd", REQUEST_SECONDS / 10)
    spent = spent_in_two_seconds(takes)
    assert spent["acme"] / 2.0 <= 1.1 * SHARE
    for owner in "abcd":
        assert spent[owner] / takes[owner] >= 0.9 * 2.0 * SHARE / REQUEST_SECONDS


def test_short_requests_of_several_owners_are_more_and_as_many_of_each() -> None:
    spent = spent_in_two_seconds(dict.fromkeys("abc", REQUEST_SECONDS / 10))
    for owner in "abc":
        assert spent[owner] / (REQUEST_SECONDS / 10) >= 3 * 2.0 * SHARE / REQUEST_SECONDS
    assert max(spent.values()) <= 1.1 * min(spent.values())


def test_who_has_not_asked_for_a_while_shares_nothing() -> None:
    pace = Pace()
    pace.asks("globex", 0.0)
    assert pace.moved("acme", 2 * SPARED, ASKS_SECONDS / 2) > 0
    assert pace.moved("acme", 2 * SPARED, ASKS_SECONDS * 1.1) == 0


def test_a_debt_ends_when_nobody_else_asks_any_more() -> None:
    pace = Pace()
    pace.asks("globex", 0.0)
    assert pace.moved("acme", 1 << 30, 0.0) > 10
    assert pace.begins("acme", 1.0) == 0


def test_who_is_gone_and_has_paid_is_forgotten() -> None:
    """Orgs come and go, and an engine's driver runs for months."""
    pace, now = Pace(), 0.0
    for number in range(100):
        now += 2 * ASKS_SECONDS
        for owner in (f"org:{number}", "org:other"):
            pace.asks(owner, now)
        for owner in (f"org:{number}", "org:other"):
            pace.begins(owner, now)
            pace.moved(owner, 4 * SPARED, now)  # which takes longer to pay than it asks
    assert len(pace._paid_until) <= 4
    assert len(pace._asked_at) <= 4


def test_bodies_that_nobody_wants_share_one_pace_though_nobody_asks() -> None:
    pace = Pace()
    assert [pace.unwanted(UNWANTED_BYTES_PER_SECOND, 5.0) for _ in range(3)] == [1.0, 2.0, 3.0]
