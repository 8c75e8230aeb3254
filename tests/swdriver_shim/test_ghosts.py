"""What is remembered of columns that were removed."""

from __future__ import annotations

import random
from collections import deque

import pytest

from swdriver_shim.cache.reasons import Ghosts, Reason


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize("at_once", [1, 3, 50])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_the_last_half_is_remembered_and_no_more_than_all(size: int, at_once: int) -> None:
    ghosts, removed = Ghosts(size), [key(number) for number in range(200)]
    for first in range(0, len(removed), at_once):
        ghosts.add_all(removed[first : first + at_once], Reason.DISPLACED)
        done = removed[: first + at_once]
        assert len(ghosts) <= size
        assert set(ghosts.reasons(done[-max(1, size // 2) :])) == {Reason.DISPLACED}
        assert ghosts.reasons(done).count(Reason.DISPLACED) == len(ghosts)


def test_the_last_reason_holds_until_the_column_is_stored_again() -> None:
    ghosts, chance = Ghosts(40), random.Random(1)
    known: dict[bytes, Reason] = {}
    last: deque[bytes] = deque(maxlen=20)
    for _ in range(2000):
        one = key(chance.randrange(60))
        if chance.randrange(3):
            known[one] = chance.choice([Reason.DISPLACED, Reason.EXPIRED, Reason.PURGED])
            ghosts.add(one, known[one])
            last.append(one)
        else:
            ghosts.forget([one])
            known.pop(one, None)
            assert ghosts.reason_of(one) is Reason.NEVER_STORED
        for each in last:
            assert ghosts.reason_of(each) is known.get(each, Reason.NEVER_STORED)
        for number in range(60):
            found = ghosts.reason_of(key(number))
            assert found in (known.get(key(number), Reason.NEVER_STORED), Reason.NEVER_STORED)


def test_many_are_remembered_as_each_alone_would_be() -> None:
    chance, ghosts = random.Random(2), [Ghosts(20), Ghosts(20)]
    for _ in range(300):
        keys = [key(number) for number in chance.sample(range(60), chance.randrange(25))]
        ghosts[0].add_all(keys, Reason.QUOTA)
        for one in keys:
            ghosts[1].add(one, Reason.QUOTA)
        assert ghosts[0].halves == ghosts[1].halves
