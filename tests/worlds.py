"""The simulations that are lived for long (`make sim-long`), and what has to be seen in their lives."""

from __future__ import annotations

import gc
import os
from collections import Counter
from typing import Final

from tests.kvss_agent.simulation import Simulation as DataPlane
from tests.lives import Life, Worlds, failed, report
from tests.swdriver_shim.documents import Documents
from tests.swdriver_shim.simulation import Simulation as Driver

WORLDS: Final[Worlds] = {"driver": Driver, "plane": DataPlane, "documents": Documents}

# What has to happen, or a simulation proves nothing: in each mix of lives, and in 100,000 steps.
OFTEN: Final = {
    "driver": (
        *("hit", "tokens from dram", "stored", "spilled", "resized"),
        *("crash", "cut", "held up", "a bit flipped", "a file was spoilt", "a disk failed"),
        *("a purge was done", "missed: expired", "missed: displaced", "missed: quota"),
        "missed: agent_lost",
        *("a sibling lent something", "columns were borrowed", "tokens from sibling"),
        *("a process stood still", "a connection was slow", "an earlier version was spoken"),
        *("redundant columns were spilled", "redundant columns outlived all disks"),
        "a store was away",
    ),
    "documents": (
        *("it was taken", "it came twice", "an older one came", "one was skipped"),
        *("an earlier console wrote", "an earlier driver refused what is new", "a driver was upgraded"),
        "what was purged was left out",
    ),
    "plane": ("hit", "miss stale", "miss torn", "cut", "crash", "repeated", "move", "pulled"),
}
SELDOM: Final = {
    "driver": (
        *("recalled", "restored", "moved", "pulled", "late", "more was loaded", "a removal was done"),
        *("moved away from a front", "promoted", "not stored"),
        *("tokens from tier2", "missed: seal_refused", "missed: purged", "missed: deleted"),
        *("missed: tier2_late", "missed: not_worth_it", "missed: writing", "an engine failed"),
        *("the calendar was put back", "the calendar was put ahead", "a disk was full"),
        *("an agent changed its version", "a driver changed its version"),
        *("a disk was lost", "redundant columns were recalled"),
        *("what waited in front was copied behind", "columns were lost that waited in front"),
        *("read in front", "copies in front: purged", "waiting in front: purged"),
    ),
    "documents": ("another came", "a driver was restarted", "the last console was upgraded"),
    "plane": (),
}
SELDOM_STEPS: Final = 100_000

SEEDS = int(os.environ.get("SEEDS") or 0)
STEPS = int(os.environ.get("STEPS") or 0)  # of each life; by default some are short, and some long
ONLY_SEED = os.environ.get("SEED", "")
ONLY_LIFE = os.environ.get("LIFE", "")
STEPS_A_SECOND = 300  # at the very least
SHRINK_SECONDS = float(os.environ.get("SHRINK_SECONDS", "60"))


def length_of(seed: int) -> int:
    """Of a life in the everyday suite: most are short, some are long."""
    if seed % 20 == 19:
        return 2000
    return 600 if seed % 5 == 2 else 200


def unseen(world: str, seen: dict[str, int], steps: int) -> list[str]:
    """What should have happened in so many steps of many lives, and has not."""
    wanted = (*OFTEN[world], *(SELDOM[world] if steps >= SELDOM_STEPS else ()))
    return [what for what in wanted if not seen.get(what)]


def lives(world: str, seeds: int = 20) -> list[Life]:
    """Those that are asked for; so many, if nothing is."""
    if ONLY_LIFE:
        only = Life.parse(ONLY_LIFE)
        return [only] if only.world == world else []
    numbers = [int(ONLY_SEED)] if ONLY_SEED else range(SEEDS or seeds)
    return [Life.of(world, seed, STEPS or length_of(seed)) for seed in numbers]


def live(asked: list[Life]) -> None:
    """All of these, and see that enough happens in them."""
    seen: Counter[str] = Counter()
    for life in asked:
        lived: list[int] = []
        try:
            seen += life.run(WORLDS, lived=lived)
        except BaseException as error:
            if not ONLY_LIFE:
                broken = failed(Life(life.world, life.seed, tuple(lived)), error)
                print(f"\n{report(broken, WORLDS, SHRINK_SECONDS)}")
            raise
    gc.collect()
    steps = sum(len(life.steps) for life in asked)
    if asked:
        print(f"\n{asked[0].world}: {len(asked)} lives, {steps} steps: {dict(sorted(seen.items()))}")
    if asked and not (ONLY_SEED or ONLY_LIFE):
        missing = unseen(asked[0].world, seen, steps)
        assert not missing, f"not seen in {steps} steps: {', '.join(missing)}"
