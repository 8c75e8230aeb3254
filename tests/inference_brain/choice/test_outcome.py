"""Why tokens had to be computed: each has one cause."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inference_brain.choice import (
    Asked,
    Candidate,
    Choice,
    Load,
    Mode,
    Outcome,
    Path,
    Rates,
    Regret,
    Why,
    choose,
    regret,
)
from swdriver_shim.cache.reasons import Reason
from telemetry.units import duration


def chosen(*candidates: Candidate, tokens: int = 10_000, mode: Mode = Mode.ESTIMATE) -> Choice:
    return choose(Asked(tokens, b"prefix"), candidates, 0.0, random.Random(1), mode)


def candidate(name: str, hit: int = 0, load: Load = Load(), path: Path = Path.RAIL) -> Candidate:  # noqa: B008
    return Candidate(name, Rates(), hit, load=load, path=path)


def test_what_nobody_has_is_cold() -> None:
    choice = chosen(candidate("r1", 4_000), candidate("r2"))
    assert regret(choice, Outcome(cached_tokens=4_000)) == {Regret.COLD: 6_000}


def test_what_a_busy_replica_has_is_lost_to_load() -> None:
    busy = candidate("busy", 8_000, Load(50_000.0, waiting=5))
    choice = chosen(busy, candidate("idle", 1_000))
    assert choice.replica == "idle"
    found = regret(choice, Outcome(cached_tokens=1_000))
    assert found == {Regret.OVERLOADED: 7_000, Regret.COLD: 2_000}


def test_what_is_too_far_away_is_lost_to_the_spine() -> None:
    slow = Rates()
    slow.seconds = tuple(1e-3 if index == 7 else rate for index, rate in enumerate(slow.seconds))
    far = Candidate("far", slow, 8_000, path=Path.SPINE)
    choice = chosen(far, candidate("near"))
    assert choice.replica == "near"
    assert regret(choice, Outcome(cached_tokens=0)) == {Regret.SPINE: 8_000, Regret.COLD: 2_000}


def test_what_a_replica_has_that_was_no_worse_is_lost_to_neither_load_nor_the_spine() -> None:
    names = [f"r{number}" for number in range(20)]
    found = [
        chosen(candidate(warm, 8_000), candidate(f"{warm}-cold"), mode=Mode.AFFINITY) for warm in names
    ]
    cold = [choice for choice in found if choice.replica.endswith("cold")]
    assert cold  # it is by the prefix
    for choice in cold:
        assert regret(choice, Outcome(cached_tokens=0)) == {Regret.ELSEWHERE: 8_000, Regret.COLD: 2_000}


def test_what_the_map_promised_and_was_not_there_is_displaced_unless_the_driver_knows_better() -> None:
    choice = chosen(candidate("r1", 4_000))
    assert regret(choice, Outcome(cached_tokens=1_000)) == {
        Regret.DISPLACED: 3_000,
        Regret.COLD: 6_000,
    }
    missed: dict[str, int] = {Reason.EXPIRED: 2_000, Reason.PURGED: 500, Reason.NEVER_STORED: 6_500}
    assert regret(choice, Outcome(cached_tokens=1_000, missed=missed)) == {
        Regret.EXPIRED: 2_000,
        Regret.PURGED: 500,
        Regret.DISPLACED: 3_000,
        Regret.COLD: 3_500,
    }


def borrowing(hit: int = 1_000, lent: int = 7_000, tier2: int = 0) -> Candidate:
    return Candidate("idle", Rates(), hit, tier2, sibling_tokens=lent, sibling="job-1")


def test_what_was_to_be_borrowed_and_did_not_come_was_not_lent() -> None:
    busy = candidate("busy", 8_000, Load(50_000.0, waiting=5))
    choice = chosen(busy, borrowing())
    assert (choice.replica, choice.chosen.sibling) == ("idle", "job-1")
    assert regret(choice, Outcome(cached_tokens=8_000)) == {Regret.COLD: 2_000}
    assert regret(choice, Outcome(cached_tokens=3_000)) == {
        Regret.NOT_LENT: 5_000,
        Regret.COLD: 2_000,
    }
    assert regret(choice, Outcome(cached_tokens=400)) == {
        Regret.NOT_LENT: 7_000,
        Regret.DISPLACED: 600,
        Regret.COLD: 2_000,
    }


def test_what_another_has_beyond_what_can_be_borrowed_is_lost_to_load() -> None:
    busy = candidate("busy", 9_000, Load(50_000.0, waiting=5))
    choice = chosen(busy, borrowing())
    found = regret(choice, Outcome(cached_tokens=8_000))
    assert found == {Regret.OVERLOADED: 1_000, Regret.COLD: 1_000}


def test_who_could_borrow_tokens_does_not_have_them() -> None:
    choice = chosen(candidate("r1", 4_000), replace(borrowing(), load=Load(50_000.0)))
    assert choice.replica == "r1"
    assert regret(choice, Outcome(cached_tokens=4_000)) == {Regret.COLD: 6_000}


@given(
    hits=st.lists(st.integers(0, 10_000), min_size=1, max_size=5),
    waiting=st.lists(st.floats(0, 1e5), min_size=5, max_size=5),
    lent=st.lists(st.sampled_from([0, 0, 2_000, 6_000]), min_size=5, max_size=5),
    cached=st.none() | st.integers(0, 10_000),
    missed=st.dictionaries(st.sampled_from(list(Reason)), st.integers(0, 20_000)),
)
def test_each_token_that_was_not_cached_has_one_cause(
    hits: list[int],
    waiting: list[float],
    lent: list[int],
    cached: int | None,
    missed: dict[str, int],
) -> None:
    candidates = [
        replace(
            candidate(f"r{index}", hit, Load(waiting[index])),
            sibling_tokens=min(lent[index], 10_000 - hit),
            sibling="job" if lent[index] else "",
        )
        for index, hit in enumerate(hits)
    ]
    choice = chosen(*candidates)
    found = regret(choice, Outcome(cached_tokens=cached, missed=missed))
    actual = choice.chosen.promised_tokens if cached is None else cached
    assert sum(found.values()) == 10_000 - actual
    assert all(count > 0 for count in found.values())


@pytest.mark.parametrize(
    ("choice", "why", "words"),
    [
        (chosen(candidate("r1")), Why.ONLY, "r1 was the only candidate."),
        (chosen(candidate("r1", 9_000), candidate("r2")), Why.LEAST, "at r2, the next best."),
        (chosen(candidate("r1"), candidate("r2")), Why.AFFINITY, "the prefix belongs to"),
        (
            chosen(candidate("r1"), candidate("r2"), mode=Mode.AFFINITY),
            Why.FALLBACK,
            "Estimates are off",
        ),
    ],
)
def test_a_choice_is_explained_in_a_sentence(choice: Choice, why: Why, words: str) -> None:
    assert choice.why is why
    assert words in choice.sentence()


def test_the_sentence_says_what_is_borrowed_and_from_whom() -> None:
    choice = chosen(candidate("busy", 8_000, Load(50_000.0)), borrowing())
    told = choice.sentence()
    assert told.startswith(f"The first token was expected after {duration(choice.chosen.seconds)} at ")
    assert told.endswith(" It borrows 7,000 tokens of the prompt from job-1.")
    assert "borrows" not in chosen(candidate("r1", 8_000), borrowing()).sentence()
