"""Among many replicas the decision is the one that comes of a look at each."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inference_brain.choice import (
    Asked,
    Candidate,
    Flights,
    Load,
    Mode,
    ModelRates,
    Outcome,
    Path,
    Rates,
    Why,
    choose,
)
from inference_brain.choice.affinity import preferred, ranked
from inference_brain.choice.choice import MANY
from inference_brain.choice.columns import Queues
from inference_brain.choice.rates import DECODE, EACH, PAIR, REQUEST, SIBLING, SIZE, TOKEN
from tests.inference_brain.choice.worlds import looked_at

FAMILIES = 4  # replicas that have learned the same
RATES = st.lists(
    st.lists(st.sampled_from([0.0, 1e-6, 4e-6, 1e-4, 3e-4]), min_size=SIZE, max_size=SIZE),
    min_size=FAMILIES,
    max_size=FAMILIES,
)


def made(chance: random.Random, count: int, families: Sequence[Sequence[float]]) -> list[Candidate]:
    """Most of them have nothing of the prompt, and many are alike; of some little is known."""
    of = [Rates() for _ in families]
    for rates, seconds in zip(of, families, strict=True):
        rates.seconds = tuple(seconds)
        rates.observations = chance.choice([0.0, 100.0])
        rates.trust, rates.sibling_trust = chance.choice([1.0, 0.7]), chance.choice([1.0, 0.2])
        rates.guess_trust = chance.choice([1.0, 0.4])
    loads = [
        Load(
            chance.choice([0.0, chance.uniform(0, 1e6)]),
            chance.choice([0, 1, 3, 2000]),
            chance.randint(0, 3),
            chance.choice([0.0, chance.uniform(0, 1e10)]),
            chance.choice([0.0, 0.0, chance.uniform(0, 10)]),
        )
        for _ in range(5)
    ]
    return [
        Candidate(
            f"r{index}",
            chance.choice(of),
            chance.choice([0] * 9 + [chance.randint(1, 50_000)]),
            chance.choice([0] * 9 + [4096]),
            chance.choice(list(Path)),
            chance.choice(loads),
            chance.random() < 0.3,
            sibling_tokens=(lent := chance.choice([0] * 4 + [chance.randint(1024, 50_000)])),
            sibling="job" if lent else "",
        )
        for index in range(count)
    ]


@settings(max_examples=60)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([MANY + 1, 100, 300, 1500]),
    RATES,
    st.integers(1, 50_000),
    st.binary(max_size=20),
    st.sampled_from(Mode),
)
def test_the_decision_among_many_is_that_of_a_look_at_each(
    chance: random.Random,
    count: int,
    families: list[list[float]],
    tokens: int,
    affinity: bytes,
    mode: Mode,
) -> None:
    candidates, asked = made(chance, count, families), Asked(tokens, affinity)
    few = looked_at(asked, candidates, mode)
    for seed in range(5):  # one of which may try a replica of which little is known
        choice = choose(asked, candidates, 0.0, random.Random(seed), mode)
        expected = choose(asked, few, 0.0, random.Random(seed), mode)
        assert choice == replace(expected, candidates=count)


class NoTrial(random.Random):
    """Nobody is tried."""

    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize("count", [MANY, MANY + 1, 300])
def test_equals_share_prefixes_however_many_they_are(count: int) -> None:
    """Each prefix has the replica that it has by its hash, and nobody is left out for its name."""
    candidates = [Candidate(f"r{index}", Rates()) for index in range(count)]
    found = set()
    for number in range(10 * count):
        asked = Asked(1000, number.to_bytes(4, "big"))
        choice = choose(asked, candidates, 0.0, NoTrial())
        assert choice.why is Why.AFFINITY
        if number % 10 == 0:
            assert choice.replica == preferred(asked.affinity, candidates).name
        found.add(choice.replica)
    assert len(found) == count


def test_many_guesses_that_are_seldom_hits_hide_nobody_who_has_the_prompt() -> None:
    """More of them than are looked at exactly."""
    rates, hit = Rates(), 2_000
    rates.guess_trust = 0.1
    guessed = [Candidate(f"r{index}", rates, 2 * hit, is_guess=True) for index in range(300)]
    for number in range(10):
        asked = Asked(3 * hit, number.to_bytes(4, "big"))
        assert choose(asked, [*guessed, Candidate("has", rates, hit)], 0.0, NoTrial()).replica == "has"


def test_a_prefix_stays_where_it_is_while_others_are_busy_or_a_little_faster() -> None:
    chance, candidates = random.Random(1), []
    for index in range(300):
        rates = Rates()
        rates.seconds = tuple(rate * chance.uniform(0.99, 1.01) for rate in rates.seconds)
        candidates.append(Candidate(f"r{index}", rates))
    for number in range(100):
        asked = Asked(1000, number.to_bytes(4, "big"))
        first = preferred(asked.affinity, candidates).name
        now = [
            one
            if one.name == first or chance.random() < 0.5
            else replace(one, load=Load(chance.uniform(0, 1e5), 1, 1))
            for one in candidates
        ]
        assert choose(asked, now, 0.0, NoTrial()).replica == first


@pytest.mark.parametrize("load", [Load(running=400), Load(waiting=200)])
def test_many_that_decode_or_have_a_queue_are_left_out(load: Load) -> None:
    candidates = [
        Candidate(f"r{index:03}", Rates(), load=load if index < 270 else Load()) for index in range(300)
    ]
    for number in range(100):
        choice = choose(Asked(500, number.to_bytes(4, "big")), candidates, 0.0, NoTrial())
        assert choice.replica >= "r270"


@pytest.mark.parametrize("seed", range(20))
def test_while_estimates_are_off_brains_that_have_learned_other_rates_agree(seed: int) -> None:
    chance = random.Random(seed)
    asked = Asked(2000, affinity := chance.randbytes(20))
    loads = [Load(running=chance.randint(0, 9)) for _ in range(100)]

    def brain() -> str:
        candidates = []
        for index, load in enumerate(loads):
            rates = Rates()
            rates.seconds = tuple(rate * chance.uniform(0.1, 10) for rate in rates.seconds)
            candidates.append(Candidate(f"r{index}", rates, chance.choice([0, 1000]), load=load))
        choice = choose(asked, candidates, 0.0, random.Random(1), Mode.AFFINITY)
        first, second = ranked(affinity, candidates)[:2]
        assert choice.why is Why.FALLBACK
        assert choice.replica == (second if second.load.running < first.load.running else first).name
        return choice.replica

    assert brain() == brain()


@example(MANY + 1, [Load(overdue_seconds=-math.inf)], Mode.ESTIMATE)
@example(3, [Load(), Load(overdue_seconds=-1e308)], Mode.ESTIMATE)
@example(3, [Load(math.inf), Load(math.nan)], Mode.ESTIMATE)
@given(
    st.sampled_from([3, MANY + 1]),
    st.lists(
        st.builds(
            Load,
            st.floats(),
            st.integers(0, 10**6),
            st.integers(0, 10**6),
            st.floats(),
            st.floats(),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(Mode),
)
def test_loads_that_are_nonsense_keep_no_request_from_the_other_replicas(
    count: int, loads: list[Load], mode: Mode
) -> None:
    strange = [Candidate(f"a{index}", Rates(), load=load) for index, load in enumerate(30 * loads)]
    others = [Candidate(f"r{index}", Rates()) for index in range(count)]
    choice = choose(Asked(1000, b"prefix"), [*strange, *others], 0.0, NoTrial(), mode)
    assert choice.chosen.noise_seconds >= 0
    if mode is Mode.ESTIMATE:
        assert math.isfinite(choice.chosen.cost)
    for one in choice.estimates:
        assert not math.isnan(one.cost)
    alone = choose(Asked(1000), strange, 0.0, NoTrial(), mode)
    assert alone.candidates == len(strange)


NAMES = [f"r{number}" for number in range(8)]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "first", "end", "wait", "renew", "forget"]),
        st.integers(0, 50),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(EVENTS)
def test_queues_of_all_replicas_are_the_loads_of_each(events: list[tuple[str, int]]) -> None:
    flights, now, sent = Flights(), 1.0, 0
    rates = Rates()
    for kind, number in events:
        name, request = NAMES[number % len(NAMES)], f"q{number % (sent + 1)}"
        match kind:
            case "begin":
                tokens = 1 + 700 * (number % 3)
                choice = choose(Asked(tokens), [Candidate(name, rates)], now, random.Random(1))
                if number % 5 == 0:  # it takes no time
                    chosen = replace(choice.chosen, fetch_seconds=0.0, compute_seconds=0.0)
                    choice = replace(choice, chosen=chosen)
                flights.begin(f"q{sent}", choice, now)
                sent += 1
            case "first":
                flights.first_token(request, now)
            case "end":
                flights.end(request)
            case "renew":
                flights.renew(name)
            case "forget":
                flights.keep_only(frozenset(NAMES[: number % len(NAMES)]))
            case "wait":
                now += number / 100
        expected = Queues.of([flights.load(one, now) for one in NAMES])
        found = flights.queues(NAMES, now)
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_columns_have_the_rates_that_replicas_have_now() -> None:
    chance, rates, names, now = random.Random(1), ModelRates(), NAMES[:6], 1.0
    for step in range(400):
        now += chance.choice([0.0, 0.01, 0.2])
        name = chance.choice(NAMES[:4] if step < 200 else NAMES)
        choice = choose(Asked(2_000), [Candidate(name, rates.of(name), 500)], now, chance)
        rates.observe(choice, Outcome(chance.uniform(0.1, 2.0), chance.choice([None, 100])), now)
        if step == 300:
            rates.keep_only(NAMES[1:])
        if step % 3 == 0:
            rates.settle(now)
            columns = rates.columns(names)
            known = sorted({*range(len(names))} - columns.unknown)
            assert len(known) == len([one for one in names if one in rates._rates])
            for place in known:
                of = rates.of(names[place])
                assert columns.token[place] == of.seconds[TOKEN]
                assert columns.pair[place] == of.seconds[PAIR]
                assert columns.sibling[place] == of.seconds[SIBLING]
                assert columns.each[place] == of.seconds[EACH]
                assert columns.decode[place] == of.seconds[DECODE]
                assert columns.request[place] == of.seconds[REQUEST]
                trusts = (columns.trust, columns.guess_trust, columns.sibling_trust)
                assert [each[place] for each in trusts] == [
                    *(of.trust, of.guess_trust, of.sibling_trust)
                ]
