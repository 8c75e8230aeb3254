"""How far the calendar is ahead, of late."""

from __future__ import annotations

from swdriver_shim.data_plane.calendar import SECONDS_MAX, Calendar

HOUR = 3600.0
AHEAD = 1.8e9


class World:
    def __init__(self) -> None:
        self.now, self.wrong = 100.0, 0.0
        self.calendar = Calendar(lambda: self.now + AHEAD + self.wrong, lambda: self.now)

    def offsets(self, ttl_seconds: float = HOUR) -> tuple[float, float]:
        least, most = self.calendar.offsets(ttl_seconds)
        return least - AHEAD, most - AHEAD


def test_a_calendar_that_is_right_has_one_offset() -> None:
    world = World()
    for _ in range(3):
        assert world.offsets() == (0, 0)
        world.now += HOUR


def test_a_calendar_that_was_wrong_counts_as_long_as_something_may_live_that_was_dated_by_it() -> None:
    world = World()
    world.offsets()
    world.wrong = 2 * HOUR
    assert world.offsets() == (0, 2 * HOUR)
    world.wrong = 0
    world.now += 3 * HOUR - 1  # dated two hours too late, and then for an hour
    assert world.offsets() == (0, 2 * HOUR)
    world.now += 2
    assert world.offsets() == (0, 0)


def test_a_calendar_that_was_wrong_at_the_start_is_forgotten_as_well() -> None:
    world = World()
    world.wrong = -2 * HOUR
    world.offsets()
    world.wrong = 0
    assert world.offsets() == (-2 * HOUR, 0)
    world.now += 3 * HOUR + 1
    assert world.offsets() == (0, 0)


def test_a_calendar_that_drifts_is_known_by_its_last_hours() -> None:
    world = World()
    for second in range(20_000):
        world.now += 1
        world.wrong = second / 1000
        least, most = world.offsets()
    assert 19.99 < most < 20
    assert 0 < most - least < 5
    assert len(world.calendar._seen) < SECONDS_MAX


def test_of_a_calendar_that_is_never_twice_the_same_the_last_are_remembered() -> None:
    world = World()
    for second in range(2 * SECONDS_MAX):
        world.wrong = 10 * second
        world.offsets()
    assert len(world.calendar._seen) == SECONDS_MAX
