"""What a fuzzer found worth keeping is replayed without one; so are each target's own examples."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.target import CORPUS, kept
from tests.fuzz.targets import TARGETS

CORPUS_BYTES_MAX = 1 << 20  # of all targets, in the repository
SPOILED = 200  # of each target, beside what is kept


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_kept_is_decoded_or_refused(name: str) -> None:
    assert kept(name), "each target has a corpus: `make fuzz`"
    for path in kept(name):
        TARGETS[name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_understood_and_what_is_spoiled_is_refused_in_one_way(name: str) -> None:
    chosen, target = random.Random(name), TARGETS[name]
    seeds = target.seeds()
    target.run(seeds[0])
    for _ in range(SPOILED):
        spoiled = bytearray(chosen.choice(seeds))
        for _ in range(chosen.randint(1, 4)):
            place = chosen.randrange(len(spoiled) + 1)
            spoiled[place : place + chosen.randint(0, 2)] = chosen.randbytes(chosen.randint(0, 3))
        target.run(bytes(spoiled))


def test_the_corpus_is_small_and_of_targets_that_are() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) <= CORPUS_BYTES_MAX
