"""Among many replicas the decision is the one that comes of a look at each."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

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
    choose,
)
from inference_brain.choice.choice import EXACT, MANY
from inference_brain.choice.columns import Queues
from inference_brain.choice.rates import PAIR, SIBLING, SIZE, TOKEN

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
    loads = [
        Load(
            chance.choice([0.0, chance.uniform(0, 1e6)]),
            chance.randint(0, 3),
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
            sibling_tokens=(lent := chance.choice([0] * 4 + [chance.randint(1024, 50_000)])),
            sibling="job" if lent else "",
        )
        for index in range(count)
    ]


def looked_at(asked: Asked, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that are worth an exact estimate, by a rough one of each."""

    def rough(one: Candidate) -> tuple[float, str]:
        rates, load = one.rates, one.load
        token, pair, sibling = (rates.seconds[kind] for kind in (TOKEN, PAIR, SIBLING))
        missed = load.waiting_tokens + asked.tokens - one.own_tokens * rates.trust
        value = load.overdue_seconds + token * missed + pair * load.waiting_pairs
        if one.sibling_tokens > one.tier2_tokens and sibling < token:
            lent = one.sibling_tokens - one.tier2_tokens
            value -= (token - sibling) * lent * rates.sibling_trust
        return value, one.name

    return sorted(candidates, key=rough)[:EXACT]


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
    few = looked_at(asked, candidates)
    for seed in range(5):  # one of which may try a replica of which little is known
        choice = choose(asked, candidates, 0.0, random.Random(seed), mode)
        expected = choose(asked, few, 0.0, random.Random(seed), mode)
        assert choice == expected._replace(candidates=count)


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
                    chosen = choice.chosen._replace(fetch_seconds=0.0, compute_seconds=0.0)
                    choice = choice._replace(chosen=chosen)
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
            known = columns.is_known.nonzero()[0].tolist()
            assert len(known) == len([one for one in names if one in rates._rates])
            for place in known:
                of = rates.of(names[place])
                assert columns.token[place] == of.seconds[TOKEN]
                assert columns.pair[place] == of.seconds[PAIR]
                assert columns.sibling[place] == of.seconds[SIBLING]
                assert (columns.trust[place], columns.sibling_trust[place]) == (
                    of.trust,
                    of.sibling_trust,
                )
