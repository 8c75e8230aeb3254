"""What was sent counts as stored for a while, before any map says so."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_brain.choice import SentPrefixes


def keys(*chunks: int) -> list[bytes]:
    """Eight columns for each, which depend on all before them."""
    return [
        repr((chunks[: at + 1], column)).encode() for at in range(len(chunks)) for column in range(8)
    ]


def test_prefixes_are_found_where_they_were_sent_and_for_how_long() -> None:
    sent = SentPrefixes()
    sent.add("r1", keys(1, 2, 3), until=10.0)
    sent.add("r2", keys(1, 9), until=20.0)
    asked = keys(1, 2, 4)
    assert sent.hits(asked, 5.0) == {"r1": 1024, "r2": 512}
    assert sent.hits(asked, 15.0) == {"r2": 512}
    assert sent.hits(asked, 25.0) == {}
    assert sent.hits(keys(7), 5.0) == {}
    sent.clear()
    assert sent.hits(asked, 5.0) == {}


def test_what_was_sent_again_counts_for_longer() -> None:
    sent = SentPrefixes()
    sent.add("r1", keys(1, 2), until=10.0)
    sent.add("r1", keys(1), until=20.0)
    sent.add("r1", keys(1), until=5.0)
    assert sent.hits(keys(1, 2), 15.0) == {"r1": 512}
    assert sent.hits(keys(1, 2), 20.0) == {"r1": 512}
    assert sent.hits(keys(1, 2), 20.1) == {}


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), PROMPTS, st.integers(1, 9), st.booleans()), max_size=40),
    st.sampled_from([4, 1000]),
)
def test_hits_are_those_that_a_walk_along_the_prompt_finds(
    steps: list[tuple[str, list[int], int, bool]], keys_max: int
) -> None:
    sent, now = SentPrefixes(keys_max), 0.0
    until: dict[tuple[str, tuple[int, ...]], float] = {}
    for replica, chunks, lasts, is_asked in steps:
        now += 1.0
        if is_asked:
            expected = {}
            for one in "abc":
                depth = 0
                while depth < len(chunks) and until.get((one, (*chunks[: depth + 1],)), -1.0) >= now:
                    depth += 1
                if depth:
                    expected[one] = 512 * depth
            found = sent.hits(keys(*chunks), now)
            if keys_max == 1000:
                assert found == expected
            for one, tokens in found.items():
                assert tokens <= expected[one], "what is bounded is forgotten, and never made up"
        else:
            sent.add(replica, keys(*chunks), now + lasts)
            for depth in range(1, len(chunks) + 1):
                place = replica, (*chunks[:depth],)
                until[place] = max(until.get(place, 0.0), now + lasts)


def test_what_does_not_count_any_more_is_forgotten_when_it_is_asked_for() -> None:
    sent = SentPrefixes()
    for replica in range(10):
        sent.add(f"r{replica}", keys(1, 2, 3), until=float(replica))
    sent.add("r99", keys(1), until=99.0)
    assert sent.hits(keys(1, 2, 3), 8.5) == {"r9": 3 * 512, "r99": 512}
    assert sum(map(len, sent._sent.values())) == 4
    assert sent.hits(keys(1, 2, 3), 50.0) == {"r99": 512}
    assert len(sent) == 1
    assert sent.hits(keys(1, 2, 3), 100.0) == {}
    assert len(sent) == 0


def test_a_long_prompt_that_many_replicas_have_is_looked_up_fast() -> None:
    sent, chance = SentPrefixes(), random.Random(1)
    prompt = [chance.randbytes(16) for _ in range(2048)]
    for replica in range(1000):
        sent.add(f"r{replica}", prompt if replica % 2 else prompt[:64], until=10.0)
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        assert len(sent.hits(prompt, 5.0)) == 1000
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.004, "by walking along the prompt it takes twice as long and more"


def test_it_is_bounded() -> None:
    sent = SentPrefixes(keys_max=100)
    for number in range(1000):
        sent.add("r1", keys(number), until=10.0)
    assert len(sent) == 100
    assert sent.hits(keys(999), 0.0) == {"r1": 512}
    assert sent.hits(keys(1), 0.0) == {}
    sent.add("r2", keys(*range(200)), until=10.0)
    assert sent.hits(keys(*range(200)), 0.0) == {"r2": 100 * 512}, "the shortest prefixes are kept"
    with pytest.raises(ValueError, match="at least one"):
        SentPrefixes(keys_max=0)
