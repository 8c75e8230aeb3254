"""What a request says of itself when it asks to be admitted, and how it is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from inference_brain.desired import Limits

PRIORITY_DEFAULT: Final = 35  # of a request that names none
ANSWER_WEIGHT: Final = 2.0  # a token of an answer costs a replica as much as so many of a prompt


class Reason(StrEnum):
    """Why a request was refused."""

    # Limits of its org: 429
    RATE = "rate"  # requests in a minute
    TOKENS = "tokens"  # in a minute
    CONCURRENT = "concurrent"  # requests at once
    QUEUE = "queue"  # requests that wait
    # What the replicas of the model can do: 503
    OVERLOADED = "overloaded"  # too many requests of all orgs wait
    DEADLINE = "deadline"  # it would wait longer than it may, or has
    NO_REPLICA = "no_replica"  # none was ready for as long as it may wait


class Rejected(Exception):
    """A request is not admitted. `code`: for programs. `retry_after`: seconds after which the same
    request is likely to be admitted; None: never, as long as the limit is what it is."""

    def __init__(self, status: int, code: Reason, message: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    @property
    def header(self) -> str | None:
        """The value of `Retry-After`: whole seconds, at least one."""
        return None if self.retry_after is None else str(max(1, math.ceil(self.retry_after)))


class Ticket(NamedTuple):
    """One request: a tuple, since one is made for each.

    `is_estimate`: nobody has counted the tokens of its prompt. `answer_tokens_max`: of all its answers
    together. `uncached_tokens`: of its prompt, those that the best replica has not cached, as far as
    is known; None: all. `priority`: among requests of its org, the highest first; more than
    `limits.priority` counts as that. `deadline`: seconds from now after which its first token is of no
    use. `first_token_seconds`: how long the replica is expected to take to it.

    For single flight: `chain` are keys of its prompt's prefixes, each of `chain_tokens` tokens more than
    the one before. Equal keys must mean equal tokens, model and org. `compute_rate`: tokens of a prompt
    that a replica computes in a second.
    """

    org: str
    limits: Limits
    model: str
    prompt_tokens: int
    answer_tokens_max: int
    is_estimate: bool = False
    uncached_tokens: int | None = None
    priority: int | None = None
    deadline: float | None = None
    first_token_seconds: float = 0.0
    chain: Sequence[bytes] = ()
    chain_tokens: int = 64
    compute_rate: float = 0.0

    @property
    def rank(self) -> int:
        """Its priority within its org."""
        named = PRIORITY_DEFAULT if self.priority is None else self.priority
        return min(named, self.limits.priority)

    @property
    def computed_tokens(self) -> int:
        """Tokens of its prompt that are expected to be computed."""
        uncached = self.prompt_tokens if self.uncached_tokens is None else self.uncached_tokens
        return max(1, min(uncached, self.prompt_tokens))

    def wait_seconds_max(self, more: float = 0.0) -> float:
        """How long it may wait before a replica gets it, if that takes so much more than expected."""
        if self.deadline is None:
            return self.limits.wait_seconds
        left = self.deadline - self.first_token_seconds - more
        return min(self.limits.wait_seconds, max(0.0, left))


class Room(NamedTuple):
    """What all replicas of a model that take new requests can have at once, over all brains, before the
    time to first token suffers.

    `requests`: that are being answered. `prefill_tokens`: of prompts without a first token so far; no
    further one is begun then. As a prompt keeps no more than one replica busy, it counts as at most the
    part of one of so many `replicas`.
    """

    requests: int
    prefill_tokens: int
    replicas: int = 1

    def counted(self, tokens: int) -> int:
        """Of a prompt, as it counts."""
        return min(tokens, max(1, self.prefill_tokens // max(1, self.replicas)))


class Capacity(Protocol):
    """Says how much the replicas can take. The brain knows them; admission does not."""

    def room(self, model: str) -> Room: ...


def cost(computed_tokens: float, answer_tokens: float) -> float:
    """What a request takes of replicas, in tokens of a prompt."""
    return computed_tokens + ANSWER_WEIGHT * answer_tokens
