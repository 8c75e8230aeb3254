"""Days of a machine in seconds: everything dies, hangs and stalls at random, from a seed.

`make sim SEEDS=1000 STEPS=1000` runs longer. A failure prints the seed that repeats it:
`make sim SEED=17`.
"""

from __future__ import annotations

import os
import random

import pytest

from console.stack.core import State
from tests.stack.world import World

SEEDS = int(os.environ.get("SEEDS", "20"))
STEPS = int(os.environ.get("STEPS") or 400)
ONLY_SEED = os.environ.get("SEED", "")
CALM_TICKS = 400  # as long as the longest pause and a few watchdogs


@pytest.mark.sim
def test_the_stack_heals_whatever_happens_to_it() -> None:
    seeds = [int(ONLY_SEED)] if ONLY_SEED else range(SEEDS)
    faults = 0
    for seed in seeds:
        try:
            faults += simulate(random.Random(seed), STEPS)
        except BaseException:
            print(f"\nseed {seed} of {STEPS} steps: repeat it with `make sim SEED={seed} STEPS={STEPS}`")
            raise
    print(f"\nsupervisor: {len(seeds)} seeds of {STEPS} steps, {faults} faults, all healed")


def simulate(chance: random.Random, steps: int) -> int:
    """One machine's life: chaos, calm in which it must come up, and an orderly end."""
    world = World(jitter=chance.uniform(0.8, 1.2))
    faults = 0
    for _ in range(steps):
        faults += misfortune(world, chance)
        if chance.random() < 0.8:
            world.behave()
        world.tick(chance.choice([0.1, 0.5, 1.0]))
    for _ in range(CALM_TICKS):
        world.behave()
        world.tick()
    assert world.core.all_up, {n: s.state for n, s in world.core.services.items()}
    assert world.prepared == 1, "a step that succeeded is not repeated"
    assert all(not process.hangs for process in world.running.values())
    world.stop()
    for _ in range(CALM_TICKS):
        faults += misfortune(world, chance)
        if chance.random() < 0.05:
            world.stop()
        world.behave()
        world.tick()
    assert world.core.all_down
    assert not world.running
    return faults


def misfortune(world: World, chance: random.Random) -> int:
    """Now and then something goes wrong; how much did."""
    if chance.random() < 0.02:
        world.tick(chance.uniform(5, 3_600))  # the lid of the laptop was closed
        return 1
    victims = [name for name, process in world.running.items() if not process.killed]
    if not victims or chance.random() > 0.15:
        return 0
    name = chance.choice(victims)
    if world.core.services[name].spec.once:
        return 0  # whose failure is the end, by design
    if chance.random() < 0.5 and world.core.services[name].state is State.READY and watched(world, name):
        world.running[name].hangs = True
    else:
        world.ends(name)
    return 1


def watched(world: World, name: str) -> bool:
    return world.core.services[name].spec.watchdog_seconds is not None
