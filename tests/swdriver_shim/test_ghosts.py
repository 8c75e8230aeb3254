"""What is remembered of columns that were removed."""

from __future__ import annotations

import random
import sys
from collections import deque

import pytest

from swdriver_shim.cache.reasons import GHOSTS_MIN, Ghosts, Reason


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize("at_once", [1, 3, 50])
@pytest.mark.parametrize("least", [1, 2, 20])
def test_the_last_ones_are_remembered_and_up_to_a_third_as_many_more(least: int, at_once: int) -> None:
    ghosts, removed = Ghosts(least), [key(number) for number in range(200)]
    for first in range(0, len(removed), at_once):
        ghosts.add_all(removed[first : first + at_once], Reason.DISPLACED)
        done = removed[: first + at_once]
        assert len(ghosts) <= least + (least + 2) // 3 + 2
        assert set(ghosts.reasons(done[-least:])) == {Reason.DISPLACED}
        assert ghosts.reasons(done).count(Reason.DISPLACED) == len(ghosts)


def test_a_driver_knows_as_many_as_its_documentation_says() -> None:
    ghosts, removed = Ghosts(), [key(number) for number in range(400_000)]
    for first in range(0, len(removed), 5_000):
        ghosts.add_all(removed[first : first + 5_000], Reason.DISPLACED)
        assert len(ghosts) <= 174_760
        assert len(ghosts._dropped) + len(ghosts.generations[0]) < 48_690, "it is emptied"
        known = ghosts.reasons(removed[max(0, first + 5_000 - GHOSTS_MIN) : first + 5_000])
        assert set(known) == {Reason.DISPLACED}


def test_no_generation_grows_at_once_by_more_than_its_share() -> None:
    """A dict that grows is copied, and requests wait: 1.7 ms at 43,690 keys, 0.8 at half of them."""
    ghosts, copied = Ghosts(), 0
    for number in range(150_000):
        newest = ghosts.generations[0]
        size = sys.getsizeof(newest)
        ghosts.add(key(number), Reason.DISPLACED)
        if sys.getsizeof(newest) > size:
            copied = max(copied, len(newest))
    assert copied <= 21_846


def test_the_last_reason_holds() -> None:
    ghosts, chance = Ghosts(20), random.Random(1)
    known: dict[bytes, Reason] = {}
    last: deque[bytes] = deque(maxlen=20)
    for _ in range(2000):
        one = key(chance.randrange(60))
        known[one] = chance.choice([Reason.DISPLACED, Reason.EXPIRED, Reason.PURGED])
        ghosts.add(one, known[one])
        last.append(one)
        for each in last:
            assert ghosts.reason_of(each) is known.get(each, Reason.NEVER_STORED)
        every = [key(number) for number in range(60)]
        assert ghosts.reasons(every) == list(map(ghosts.reason_of, every))
        for number in range(60):
            found = ghosts.reason_of(key(number))
            assert found in (known.get(key(number), Reason.NEVER_STORED), Reason.NEVER_STORED)


def test_many_are_remembered_as_each_alone_would_be() -> None:
    chance, ghosts = random.Random(2), [Ghosts(10), Ghosts(10)]
    for _ in range(300):
        keys = [key(number) for number in chance.sample(range(60), chance.randrange(25))]
        ghosts[0].add_all(keys, Reason.QUOTA)
        for one in keys:
            ghosts[1].add(one, Reason.QUOTA)
        assert ghosts[0].generations == ghosts[1].generations
