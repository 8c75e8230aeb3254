"""Long lives of the simulations, for as many minutes as it is told, on all cores at the lowest priority.

    make sim-long MINUTES=60
    make sim-long STEPS=1000000 WORLD=driver PROCESSES=1 MINUTES=240

The second one ends with so many steps of one world, or when its time is over.

Lives have 1,000 to 20,000 steps, every fourth a few hundred. Seeds go up from a base that is printed:
the time, unless BASE says another. A life that fails is shrunk, and what repeats it is printed and
written to a file. The exit status is 1 if one has failed, if something never happened in many lives, or
if a process did not come back.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Final

from tests.lives import Life, Unfinished, failed, report
from tests.worlds import WORLDS, unseen

SHORTEST, LONGEST = 1_000, 20_000
SHORT: Final = (100, 999)  # steps of every fourth
OTHERS_EVERY: Final = 8  # lives one is of the data plane alone, and one of documents
LIVES_A_PROCESS: Final = 50  # then it begins anew, with its memory
TELL_SECONDS: Final = 30.0
LIVES_MIN: Final = 40  # of fewer, it says nothing that something never happened
PATIENCE_SECONDS: Final = 120.0  # after all should have ended
FOUND: Final = Path(".tidegate/lives")


@dataclass
class Lived:
    """What became of a life."""

    life: Life
    steps: int = 0
    is_over: bool = True  # False if there was no time for the rest of it
    seen: Counter[str] = field(default_factory=Counter)
    failure: str = ""


@dataclass
class Sum:
    lives: int = 0
    unfinished: int = 0
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)


def life_of(seed: int, only: str = "") -> Life:
    """Its length is spread evenly over the orders of magnitude. `only`: of this world."""
    chance = random.Random(f"length of {seed}")
    world = only or {0: "plane", 3: "documents"}.get(seed % OTHERS_EVERY, "driver")
    if seed % 4 == 1:
        return Life.of(world, seed, chance.randint(*SHORT))
    spread = chance.uniform(math.log(SHORTEST), math.log(LONGEST))
    return Life.of(world, seed, round(math.exp(spread)))


def live(asked: tuple[Life, float, float]) -> Lived:
    """In a process of its own."""
    life, until, shrink_seconds = asked
    lived: list[int] = []
    try:
        return Lived(life, len(life.steps), seen=life.run(WORLDS, until, lived))
    except Unfinished:
        return Lived(life, len(lived), is_over=False)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        broken = failed(Life(life.world, life.seed, tuple(lived)), error)
        return Lived(life, len(lived), failure=report(broken, WORLDS, shrink_seconds))


def begin() -> None:
    """A process that is in nobody's way."""
    os.nice(19)
    warnings.simplefilter("ignore")  # of coroutines of agents that crashed
    sys.unraisablehook = lambda _: None


def lives_until(
    until: float, base: int, shrink_seconds: float, steps: int = 0, only: str = ""
) -> Iterator[tuple[Life, float, float]]:
    """`steps`: of all of them together, where there is a bound. The last one is cut to it."""
    left = steps or sys.maxsize
    for seed in itertools.count(base):
        if time.monotonic() >= until or left <= 0:
            return
        life = life_of(seed, only)
        life = Life(life.world, seed, life.steps[:left])
        left -= len(life.steps)
        yield life, until, shrink_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--steps", type=int, default=0, help="of all lives together, at most")
    parser.add_argument("--world", choices=[*WORLDS], default="", help="lives of this one only")
    parser.add_argument("--base", type=int, default=0, help="the first seed; by default from the time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shrink-seconds", type=float, default=180)
    options = parser.parse_args()
    base = options.base or int(time.time())
    ends_at = datetime.now().astimezone() + timedelta(minutes=options.minutes)
    print(
        f"Seeds from {base} on, {options.processes} processes, until {ends_at:%H:%M:%S}. "
        f"The same again: make sim-long MINUTES={options.minutes:g} BASE={base}"
        f"{f' STEPS={options.steps}' if options.steps else ''}"
        f"{f' WORLD={options.world}' if options.world else ''}",
        flush=True,
    )
    sums, failures, began = {world: Sum() for world in WORLDS}, 0, time.monotonic()
    until, told_at = began + 60 * options.minutes, began
    with multiprocessing.Pool(options.processes, begin, maxtasksperchild=LIVES_A_PROCESS) as pool:
        asked = lives_until(until, base, options.shrink_seconds, options.steps, options.world)
        pending = [pool.apply_async(live, (one,)) for one in islice(asked, options.processes)]
        while pending and time.monotonic() < until + options.shrink_seconds + PATIENCE_SECONDS:
            pending[0].wait(1.0)
            for one in [one for one in pending if one.ready()]:
                pending.remove(one)
                failures += add(one.get(), sums)
                if (more := next(asked, None)) is not None:
                    pending.append(pool.apply_async(live, (more,)))
            if time.monotonic() > told_at + TELL_SECONDS:
                told_at = time.monotonic()
                tell(sums, failures, told_at - began)
    tell(sums, failures, time.monotonic() - began)
    missing = len(pending)
    if pending:
        print(f"{len(pending)} processes have not come back.")
    for world, total in sums.items():
        print(f"{world}: {dict(sorted(total.seen.items()))}")
        if total.lives >= LIVES_MIN and (never := unseen(world, total.seen, total.steps)):
            print(f"{world}: not seen in {total.steps:,} steps: {', '.join(never)}")
            missing += len(never)
    return 1 if failures or missing else 0


def add(lived: Lived, sums: dict[str, Sum]) -> int:
    """Count it; how many failures it is."""
    total = sums[lived.life.world]
    total.steps += lived.steps
    total.seen += lived.seen
    if not lived.failure:
        total.lives += lived.is_over
        total.unfinished += not lived.is_over
        return 0
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{lived.life.world}-{lived.life.seed}.txt"
    path.write_text(lived.failure)
    print(f"\n{lived.failure}It is written to {path}.\n", flush=True)
    return 1


def tell(sums: dict[str, Sum], failures: int, seconds: float) -> None:
    """A line on how far it is."""
    each = ", ".join(
        f"{world}: {one.lives:,} lives ({one.unfinished} unfinished), {one.steps:,} steps"
        for world, one in sums.items()
    )
    rate = sum(one.steps for one in sums.values()) / max(seconds, 0.001)
    print(f"{seconds:,.0f} s: {each}; {rate:,.0f} steps/s; {failures} failed", flush=True)


if __name__ == "__main__":
    sys.exit(main())
