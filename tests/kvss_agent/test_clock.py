"""A clock does its work when the time for it has come, and at none before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from kvss_agent.clock import FOREVER, Clock


class Work:
    """Says when it was called, and the next moment: what a test wants, or none."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[float] = SimpleQueue()
        self.next = FOREVER
        self.clock = Clock(self._tick, "a test's clock")

    def _tick(self) -> float:
        self.calls.put(time.monotonic())
        following, self.next = self.next, FOREVER
        return following


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.clock.stop()
    assert made.calls.empty()


def test_it_sleeps_until_the_earliest_moment_that_it_was_given(work: Work) -> None:
    soon = time.monotonic() + 0.2
    work.clock.at(soon + 1000.0)
    work.clock.at(soon)
    work.clock.at(soon + 500.0)
    assert work.calls.get(timeout=60.0) >= soon


def test_it_comes_again_when_its_work_says(work: Work) -> None:
    work.next = again = time.monotonic() + 0.3
    work.clock.at(again - 0.2)
    assert work.calls.get(timeout=60.0) >= again - 0.2
    assert work.calls.get(timeout=60.0) >= again


def test_a_moment_that_is_over_is_now(work: Work) -> None:
    work.clock.at(0.0)
    assert work.calls.get(timeout=60.0) > 0.0
