"""Replicas that take the time that they are told to take, and requests to them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inference_brain.choice import Asked, Candidate, Choice, Load, Mode, ModelRates, Outcome, choose
from inference_brain.choice.affinity import score
from inference_brain.choice.choice import EXACT, work
from inference_brain.choice.rates import DECODE, EACH, PAIR, REQUEST, SIBLING, STEP_TOKENS, TOKEN


def rough(asked: Asked, one: Candidate) -> float:
    """Seconds until the first token at a candidate, where nothing has to be fetched."""
    seconds, load = one.rates.seconds, one.load
    own = asked.tokens - one.own_tokens * one.trust
    step = seconds[DECODE] * load.running
    each_token = seconds[TOKEN] + step / STEP_TOKENS
    wait = load.overdue_seconds + each_token * load.waiting_tokens
    wait += seconds[PAIR] * load.waiting_pairs + seconds[REQUEST] * load.waiting
    pairs = own * (asked.tokens - own + (own + 1.0) / 2.0)
    value = wait + (seconds[EACH] + step + each_token * own + seconds[PAIR] * pairs)
    if one.sibling_tokens > one.tier2_tokens and seconds[SIBLING] < each_token:
        lent = one.sibling_tokens - one.tier2_tokens
        value -= (each_token - seconds[SIBLING]) * lent * one.rates.sibling_trust
    return value


def looked_at(asked: Asked, candidates: Sequence[Candidate], mode: Mode) -> list[Candidate]:
    """Those of many that are worth an exact estimate, by a look at each."""

    def place(one: Candidate) -> tuple[float, int]:
        return rough(asked, one), -score(asked.affinity, one.name)

    by_rough = sorted(candidates, key=place)
    first, left = by_rough[: EXACT // 2], by_rough[EXACT // 2 :]
    least = rough(asked, first[0])
    bound = least + first[0].rates.noise(least)
    equal = [one for one in left if mode is Mode.AFFINITY or rough(asked, one) <= bound]
    second = sorted(equal, key=lambda one: place(one)[1])[: EXACT - len(first)]
    names = {one.name for one in second}
    third = [one for one in left if one.name not in names]
    return [*first, *second, *third][:EXACT]


@dataclass
class Truth:
    """How long a replica takes. `says`: the part of its hits that it really has."""

    each: float = 0.01
    token: float = 1e-4
    pair: float = 1e-9
    noise: float = 0.1
    says: float = 1.0

    def seconds(self, tokens: int, hit: float, load: Load, rng: random.Random) -> float:
        missed, pairs = work(tokens, hit)
        exact = (
            self.each
            + self.token * (missed + load.waiting_tokens)
            + self.pair * (pairs + load.waiting_pairs)
        )
        return exact * rng.uniform(1 - self.noise, 1 + self.noise)


@dataclass
class World:
    """Requests of random lengths, one after the other, with random hits and loads."""

    truths: Mapping[str, Truth]
    seed: int = 0
    rates: ModelRates = field(default_factory=ModelRates)
    now: float = 0.0
    load_tokens: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def candidates(self, tokens: int) -> list[Candidate]:
        self.rates.settle(self.now)
        return [
            Candidate(
                name,
                self.rates.of(name),
                hit_tokens=self.rng.choice([0, 0, tokens // 2]),
                load=Load(waiting_tokens=self.rng.randint(0, self.load_tokens)),
            )
            for name in self.truths
        ]

    def step(self) -> tuple[Choice, float]:
        """A request: where it went, and how long it took."""
        tokens = self.rng.randint(100, 30_000)
        asked = Asked(tokens, affinity=self.rng.randbytes(8))
        choice = choose(asked, self.candidates(tokens), self.now, self.rng, self.rates.mode)
        truth = self.truths[choice.replica]
        cached = int(truth.says * choice.chosen.candidate.hit_tokens)
        seconds = truth.seconds(tokens, cached, choice.chosen.candidate.load, self.rng)
        self.rates.observe(choice, Outcome(seconds, cached), self.now)
        self.now += 0.1
        return choice, seconds

    def run(self, requests: int) -> Sequence[tuple[Choice, float]]:
        return [self.step() for _ in range(requests)]


def error(steps: Sequence[tuple[Choice, float]]) -> float:
    """Of estimates, on average, relative to what happened."""
    return sum(abs(choice.chosen.seconds / seconds - 1) for choice, seconds in steps) / len(steps)
