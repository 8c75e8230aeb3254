"""The decision: expected seconds to the first token at each candidate; the least wins."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from inference_brain.choice.affinity import preferred, ranked
from inference_brain.choice.candidates import Asked, Candidate, Path
from inference_brain.choice.columns import Many
from inference_brain.choice.rates import (
    DECODE,
    EACH,
    LEAF,
    LOCAL,
    PAIR,
    RAIL,
    REQUEST,
    SIBLING,
    SIZE,
    SPINE,
    STEP_TOKENS,
    TIER2,
    TOKEN,
)
from telemetry.units import duration

# From so many on all are compared roughly first, and those that may be chosen exactly.
MANY: Final = 48
EXACT: Final = 24
# A replica with fewer observations is uncertain. One in so many requests tries one, if that is expected
# to take at most so many times as long as the best.
CERTAIN: Final = 8.0
TRIAL_SHARE: Final = 1 / 50
TRIAL_TIMES: Final = 2.0
_COST: Final = attrgetter("cost", "name")  # names, so that the order of candidates does not matter
_FETCH: Final = {Path.RAIL: RAIL, Path.LEAF: LEAF, Path.SPINE: SPINE, Path.LOCAL: LOCAL}


class Why(StrEnum):
    """What decided."""

    ONLY = "only"  # there was one candidate
    LEAST = "least"  # its first token was expected soonest
    AFFINITY = "affinity"  # as soon as others, within noise: by the hash of the prefix
    TRIAL = "trial"  # little is known of it
    FALLBACK = "fallback"  # estimates are off: by the hash of the prefix, the less loaded of two


class Mode(StrEnum):
    """What choices are made by."""

    ESTIMATE = "estimate"
    AFFINITY = "affinity"  # since the estimates are off


class Estimate(Struct, frozen=True, gc=False):
    """Expected seconds to the first token at a candidate, and its parts. `cost`: with the seconds that
    later requests wait longer there, since it is busy with this one. `pairs`: what attention over the
    missed tokens takes. `sibling`: the driver that tokens are borrowed from; empty where that would not
    make the first token come sooner."""

    name: str
    cost: float
    seconds: float
    wait_seconds: float
    fetch_seconds: float
    compute_seconds: float
    noise_seconds: float
    hit_tokens: float  # of those that the map promises, as many as are trusted
    sibling_tokens: float  # follow them
    tier2_tokens: float  # follow those
    missed_tokens: float
    pairs: float
    candidate: Candidate
    sibling: str = ""

    @property
    def borrowed_tokens(self) -> int:
        """What is borrowed, if the sibling has all that its map promises."""
        return self.candidate.sibling_tokens if self.sibling else 0

    @property
    def promised_tokens(self) -> int:
        """What the maps promise from memory, the sibling and tier 2."""
        candidate = self.candidate
        return candidate.hit_tokens + max(self.borrowed_tokens, candidate.tier2_tokens)


class Choice(Struct, frozen=True, gc=False):
    """Where a request goes, and why. `estimates`: of all candidates that were compared exactly, the
    least first."""

    replica: str
    why: Why
    chosen: Estimate
    estimates: tuple[Estimate, ...]
    asked: Asked
    at: float
    candidates: int  # how many there were

    def amounts(self, cached_tokens: float | None = None) -> tuple[float, ...]:
        """What the first token takes here, by kind, as `Rates` learn it; with the tokens that were
        cached in the end, if the replica says so. Of fewer than expected the first were in memory, those
        that follow were borrowed, and the last were in tier 2."""
        of = self.chosen
        hit, borrowed, tier2 = of.hit_tokens, of.sibling_tokens, of.tier2_tokens
        missed, pairs = of.missed_tokens, of.pairs
        if cached_tokens is not None:
            hit = min(cached_tokens, max(hit, cached_tokens - borrowed - tier2))
            borrowed = min(borrowed, cached_tokens - hit)
            tier2 = cached_tokens - hit - borrowed
            missed, pairs = work(self.asked.tokens, cached_tokens)
        load = of.candidate.load
        amounts = [0.0] * SIZE
        amounts[EACH] = 1.0
        amounts[TOKEN] = load.waiting_tokens + missed
        amounts[PAIR] = load.waiting_pairs + pairs
        amounts[DECODE] = load.running * (1.0 + amounts[TOKEN] / STEP_TOKENS)
        amounts[REQUEST] = load.waiting
        amounts[_FETCH[of.candidate.path]] = hit
        amounts[TIER2] = tier2
        amounts[SIBLING] = borrowed
        return tuple(amounts)

    def sentence(self) -> str:
        """Why this replica, for people; two sentences where tokens are borrowed."""
        of = self.chosen
        if not of.sibling:
            return self._why()
        return f"{self._why()} It borrows {of.borrowed_tokens:,} tokens of the prompt from {of.sibling}."

    def _why(self) -> str:
        of, name = self.chosen, self.replica
        match self.why:
            case Why.ONLY:
                return f"{name} was the only candidate."
            case Why.LEAST:
                second = next(one for one in self.estimates if one.name != name)
                return (
                    f"The first token was expected after {duration(of.seconds)} at {name}, and after "
                    f"{duration(second.seconds)} at {second.name}, the next best."
                )
            case Why.AFFINITY:
                return (
                    f"Several replicas were expected to take {duration(of.seconds)}, within "
                    f"{duration(of.noise_seconds)}; the prefix belongs to {name}."
                )
            case Why.TRIAL:
                return f"Little is known of {name} yet, so it was tried."
            case Why.FALLBACK:
                return f"Estimates are off, so prefixes stay where they belong: here {name}."


def work(tokens: float, cached: float) -> tuple[float, float]:
    """Tokens to compute, at least the last one, and how many pairs of tokens attention looks at."""
    missed = max(1.0, tokens - cached)
    return missed, missed * (tokens - missed + (missed + 1.0) / 2.0)


def estimate(asked: Asked, candidate: Candidate) -> Estimate:
    """Expected seconds to the first token of the request at this candidate: without borrowing, or with
    what a sibling lends, whichever is less.

    What is borrowed takes the place of what tier 2 has of the same tokens. It costs the sibling's engine
    nothing, so its load does not matter.
    """
    rates, load, sibling = candidate.rates, candidate.load, candidate.sibling
    hit, tier2, lent = candidate.hit_tokens, candidate.tier2_tokens, candidate.sibling_tokens
    seconds, trust = rates.seconds, candidate.trust
    hit_tokens, tier2_tokens = hit * trust, tier2 * trust
    missed, pairs = work(asked.tokens, hit_tokens + tier2_tokens)
    tokens, running = load.waiting_tokens, load.running
    each_token = seconds[TOKEN] + seconds[DECODE] * running / STEP_TOKENS
    wait = (
        load.overdue_seconds
        + each_token * tokens
        + seconds[PAIR] * load.waiting_pairs
        + seconds[REQUEST] * load.waiting
    )
    memory = seconds[_FETCH[candidate.path]] * hit_tokens
    fetch = memory + seconds[TIER2] * tier2_tokens
    step = seconds[EACH] + seconds[DECODE] * running
    compute = step + each_token * missed + seconds[PAIR] * pairs
    borrowed = 0.0
    if sibling:
        lent_tokens = lent * rates.sibling_trust
        rest = max(0, tier2 - lent) * trust
        lent_missed, lent_pairs = work(asked.tokens, hit_tokens + lent_tokens + rest)
        lent_fetch = memory + seconds[SIBLING] * lent_tokens + seconds[TIER2] * rest
        lent_compute = step + each_token * lent_missed + seconds[PAIR] * lent_pairs
        if lent_fetch + lent_compute < fetch + compute:
            borrowed, tier2_tokens, missed, pairs = lent_tokens, rest, lent_missed, lent_pairs
            fetch, compute = lent_fetch, lent_compute
        else:
            sibling = ""
    whole = wait + fetch + compute
    turn = fetch + compute
    cost = whole + rates.traffic.pressure * turn * (turn + 2.0 * wait)
    if not (wait >= 0.0 and math.isfinite(cost)):
        cost = math.inf  # a load that cannot be is the worst one, and hides no other candidate
    noise = rates.noise(cost)
    return Estimate(
        candidate.name,
        cost,
        whole,
        wait,
        fetch,
        compute,
        noise,
        hit_tokens,
        borrowed,
        tier2_tokens,
        missed,
        pairs,
        candidate,
        sibling,
    )


def choose(
    asked: Asked,
    candidates: Sequence[Candidate],
    now: float,
    rng: random.Random,
    mode: Mode = Mode.ESTIMATE,
) -> Choice:
    """The candidate where the first token is expected soonest, for this request and those after it.
    Raises ValueError without candidates.

    `rng` is asked whether to try one. The order of candidates does not matter; their names are
    different.
    """
    if not candidates:
        raise ValueError("there is no candidate to choose from")
    compared = candidates
    if len(candidates) > MANY:
        many = candidates if isinstance(candidates, Many) else Many.of(candidates)
        compared = many.best(asked.tokens, asked.affinity, EXACT, anywhere=mode is Mode.AFFINITY)
    found = [estimate(asked, one) for one in compared]
    if len(found) > 1:
        found.sort(key=_COST)
    estimates = tuple(found)
    chosen, why = _decide(asked, estimates, now, rng, mode)
    # Only the decision needs the affinity, and what is remembered of requests outlives purges.
    kept = replace(asked, affinity=b"") if asked.affinity else asked
    return Choice(chosen.name, why, chosen, estimates, kept, now, len(candidates))


def _decide(
    asked: Asked, estimates: Sequence[Estimate], now: float, rng: random.Random, mode: Mode
) -> tuple[Estimate, Why]:
    best = estimates[0]
    if len(estimates) == 1:
        return best, Why.ONLY
    if mode is Mode.AFFINITY:
        first, second = ranked(asked.affinity, estimates)[:2]
        return (second if _queue(second) < _queue(first) else first), Why.FALLBACK
    if rng.random() < TRIAL_SHARE and (trial := _trial(estimates, now)):
        return trial, Why.TRIAL
    bound = best.cost + best.noise_seconds
    equal = [one for one in estimates if one.cost <= bound]
    if len(equal) == 1:
        return best, Why.LEAST
    # A second copy takes room and bandwidth: of equals those come first that need none.
    return preferred(asked.affinity, [one for one in equal if not one.sibling] or equal), Why.AFFINITY


def _queue(one: Estimate) -> int:
    load = one.candidate.load
    return load.waiting + load.running


def _trial(estimates: Sequence[Estimate], now: float) -> Estimate | None:
    """The uncertain candidate that is expected to cost least, if it is not expected to cost much."""
    bound = estimates[0].cost * TRIAL_TIMES
    for one in estimates:
        if one.cost > bound:
            return None
        if one.candidate.rates.observations_at(now) < CERTAIN:
            return one
    return None
