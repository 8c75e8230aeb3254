"""Months of a driver's life, with its agents and their disks, in minutes: whatever breaks, nobody gets a
byte that is not theirs, too old, torn or removed. From a seed.

`make sim SEEDS=1000 STEPS=1000` runs longer, `make sim-long MINUTES=60` for as long as it is told. A
failure is shrunk, and prints what repeats it.
"""

from __future__ import annotations

import gc

import pytest

from tests.lives import Life
from tests.worlds import SHRINK_SECONDS, STEPS_A_SECOND, WORLDS, live, lives

# Of agents that crashed; and where the collector came in a frame that can't warn.
quiet = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited",
    "ignore:Exception ignored in. <coroutine object (TierRequests|Tier2|Lister)",
)


@pytest.mark.sim
@pytest.mark.timeout(
    60 + SHRINK_SECONDS + sum(len(life.steps) for life in lives("driver")) / STEPS_A_SECOND
)
@quiet
def test_a_driver_and_its_agents_whatever_breaks() -> None:
    live(lives("driver"))


@pytest.mark.sim
@quiet
def test_a_life_is_the_same_each_time() -> None:
    twice = [Life.of("driver", 3, 200).run(WORLDS) for _ in range(2)]
    gc.collect()
    assert twice[0] == twice[1]


@pytest.mark.sim
def test_the_newest_document_holds_however_they_come() -> None:
    live(lives("documents"))
