"""Replicas that take the time that they are told to take, and requests to them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inference_brain.choice import Asked, Candidate, Choice, Load, ModelRates, Outcome, choose
from inference_brain.choice.choice import work


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
