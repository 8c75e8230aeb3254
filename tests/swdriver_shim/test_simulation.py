"""Months of a driver's life, with its agents and their disks, in minutes: whatever breaks, nobody gets a
byte that is not theirs, too old, torn or removed. From a seed.

`make sim SEEDS=1000 STEPS=1000` runs longer. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest

from tests.swdriver_shim.simulation import Simulation

SEEDS = int(os.environ.get("SEEDS", "20"))
STEPS = int(os.environ.get("STEPS", "400"))
ONLY_SEED = os.environ.get("SEED", "")
STEPS_A_SECOND = 300  # at the very least

# What has to happen, or the simulation proves nothing.
OFTEN = (
    *("hit", "tokens from dram", "stored", "not stored", "spilled", "resized"),
    *("crash", "cut", "held up", "a bit flipped", "a file was spoilt", "a disk failed"),
    *("a purge was done", "missed: expired", "missed: evicted", "missed: quota", "missed: agent_lost"),
)
SELDOM = (
    *("recalled", "restored", "moved", "pulled", "late", "more was loaded", "a removal was done"),
    *("tokens from tier2", "missed: seal_refused", "missed: purged", "missed: deleted"),
    *("missed: tier2_late", "missed: not_worth_it", "missed: writing", "an engine failed"),
)


@pytest.mark.sim
@pytest.mark.timeout(60 + SEEDS * STEPS / STEPS_A_SECOND)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of agents that crashed
# The same, where the collector came in a frame that can't warn.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine object (LoopTiering|Tier2)")
def test_a_driver_and_its_agents_whatever_breaks() -> None:
    seeds = [int(ONLY_SEED)] if ONLY_SEED else range(SEEDS)
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += simulate(seed, STEPS)
        except BaseException:
            print(f"\nseed {seed} of {STEPS} steps: repeat it with `make sim SEED={seed} STEPS={STEPS}`")
            raise
    gc.collect()
    print(f"\ndriver and agents: {len(seeds)} seeds of {STEPS} steps: {dict(sorted(seen.items()))}")
    if not ONLY_SEED:
        for what in (*OFTEN, *(SELDOM if len(seeds) * STEPS >= 100_000 else ())):
            assert seen[what] > 0, f"no {what} in {len(seeds)} seeds of {STEPS} steps"


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_seed_is_the_same_life_each_time() -> None:
    lives = [simulate(3, 200) for _ in range(2)]
    gc.collect()
    assert lives[0] == lives[1]


def simulate(seed: int, steps: int) -> Counter[str]:
    with Simulation(seed) as simulation:
        for _ in range(steps):
            simulation.step()
        simulation.come_to_rest()
        return simulation.world.seen + Counter({"turns": simulation.world.turns.slices})
