"""The decision: the least wins, equals by affinity, and nothing depends on the order of candidates."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_brain.choice import Asked, Candidate, Load, Mode, Path, Rates, Why, choose


class NoTrial(random.Random):
    """Nobody is tried."""

    def random(self) -> float:
        return 1.0


def made(seed: random.Random, count: int) -> list[Candidate]:
    """Candidates of all kinds."""
    return [
        Candidate(
            f"r{index}",
            Rates(),
            seed.choice([0, 0, seed.randint(1, 50_000)]),
            seed.choice([0, 0, 4096]),
            seed.choice(list(Path)),
            Load(
                seed.choice([0.0, seed.uniform(0, 1e6)]),
                seed.randint(0, 3),
                seed.randint(0, 3),
                seed.choice([0.0, seed.uniform(0, 1e10)]),
                seed.choice([0.0, 0.0, seed.uniform(0, 10)]),
            ),
        )
        for index in range(count)
    ]


sets_of_candidates = st.builds(made, st.randoms(use_true_random=False), st.integers(1, 60))


@settings(max_examples=40)
@given(sets_of_candidates, st.integers(1, 50_000), st.binary(max_size=20), st.integers(0, 999))
def test_the_order_of_candidates_does_not_matter(
    candidates: list[Candidate], tokens: int, affinity: bytes, number: int
) -> None:
    asked = Asked(tokens, affinity)
    shuffled = random.Random(number).sample(candidates, len(candidates))
    one = choose(asked, candidates, 0.0, random.Random(number))
    other = choose(asked, shuffled, 0.0, random.Random(number))
    assert one.replica == other.replica
    assert one.why is other.why
    assert one.estimates == other.estimates


@settings(max_examples=40)
@given(sets_of_candidates, st.integers(1, 50_000))
def test_the_chosen_one_is_the_least_within_noise(candidates: list[Candidate], tokens: int) -> None:
    choice = choose(Asked(tokens, b"prefix"), candidates, 0.0, NoTrial())
    least = choice.estimates[0]
    assert choice.chosen.seconds <= least.seconds + least.noise_seconds
    assert [one.seconds for one in choice.estimates] == sorted(one.seconds for one in choice.estimates)
    for one in choice.estimates:
        parts = one.wait_seconds + one.fetch_seconds + one.compute_seconds
        assert one.seconds == pytest.approx(parts)
        assert min(one.wait_seconds, one.fetch_seconds, one.compute_seconds) >= 0


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1), min_size=2, max_size=40, unique=True), st.binary(max_size=20))
def test_equals_are_chosen_by_the_prefix_and_few_move_when_one_goes(
    names: list[str], affinity: bytes
) -> None:
    candidates = [Candidate(name, Rates()) for name in names]
    choice = choose(Asked(1000, affinity), candidates, 0.0, NoTrial())
    assert choice.why is Why.AFFINITY
    for gone in candidates:
        left = [one for one in candidates if one is not gone]
        again = choose(Asked(1000, affinity), left, 0.0, NoTrial())
        assert again.replica == choice.replica or gone.name == choice.replica


def test_prefixes_spread_over_equals() -> None:
    candidates = [Candidate(f"replica-{index}", Rates()) for index in range(8)]
    found = Counter(
        choose(Asked(1000, index.to_bytes(4, "big")), candidates, 0.0, NoTrial()).replica
        for index in range(2000)
    )
    assert len(found) == 8
    assert max(found.values()) < 1.3 * 2000 / 8


def test_a_longer_hit_wins_until_its_replica_is_too_busy() -> None:
    def chosen(waiting_tokens: float) -> str:
        busy = Candidate("has it", Rates(), 8_000, load=Load(waiting_tokens, waiting=1))
        return choose(Asked(10_000), [busy, Candidate("idle", Rates())], 0.0, NoTrial()).replica

    assert chosen(5_000) == "has it"
    assert chosen(9_000) == "idle"


def test_bytes_over_the_spine_count_as_what_they_take() -> None:
    over_spine = Candidate("over the spine", Rates(), 8_000, path=Path.SPINE)
    on_rail = Candidate("on a rail", Rates(), 8_000, path=Path.RAIL)
    choice = choose(Asked(10_000), [over_spine, on_rail], 0.0, NoTrial())
    first, second = choice.estimates
    assert choice.replica == "on a rail"
    assert first.fetch_seconds < second.fetch_seconds
    assert first.compute_seconds == second.compute_seconds


@pytest.mark.parametrize(("waiting", "is_tried"), [(5_000, True), (500_000, False)])
def test_one_of_whom_little_is_known_is_tried_now_and_then_if_that_costs_little(
    waiting: int, *, is_tried: bool
) -> None:
    known = Rates()
    for number in range(200):
        tokens, error = 1000.0 + number, (0.95, 1.05)[number % 2]
        known.observe((1.0, tokens, *[0.0] * 8), error * (0.02 + 1e-4 * tokens), 0.1 * number)
    candidates = [
        Candidate("known", known, load=Load(waiting_tokens=0.0)),
        Candidate("new", Rates(), load=Load(waiting_tokens=float(waiting))),
    ]
    rng, asked = random.Random(0), Asked(8_000, b"prefix")
    made = [choose(asked, candidates, 20.0, rng) for _ in range(3_000)]
    tried = [one for one in made if one.why is Why.TRIAL]
    assert all(one.replica == "new" for one in tried)
    assert all(one.replica == "known" for one in made if one.why is not Why.TRIAL)
    assert (30 < len(tried) < 95) if is_tried else not tried, "one in fifty"


def test_without_candidates_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        choose(Asked(10), [], 0.0, NoTrial())


def test_while_estimates_are_off_prefixes_stay_with_the_less_loaded_of_two() -> None:
    candidates = [Candidate(f"replica-{index}", Rates()) for index in range(8)]

    def chosen(among: list[Candidate]) -> str:
        choice = choose(Asked(1000, b"prefix"), among, 0.0, NoTrial(), Mode.AFFINITY)
        assert choice.why is Why.FALLBACK
        return choice.replica

    first = chosen(candidates)
    busy = [one._replace(load=Load(0.0, 9)) if one.name == first else one for one in candidates]
    second = chosen(busy)
    assert second != first
    assert chosen([one for one in candidates if one.name != second]) == first


def test_of_very_many_those_with_hits_are_looked_at() -> None:
    candidates = [Candidate(f"replica-{index}", Rates()) for index in range(3000)]
    candidates[1234] = candidates[1234]._replace(hit_tokens=9000)
    for seed in range(20):
        choice = choose(Asked(10_000, b"prefix"), candidates, 0.0, random.Random(seed))
        assert choice.replica == "replica-1234"
        assert choice.candidates == 3000
