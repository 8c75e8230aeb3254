"""Lives of simulations: written down, lived again, and shrunk to what makes them fail."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any, Self

import pytest

from swdriver_shim.cache.displacement.cost import Cost
from tests.lives import Failure, Life, shrink
from tests.long_lives import lives_until
from tests.worlds import WORLDS


class Small:
    """It fails once two things have happened, of which each step does one by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self) -> None:
        self.seen[self.chance.choice("abcdefghij")] += 1
        assert self.seen["a"] < 2 or not self.seen["b"], f"after {self.seen.total()} steps"

    def come_to_rest(self) -> None:
        assert self.seen["c"] < 100, "too many"

    def what_was_seen(self) -> Counter[str]:
        return self.seen


SMALL = {"small": Small}


@pytest.mark.slow
def test_a_life_that_fails_is_shrunk_to_the_steps_that_make_it_fail() -> None:
    failure = Life.of("small", 5, 1000).failure(SMALL)
    assert failure
    small = shrink(failure, SMALL, math.inf)
    assert len(small.life.steps) == 3, "two a and one b"
    again = Life.parse(str(small.life)).failure(SMALL)
    assert again
    assert (again.sign, again.life) == (failure.sign, small.life)


def test_what_is_left_out_changes_nothing_in_the_other_steps() -> None:
    whole, part = (Life("small", 7, steps).run(SMALL) for steps in ((0, 1, 2, 3, 4, 5), (0, 2, 5)))
    one_by_one = [Life("small", 7, (step,)).run(SMALL) for step in range(6)]
    assert part == one_by_one[0] + one_by_one[2] + one_by_one[5]
    assert whole == sum(one_by_one, Counter[str]())


def test_another_failure_on_the_way_is_not_taken_for_the_same() -> None:
    failure = Failure(Life.of("small", 5, 50), "something else", "")
    assert shrink(failure, SMALL, 0.5) == failure


@pytest.mark.parametrize("text", ["driver:179:0-3,17", "plane:0:5", "driver:1:"])
def test_a_life_is_written_as_it_is_read(text: str) -> None:
    assert str(Life.parse(text)) == text
    assert Life.parse("driver:179:0-3,17").steps == (0, 1, 2, 3, 17)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_fault_of_the_driver_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault put in on purpose: a queue of displacements counts one column too many once in a while."""
    removed = Cost.removed

    def forgets(self: Cost[Any], column: Any) -> None:
        removed(self, column)
        self._count += column.uses > 0

    monkeypatch.setattr(Cost, "removed", forgets)
    lives = (Life.of("driver", seed, 600) for seed in range(100))
    failure = next(found for life in lives if (found := life.failure(WORLDS)))
    small = shrink(failure, WORLDS, math.inf)
    assert len(small.life.steps) < len(failure.life.steps) / 2
    again = small.life.failure(WORLDS)
    assert again
    assert again.sign == failure.sign


def test_long_lives_end_with_their_steps_and_keep_to_their_world() -> None:
    lives = [life for life, _, _ in lives_until(math.inf, 3, 1.0, 50_000, "plane")]
    assert sum(len(life.steps) for life in lives) == 50_000
    assert {life.world for life in lives} == {"plane"}
    assert [life.seed for life in lives] == [*range(3, 3 + len(lives))]
    assert not [*lives_until(0.0, 3, 1.0)], "their time is over"
