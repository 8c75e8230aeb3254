"""The decision: the least wins, equals by affinity, and nothing depends on the order of candidates."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inference_brain.choice import Asked, Candidate, Load, Mode, Path, Rates, Why, choose
from inference_brain.choice.rates import LOCAL, SIBLING, SIZE, TIER2


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
            sibling_tokens=(lent := seed.choice([0, 0, seed.randint(1024, 50_000)])),
            sibling="job" if lent else "",
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
        assert bool(one.sibling) == (one.sibling_tokens > 0)
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
        known.observe((1.0, tokens, *[0.0] * (SIZE - 2)), error * (0.02 + 1e-4 * tokens), 0.1 * number)
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
    busy = [replace(one, load=Load(0.0, 9)) if one.name == first else one for one in candidates]
    second = chosen(busy)
    assert second != first
    assert chosen([one for one in candidates if one.name != second]) == first


def test_of_very_many_those_with_hits_are_looked_at() -> None:
    candidates = [Candidate(f"replica-{index}", Rates()) for index in range(3000)]
    candidates[1234] = replace(candidates[1234], hit_tokens=9000)
    for seed in range(20):
        choice = choose(Asked(10_000, b"prefix"), candidates, 0.0, random.Random(seed))
        assert choice.replica == "replica-1234"
        assert choice.candidates == 3000


def borrower(lent: int = 20_000, hit: int = 0, tier2: int = 0, sibling: float = 4e-6) -> Candidate:
    """It may borrow, in so many seconds for each token."""
    rates = Rates()
    rates.seconds = tuple(
        sibling if kind == SIBLING else rate for kind, rate in enumerate(rates.seconds)
    )
    return Candidate("borrower", rates, hit, tier2, sibling_tokens=lent, sibling="job-1")


def test_tokens_are_borrowed_where_that_is_faster_than_to_compute_them() -> None:
    asked = Asked(21_000)
    alone = choose(asked, [replace(borrower(), sibling_tokens=0, sibling="")], 0.0, NoTrial()).chosen
    fast = choose(asked, [borrower(hit=4_000, lent=16_000)], 0.0, NoTrial()).chosen
    assert (fast.sibling, fast.hit_tokens, fast.sibling_tokens) == ("job-1", 4_000, 16_000)
    assert (fast.missed_tokens, fast.promised_tokens) == (1_000, 20_000)
    assert fast.fetch_seconds == pytest.approx(4_000 * 1e-6 + 16_000 * 4e-6)
    assert fast.seconds < alone.seconds
    slow = choose(asked, [borrower(sibling=1e-3)], 0.0, NoTrial()).chosen
    assert (slow.sibling, slow.sibling_tokens, slow.promised_tokens) == ("", 0, 0)
    assert slow.seconds == alone.seconds


@pytest.mark.parametrize(
    ("lent", "sibling", "borrowed", "recalled"),
    [
        (8_000, 4e-6, 8_000, 4_000),  # what tier 2 has beyond comes from there
        (16_000, 4e-6, 16_000, 0),
        (8_000, 1e-3, 0, 12_000),
    ],
)
def test_a_sibling_takes_the_place_of_tier_2_where_it_is_faster(
    lent: int, sibling: float, borrowed: int, recalled: int
) -> None:
    one = borrower(lent, tier2=12_000, sibling=sibling)
    of = choose(Asked(21_000), [one], 0.0, NoTrial()).chosen
    assert (of.sibling_tokens, of.tier2_tokens) == (borrowed, recalled)
    assert of.promised_tokens == borrowed + recalled
    assert of.missed_tokens == 21_000 - borrowed - recalled


def test_the_request_moves_to_an_idle_sibling_and_the_bytes_move_from_a_busy_one() -> None:
    def chosen(waiting_tokens: float) -> tuple[str, str]:
        lender = Candidate("lender", Rates(), 20_000, load=Load(waiting_tokens, waiting=1))
        choice = choose(Asked(21_000), [lender, borrower()], 0.0, NoTrial())
        return choice.replica, choice.chosen.sibling

    assert chosen(0.0) == ("lender", "")
    assert chosen(9_000.0) == ("borrower", "job-1")


def test_of_equals_who_need_not_borrow_come_first() -> None:
    """They are no better within noise, and there is no second copy."""
    candidates = [
        Candidate("has it", Rates(), 2_000),
        *(replace(borrower(2_000), name=f"borrower {index}") for index in range(20)),
    ]
    for index in range(20):
        asked = Asked(40_000, index.to_bytes(1))
        choice = choose(asked, candidates, 0.0, NoTrial())
        assert choice.estimates[-1].cost < choice.estimates[0].cost + choice.estimates[0].noise_seconds
        assert choice.replica == "has it"


def test_among_many_who_has_it_is_compared_with_who_would_borrow() -> None:
    lender = Candidate("lender", Rates(), 20_000)
    others = [replace(borrower(), name=f"a{index:03}") for index in range(200)]
    assert choose(Asked(21_000), [*others, lender], 0.0, NoTrial()).replica == "lender"
    busy = replace(lender, load=Load(500_000.0, waiting=9))
    cold = [Candidate(f"cold {index}", Rates()) for index in range(200)]
    choice = choose(Asked(21_000), [*cold, busy, others[-1]], 0.0, NoTrial())
    assert (choice.replica, choice.chosen.sibling) == ("a199", "job-1")


@pytest.mark.parametrize(
    ("cached", "amounts"),
    [
        (None, (4_000, 8_000, 2_000)),
        (14_500, (4_500, 8_000, 2_000)),
        (13_000, (4_000, 8_000, 1_000)),
        (9_000, (4_000, 5_000, 0)),
        (3_000, (3_000, 0, 0)),
    ],
)
def test_borrowed_tokens_follow_those_in_memory(
    cached: int | None, amounts: tuple[int, int, int]
) -> None:
    choice = choose(Asked(20_000), [borrower(8_000, 4_000, 10_000)], 0.0, NoTrial())
    made = choice.amounts(cached)
    assert (made[LOCAL], made[SIBLING], made[TIER2]) == amounts
