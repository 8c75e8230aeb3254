"""Lives of simulations: told by a seed and the steps that are lived, run, and shrunk where they fail.

Each step takes its chances from the seed and its own number, and from nothing else. So a life is still
much the same if steps are left out of it, and one that fails is shrunk by leaving out as many as can be
(delta debugging) while it still fails in the same way. `make sim LIFE=driver:179:0-3,17` lives it again.
"""

from __future__ import annotations

import gc
import math
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

SHRINK_SECONDS: Final = 60.0
FRAMES: Final = 4  # of a traceback that tell one failure from another


class Simulation(Protocol):
    """A world that lives by `chance`, which is seeded anew before each step."""

    chance: random.Random

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, traceback: object, /) -> None: ...
    def step(self) -> None: ...
    def come_to_rest(self) -> None: ...
    def what_was_seen(self) -> Counter[str]: ...


Worlds = Mapping[str, Callable[[int], Simulation]]


class Unfinished(Exception):
    """There was no time for the rest of a life."""


@dataclass(frozen=True)
class Life:
    """`steps`: the numbers of those that are lived, in order."""

    world: str
    seed: int
    steps: tuple[int, ...]

    @classmethod
    def of(cls, world: str, seed: int, steps: int) -> Life:
        return cls(world, seed, tuple(range(steps)))

    @classmethod
    def parse(cls, text: str) -> Life:
        """What `str` gives. Raises ValueError."""
        world, seed, ranges = text.split(":")
        steps: list[int] = []
        for one in filter(None, ranges.split(",")):
            first, _, last = one.partition("-")
            steps += range(int(first), int(last or first) + 1)
        return cls(world, int(seed), tuple(steps))

    def __str__(self) -> str:
        return f"{self.world}:{self.seed}:{','.join(_ranges(self.steps))}"

    def run(
        self, worlds: Worlds, until: float = math.inf, lived: list[int] | None = None
    ) -> Counter[str]:
        """What was seen in it. Raises what has failed, and Unfinished at this moment of `monotonic`.
        `lived`: hears of each step before it."""
        with worlds[self.world](self.seed) as simulation:
            for number in self.steps:
                if time.monotonic() > until:
                    raise Unfinished
                if lived is not None:
                    lived.append(number)
                simulation.chance.seed(f"{self.seed} {number}")
                simulation.step()
            simulation.chance.seed(f"{self.seed} rest")
            simulation.come_to_rest()
            return simulation.what_was_seen()

    def failure(self, worlds: Worlds, until: float = math.inf) -> Failure | None:
        """How it fails; None if it does not, or not by then."""
        lived: list[int] = []
        try:
            self.run(worlds, until, lived)
        except (Unfinished, KeyboardInterrupt):
            return None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            return failed(Life(self.world, self.seed, tuple(lived)), error)
        finally:
            gc.collect()
        return None


@dataclass(frozen=True)
class Failure:
    """`life` up to where it failed; `sign` tells one way to fail from another."""

    life: Life
    sign: str
    told: str


def failed(life: Life, error: BaseException) -> Failure:
    return Failure(life, _sign(error), _told(error))


def shrink(failure: Failure, worlds: Worlds, seconds: float = SHRINK_SECONDS) -> Failure:
    """The same failure in as few steps as are found in so much time."""
    until = time.monotonic() + seconds
    best, parts = failure, 2
    while len(best.life.steps) > 1 and time.monotonic() < until:
        for kept in _without_parts(best.life.steps, parts):
            if time.monotonic() >= until:
                break
            found = Life(best.life.world, best.life.seed, kept).failure(worlds, until)
            if found and found.sign == failure.sign:
                best, parts = found, max(2, parts - 1)
                break
        else:
            if parts >= len(best.life.steps):
                break
            parts = min(len(best.life.steps), 2 * parts)
    return best


def report(failure: Failure, worlds: Worlds, seconds: float = SHRINK_SECONDS) -> str:
    """What to tell whoever has to mend it, after shrinking."""
    small = shrink(failure, worlds, seconds)
    return (
        f"{small.told}\n{failure.life.world}, seed {failure.life.seed}: failed at step "
        f"{len(failure.life.steps)}; {len(small.life.steps)} steps are enough.\n"
        f"Repeat it with\n  make sim LIFE={small.life}\n"
    )


def _without_parts(steps: Sequence[int], parts: int) -> Iterator[tuple[int, ...]]:
    """All of them without one of so many parts, from the front on: the end is where it fails."""
    size = max(1, len(steps) // parts)
    for first in range(0, len(steps), size):
        yield (*steps[:first], *steps[first + size :])


def _sign(error: BaseException) -> str:
    """Where and as what it was raised. Numbers in a sentence are another each time."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename}:{frame.name}" for frame in frames][-1:]
    text = "".join(letter for letter in str(error).split("\n")[0] if not letter.isdigit())
    return f"{type(error).__name__} {text[:80]} {where}"


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    where = "\n".join(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}\n{notes}{where}"


def _ranges(steps: Sequence[int]) -> Iterator[str]:
    first = last = -2
    for number in (*steps, -2):
        if number == last + 1 and first >= 0:
            last = number
            continue
        if first >= 0:
            yield str(first) if first == last else f"{first}-{last}"
        first = last = number
