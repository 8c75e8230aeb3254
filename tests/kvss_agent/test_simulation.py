"""Weeks of a shard's life in seconds: connections are cut anywhere, agents crash, drivers repeat
themselves, shards move, shrink and grow; and no reader ever gets a wrong byte. From a seed.

`make sim SEEDS=1000 STEPS=1000` runs longer. A failure is shrunk, and prints what repeats it.
"""

from __future__ import annotations

import pytest

from tests.worlds import live, lives


@pytest.mark.sim
def test_a_driver_and_two_agents_on_a_bad_network() -> None:
    live(lives("plane", 40))
