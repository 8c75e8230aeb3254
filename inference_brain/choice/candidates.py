"""What is asked, and who could answer it.

What a decision is made of is kept with its request, also when that is over, and Python looks for circles
of garbage among all that is kept. It leaves these objects out (`gc=False`): none is ever in a circle.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from inference_brain.choice.rates import Rates


class Path(StrEnum):
    """How most bytes of a replica's cache reach its engine."""

    RAIL = "rail"
    LEAF = "leaf"
    SPINE = "spine"
    LOCAL = "local"  # in the engine's own memory, or on its machine


class Asked(Struct, frozen=True, gc=False):
    """A request, as far as its place depends on it. `affinity`: what it has in common with requests that
    profit from the same replica: the org's isolation tag and the key of its first columns. `tokens`: of
    its prompt; an estimate where the model has no tokenizer. `is_plain`: how long its first token
    takes follows from its prompt, and not from what an engine has to prepare for it."""

    tokens: int
    affinity: bytes = b""
    org: str = ""
    max_tokens: int = 0
    request: str = ""
    is_plain: bool = True


class Load(Struct, frozen=True, gc=False, array_like=True):
    """What a replica has to do before it gets to another request, for this brain and all others.

    `waiting_tokens` and `waiting_pairs`: prompt tokens to compute of requests without a first token, and
    of each its distance from the start of its prompt, summed up: the work of attention.
    `overdue_seconds`: how long the oldest of them is past its expected time.
    """

    waiting_tokens: float = 0.0
    running: int = 0  # requests that have their first token, and not their last
    waiting: int = 0  # requests without a first token
    waiting_pairs: float = 0.0
    overdue_seconds: float = 0.0

    def plus(self, other: Load) -> Load:
        """With what another brain has sent."""
        return Load(
            self.waiting_tokens + other.waiting_tokens,
            self.running + other.running,
            self.waiting + other.waiting,
            self.waiting_pairs + other.waiting_pairs,
            max(self.overdue_seconds, other.overdue_seconds),
        )


IDLE = Load()


class Candidate(Struct, frozen=True, gc=False):
    """A replica that may serve the request.

    `hit_tokens`: of the prompt's beginning, what it has in memory; `tier2_tokens`: what follows those in
    tier 2. Both as of when the request will be served: what will have expired by then is left out.
    `is_guess`: no cache map is known; the hit is what was sent there before. `sibling_tokens`: what
    follows those in its memory at the driver `sibling`, which it may borrow from; empty: at none.
    """

    name: str
    rates: Rates
    hit_tokens: int = 0
    tier2_tokens: int = 0
    path: Path = Path.LOCAL
    load: Load = IDLE
    is_guess: bool = False
    sibling_tokens: int = 0
    sibling: str = ""

    @property
    def own_tokens(self) -> int:
        """What it has without borrowing."""
        return self.hit_tokens + self.tier2_tokens

    @property
    def trust(self) -> float:
        """Which part of that will be hits."""
        return self.rates.guess_trust if self.is_guess else self.rates.trust
