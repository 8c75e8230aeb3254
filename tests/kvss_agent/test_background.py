"""How fast moves go, on a clock of the test's own."""

from __future__ import annotations

import pytest

from kvss_agent.limits.background import (
    FASTEST_SECONDS,
    PIECE_BYTES,
    YIELD_SECONDS_MAX,
    Background,
    Fastest,
    Totals,
    Usual,
)

MB = 1_000_000
LINK = 100 * MB  # bytes per second, alone


def moved_in(seconds: float, of: Background, at: float = 0.0, link: float = LINK) -> int:
    """Bytes that it moves in this time, over a link that gives it so much."""
    now, size = at, 0
    while now < at + seconds:
        piece = of.piece()
        took = piece / link
        now += took
        size += piece
        of.moved(piece, took, now)
        now += of.rest(now)
    return size


def test_a_budget_is_kept_to_the_byte_over_a_second() -> None:
    assert moved_in(1.0, Background(lambda: 5 * MB)) == pytest.approx(5 * MB, rel=0.03)


def test_what_was_not_used_is_not_made_up_for() -> None:
    background = Background(lambda: 5 * MB)
    moved_in(1.0, background)
    assert moved_in(1.0, background, at=100.0) == pytest.approx(5 * MB, rel=0.03)


def test_another_budget_counts_from_the_next_piece_on() -> None:
    budget = [5 * MB]
    background = Background(lambda: budget[0])
    moved_in(1.0, background)
    budget[0] = 1 * MB
    assert moved_in(1.0, background, at=1.0) == pytest.approx(1 * MB, rel=0.05)


def test_alone_and_without_a_budget_it_never_rests() -> None:
    totals = Totals()
    assert moved_in(1.0, Background(totals=totals)) == pytest.approx(LINK, rel=0.05)
    assert not any(totals.rested_seconds.values())
    assert totals.bytes == pytest.approx(LINK, rel=0.05)


def test_beside_others_it_leaves_most_of_the_link_and_takes_it_back_afterwards() -> None:
    """Who shares a link with one other gets a half of it; a third of that is asked for here."""
    totals = Totals()
    background = Background(totals=totals)
    moved_in(1.0, background)
    beside = moved_in(1.0, background, at=1.0, link=LINK / 2)
    assert LINK / 8 < beside < LINK / 5
    assert totals.rested_seconds["yield"] > 0.5
    assert moved_in(1.0, background, at=2.0) == pytest.approx(LINK, rel=0.1)


def test_pieces_that_take_longer_by_themselves_are_compared_with_each_other() -> None:
    """As columns whose holders are read one after the other, among those that are read at once."""
    totals, slower, now = Totals(), Fastest(), 0.0
    background = Background(totals=totals)
    for number in range(100):
        is_slower = number % 2 == 0
        now += (took := PIECE_BYTES / LINK * (3 if is_slower else 1))
        background.moved(PIECE_BYTES, took, now, slower if is_slower else None)
    assert totals.rested_seconds["yield"] == 0
    for measure in (None, slower):
        before = totals.rested_seconds["yield"]
        background.moved(PIECE_BYTES, PIECE_BYTES / LINK * 9, now, measure)
        assert totals.rested_seconds["yield"] > before


def test_beside_any_load_it_comes_to_an_end() -> None:
    background = Background()
    moved_in(1.0, background)
    assert moved_in(10.0, background, at=1.0, link=LINK / 100) > 10 * LINK / 100 / 6


def test_a_path_that_is_slower_from_now_on_is_not_yielded_to_for_ever() -> None:
    """Such as one over another switch: after half a minute it is the measure."""
    background = Background()
    moved_in(1.0, background)
    moved_in(2 * FASTEST_SECONDS, background, at=1.0, link=LINK / 4)
    assert moved_in(1.0, background, at=100.0, link=LINK / 4) == pytest.approx(LINK / 4, rel=0.2)


def test_what_is_measured_against_the_usual_does_not_take_a_busy_machine_for_others() -> None:
    """One piece in four is as fast as can be, the others take three times as long."""
    rested = []
    for measure in (None, Usual()):
        totals, now = Totals(), 0.0
        background = Background(totals=totals, measure=measure)
        for number in range(100):
            took = PIECE_BYTES / LINK * (1 if number % 4 == 0 else 3)
            now += took
            background.moved(PIECE_BYTES, took, now)
            now += background.rest(now)
        rested.append(totals.rested_seconds["yield"])
    assert rested[1] < rested[0] / 50


def test_who_comes_is_noticed_by_the_usual_too_until_that_is_what_is_usual() -> None:
    background = Background(measure=Usual())
    moved_in(20.0, background)
    assert moved_in(1.0, background, at=20.0, link=LINK / 2) < LINK / 5
    moved_in(FASTEST_SECONDS, background, at=21.0, link=LINK / 2)
    assert moved_in(1.0, background, at=60.0, link=LINK / 2) == pytest.approx(LINK / 2, rel=0.1)
    assert moved_in(1.0, background, at=61.0) == pytest.approx(LINK, rel=0.1)


def test_pieces_that_bring_nothing_cost_nothing() -> None:
    background = Background(lambda: 1)
    background.moved(0, 5.0, 5.0)
    assert background.rest(5.0) == 0.0


def test_a_source_that_stalls_costs_a_second_at_most() -> None:
    background = Background()
    moved_in(1.0, background)
    background.moved(PIECE_BYTES, 9.0, 10.0)
    assert background.rest(10.0) == YIELD_SECONDS_MAX


def test_who_comes_later_finds_what_is_owed() -> None:
    """As the next pull of a shard: its driver may wait, or does not."""
    background = Background(lambda: 5 * MB)
    background.moved(5 * MB, 0.1, 1.0)
    assert background.rest(1.0) == pytest.approx(0.9)
    assert background.rest(1.5) == pytest.approx(0.4)
    assert background.rest(3.0) == 0.0


def test_pieces_are_small_where_the_budget_is() -> None:
    assert Background().piece() == PIECE_BYTES
    assert Background(lambda: 5 * MB).piece() == 100_000
    assert Background(lambda: 1).piece() == 1


def test_what_is_booked_waits_for_what_was_booked_before() -> None:
    totals = Totals()
    background = Background(lambda: 5 * MB, totals)
    assert [background.book(MB, 10.0) for _ in range(3)] == pytest.approx([0.0, 0.2, 0.4])
    assert background.book(MB, 10.5) == pytest.approx(0.1)
    assert totals.bytes == 4 * MB
    assert totals.rested_seconds["budget"] == pytest.approx(0.2 + 0.2 + 0.1)


def test_what_would_wait_for_too_long_is_not_booked() -> None:
    background = Background(lambda: 5 * MB)
    assert background.book(5 * MB, 10.0, most=0.5) == 0.0
    assert background.book(1, 10.0, most=0.5) is None
    assert background.book(1, 10.5, most=0.5) == pytest.approx(0.5)


def test_however_small_the_budget_is_something_is_moved_at_last() -> None:
    background = Background(lambda: 1)
    assert background.book(100, 10.0, most=2.0) == 0.0
    assert background.book(100, 50.0, most=2.0) is None
    assert background.book(100, 109.0, most=2.0) is not None


def test_without_a_budget_nobody_waits() -> None:
    background = Background()
    assert {background.book(MB, 10.0) for _ in range(100)} == {0.0}


def test_what_one_moves_piece_by_piece_waits_for_what_others_have_booked_and_they_for_it() -> None:
    background = Background(lambda: 5 * MB)
    background.book(MB, 10.0)
    assert background.rest(10.0) == pytest.approx(0.2)
    background.moved(MB, 0.01, 10.2)
    assert background.book(MB, 10.2) == pytest.approx(0.19, abs=0.011)


def test_with_another_budget_what_is_owed_takes_another_time() -> None:
    budget: list[int | None] = [1]
    background = Background(lambda: budget[0])
    background.book(100, 10.0)
    assert background.rest(10.0) == 100.0
    budget[0] = 50
    assert background.rest(10.0) == 2.0
    assert background.book(50, 11.0) == 1.0
    budget[0] = None
    assert background.rest(11.0) == 0.0


def test_who_moves_has_half_beside_those_who_book_as_much_as_they_may() -> None:
    """Repair goes on under any load of spills, and those are late instead."""
    size, budget, now, seconds = 1 << 20, 100 << 20, 0.0, 20.0
    background = Background(lambda: budget)
    moved = booked = 0
    next_move = 0.0
    while now < seconds:
        while background.book(size, now, 2.0) is not None:
            booked += size
        if now >= next_move:
            background.moved(size, 0.0, now)
            moved += size
            next_move = now + background.rest(now, size)
        now += 0.001
    assert moved > 0.4 * budget * seconds
    assert moved + booked < budget * (seconds + 3)
