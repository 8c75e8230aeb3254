"""A jump of the machine's clock expires nothing until it has lasted."""

from __future__ import annotations

import time

import pytest

from kvss_agent.wall_clock import BELIEVED_AFTER_SECONDS, STEP_SECONDS_MAX, WallClock

NOW = 1_800_000_000.0
DAY = 86_400.0


class Machine:
    """Its clock, and how long it has been on."""

    def __init__(self) -> None:
        self.ahead, self.elapsed = 0.0, 100.0
        self.clock = WallClock(lambda: NOW + self.elapsed + self.ahead, lambda: self.elapsed)

    def shows(self, seconds: float) -> bool:
        """Whether the clock is at so many seconds after NOW."""
        return self.clock() == pytest.approx(NOW + seconds, abs=0.001)


def test_it_is_the_clock_of_the_machine() -> None:
    before = time.time()
    assert before - 1 <= WallClock()() <= time.time() + 1


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_jump_is_believed_once_it_has_lasted(jump: float, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.ahead = jump
    assert machine.shows(100)
    machine.elapsed += BELIEVED_AFTER_SECONDS - 1
    assert machine.shows(100 + BELIEVED_AFTER_SECONDS - 1), "time goes on"
    machine.elapsed += 1
    assert machine.shows(100 + BELIEVED_AFTER_SECONDS + jump)
    (said,) = caplog.messages
    assert f"was set {'forward' if jump > 0 else 'back'} by 86400 s" in said


def test_a_jump_that_is_put_right_is_none() -> None:
    machine = Machine()
    machine.ahead = DAY
    machine.clock()
    machine.elapsed += BELIEVED_AFTER_SECONDS - 1
    machine.ahead = 0.5
    assert machine.shows(machine.elapsed + 0.5)
    machine.ahead = DAY
    machine.elapsed += 1
    assert machine.shows(machine.elapsed + 0.5), "the next one has to last from its own beginning"


def test_a_jump_to_yet_another_time_has_to_last_from_then_on() -> None:
    machine = Machine()
    machine.ahead = DAY
    machine.clock()
    machine.elapsed += BELIEVED_AFTER_SECONDS - 1
    machine.ahead = 2 * DAY
    machine.clock()
    machine.elapsed += 1
    assert machine.shows(machine.elapsed)


def test_small_steps_are_followed_at_once() -> None:
    machine = Machine()
    for _ in range(3):
        machine.ahead += STEP_SECONDS_MAX - 1
        assert machine.shows(machine.elapsed + machine.ahead)
