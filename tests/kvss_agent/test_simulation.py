"""Weeks of a shard's life in seconds: connections are cut anywhere, agents crash, drivers repeat
themselves, shards move, shrink and grow; and no reader ever gets a wrong byte. From a seed.

`make sim SEEDS=1000 STEPS=1000` runs longer. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.kvss_agent.simulation import Simulation

SEEDS = int(os.environ.get("SEEDS", "40"))
STEPS = int(os.environ.get("STEPS", "400"))
ONLY_SEED = os.environ.get("SEED", "")


@pytest.mark.sim
def test_a_driver_and_two_agents_on_a_bad_network() -> None:
    seeds = [int(ONLY_SEED)] if ONLY_SEED else range(SEEDS)
    seen: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            for _ in range(STEPS):
                simulation.step()
            simulation.come_to_rest()
        except BaseException:
            print(f"\nseed {seed} of {STEPS} steps: repeat it with `make sim SEED={seed} STEPS={STEPS}`")
            raise
        seen += simulation.seen
    print(f"\ndata plane: {len(seeds)} seeds of {STEPS} steps: {dict(sorted(seen.items()))}")
    if not ONLY_SEED:  # a simulation in which nothing happens proves nothing
        for what in ("hit", "miss stale", "miss torn", "cut", "crash", "repeated", "move", "pulled"):
            assert seen[what] > 0, f"no {what} in {len(seeds)} seeds of {STEPS} steps"
