"""How fast a replica is, learned from the first tokens that it gave.

The time to a first token is taken to be a sum of things that take time, each with a rate that is never
negative:

    seconds = each request + each prompt token, before it and of its own + each pair in attention
            + each decoding step beside them + each request before it + each token fetched, by path

The rates are the weighted least squares of what was observed, with forgetting: an observation counts
half after `HALF_LIFE` others, sooner while all err on one side, or after `HALF_LIFE_SECONDS`. What is
not known from this replica is taken from the others of its model (`prior`), the less the more is known.
An observation far from what was expected counts less (Huber), so that one stalled request does not
change the picture, and several do.

Where times vary more than prompts do, a prompt token may seem to take nothing. How much a replica can
take, and what a hit is worth, follow from it, so it is taken to take at least `TOKEN_PART` of what it
does at the model's other replicas, or by default: less only as far as the replica was seen to be fast.

Solving takes as long as a whole decision. So what was observed within `SOLVE_SECONDS` is solved at once,
by the next observation after that or by `settle`, which comes before a decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

EACH, TOKEN, PAIR, DECODE, REQUEST, RAIL, LEAF, SPINE, LOCAL, TIER2, SIBLING = range(11)
NAMES: Final = (
    *("request", "token", "pair", "decoding_step", "waiting_request"),
    *("rail_token", "leaf_token", "spine_token", "local_token", "tier2_token", "sibling_token"),
)
SIZE: Final = len(NAMES)
# Tokens that an engine computes in one step beside decoding, about: the unit of interference.
STEP_TOKENS: Final = 1024.0
# What is assumed before anything is known: about 70 billion parameters on eight GPUs.
DEFAULT: Final = (0.02, 1e-4, 1e-9, 1e-4, 1e-3, 2e-6, 2e-6, 4e-6, 1e-6, 2e-5, 4e-6)
# Typical amounts of each, so that all rates are looked for at one scale.
SCALE: Final = (1.0, 1e-3, 1e-7, 1e-1, 1e-1, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4)
HALF_LIFE: Final = 32.0  # observations
HALF_LIFE_SECONDS: Final = 600.0
DRIFT_TIMES: Final = 8.0  # that much faster is forgotten when all observations err on one side
PRIOR_OBSERVATIONS: Final = 8.0  # that the other replicas count for
DEFAULT_OBSERVATIONS: Final = 0.01  # that the default counts for
TRAFFIC_SECONDS: Final = 60.0  # after which a request counts half
BUSY_MAX: Final = 0.9
HUBER: Final = 2.0  # spreads
SPREAD_STEP: Final = 1 / 16
SPREAD_MIN: Final = 1e-3
NOISE_SHARE_MAX: Final = 0.05
SWEEPS_MAX: Final = 12
CLOSE: Final = 1e-4  # of a rate: it changes no further
SECONDS_MIN: Final = 1e-4  # shorter times are weighed like this
TOKEN_PART: Final = 1 / 8
TOKEN_SECONDS_MIN: Final = 1e-6  # no engine computes a prompt token in less
PACE_KEPT: Final = 0.98  # of the pace that was seen, with each answer
SOLVE_SECONDS: Final = 0.1  # between two solutions
EAGER: Final = 8.0  # observations up to which each one is solved
_KEEP: Final = 0.5 ** (1 / HALF_LIFE)

Amounts = Sequence[float]


class Prior(NamedTuple):
    """What is known of the other replicas of a model, as if observed: see `prior`."""

    rates: Sequence[float]
    gram: Sequence[Sequence[float]]
    moment: Sequence[float]


def prior(rates: Sequence[float], gram: Sequence[Sequence[float]], observations: float) -> Prior:
    """What counts as `PRIOR_OBSERVATIONS` at these rates, of amounts as they were in so many."""
    part = PRIOR_OBSERVATIONS / observations
    known = [rate / scale for rate, scale in zip(rates, SCALE, strict=True)]
    of = [[part * value for value in row] for row in gram]
    return Prior(rates, of, [sum(map(float.__mul__, row, known)) for row in of])


class Traffic:
    """How many requests come to each replica of a model, and how busy they are with them. Both forget.

    A replica that is busy for longer lets later requests wait longer. By how much follows from the
    theory of queues: with `arrivals` a second, and a part `busy` of the time that it is busy, `seconds`
    more work on top of a queue of `wait` seconds cost all later requests together

        arrivals / (2 (1 - busy)) * seconds * (seconds + 2 wait)
    """

    __slots__ = ("_at", "_began", "_busy", "_requests", "pressure")

    def __init__(self) -> None:
        self._at = self._began = -math.inf
        self._requests = self._busy = 0.0
        self.pressure = 0.0  # the first factor

    def add(self, seconds: float, replicas: int, now: float) -> None:
        """A request that so many seconds of work belong to, to one of so many replicas."""
        if not math.isfinite(self._at):
            self._at = self._began = now
        fade = 0.5 ** (max(0.0, now - self._at) / TRAFFIC_SECONDS)
        self._at = max(now, self._at)
        self._requests = self._requests * fade + 1.0
        self._busy = self._busy * fade + seconds
        elapsed = self._at - self._began
        if elapsed <= 0.0:
            return
        # Of a stream that has lasted forever so many seconds' worth are remembered.
        window = TRAFFIC_SECONDS / math.log(2) * (1.0 - 0.5 ** (elapsed / TRAFFIC_SECONDS))
        arrivals = self._requests / window / replicas
        busy = min(self._busy / window / replicas, BUSY_MAX)
        self.pressure = arrivals / (2.0 * (1.0 - busy))


class _Promises:
    """Which part of the tokens that were expected to be hits were hits. Forgets."""

    __slots__ = ("_expected", "_hits")

    def __init__(self) -> None:
        self._hits = self._expected = 0.0

    def observe(self, expected: float, actual: float) -> float:
        """Returns the part."""
        self._hits = self._hits * _KEEP + min(actual, expected)
        self._expected = self._expected * _KEEP + expected
        # As if so many tokens had been hits before.
        known = 8 * STEP_TOKENS
        return (self._hits + known) / (self._expected + known)


class Rates:
    """Of one replica. `seconds` are seconds of each amount."""

    __slots__ = (
        "_at",
        "_bias",
        "_borrowed",
        "_free",
        "_gram",
        "_guesses",
        "_hits",
        "_is_behind",
        "_moment",
        "_plain",
        "_prior",
        "_seen",
        "_solved_at",
        "guess_trust",
        "observations",
        "pace",
        "seconds",
        "sibling_trust",
        "spread",
        "traffic",
        "trust",
    )

    def __init__(self, prior: Prior | None = None, traffic: Traffic | None = None) -> None:
        self.traffic = traffic or Traffic()
        self._gram = [[0.0] * SIZE for _ in range(SIZE)]
        self._moment = [0.0] * SIZE
        self._prior = prior
        self._at = -math.inf
        self._seen = 0.0  # observations that time has not made old, however many came since
        self._plain = 0.0  # of those, of requests that are plain
        self._bias = 0.0  # like `spread`, with its sign
        self._hits, self._guesses, self._borrowed = _Promises(), _Promises(), _Promises()
        self._is_behind = False  # something observed is not solved
        self._solved_at = -math.inf
        self.observations = 0.0  # that are not forgotten
        self.spread = 0.5  # of observed around expected, relative to the square root of the expected
        self.trust = 1.0  # part of the hits that its map promised that were hits
        self.guess_trust = 1.0  # the same of hits that were guessed, while no map of it was known
        self.sibling_trust = 1.0  # the same of tokens that it was expected to borrow
        self.seconds: tuple[float, ...] = tuple(prior.rates) if prior else DEFAULT
        self._free = [rate / scale for rate, scale in zip(self.seconds, SCALE, strict=True)]
        self.pace = 0.0  # tokens a second that it was seen to compute, at least

    def __repr__(self) -> str:
        known = ", ".join(f"{name} {rate:.3g}" for name, rate in zip(NAMES, self.seconds, strict=True))
        return f"Rates({known})"

    def expected(self, amounts: Amounts) -> float:
        return sum(map(float.__mul__, self.seconds, map(float, amounts)))

    def noise(self, expected: float) -> float:
        """By how many seconds an estimate of this size may be wrong for want of observations; where
        little is known, by a small part, so that it still tells candidates apart."""
        noise = self.spread * math.sqrt(max(expected, SECONDS_MIN) / (1.0 + self.observations))
        return max(0.0, min(noise, NOISE_SHARE_MAX * expected))

    def observations_at(self, now: float) -> float:
        """How many observations count at this time."""
        return self.observations * self._fade(now)

    def show_pace(self, tokens: float, seconds: float) -> None:
        """It has computed so many tokens within so many seconds."""
        self.pace = max(PACE_KEPT * self.pace, tokens / max(seconds, SECONDS_MIN))

    def plain_at(self, now: float) -> float:
        """How many observations of plain requests count at this time."""
        return self._plain * self._fade(now)

    def observe(self, amounts: Amounts, seconds: float, now: float, *, is_plain: bool = True) -> None:
        """A first token came after so many seconds. Times that are no numbers are left out."""
        if not (math.isfinite(seconds) and seconds >= 0 and all(map(math.isfinite, amounts))):
            return
        expected = max(self.expected(amounts), SECONDS_MIN)
        # The variance grows with the time itself.
        signed = (seconds - expected) / math.sqrt(expected)
        deviation = abs(signed)
        bound = HUBER * self.spread
        weight = (bound / deviation if deviation > bound else 1.0) / expected
        fade = self._fade(now)
        keep = self._keep() * fade
        self._seen = self._seen * fade + 1.0
        self._plain = self._plain * fade + is_plain
        self._at = max(now, self._at)
        self.observations = self.observations * keep + 1.0
        # A stall of an hour is forgotten like one of a minute; a few of either widen the bound.
        deviation = min(deviation, 4 * bound)
        self.spread = max(SPREAD_MIN, self.spread + SPREAD_STEP * (deviation - self.spread))
        self._bias += SPREAD_STEP * (math.copysign(deviation, signed) - self._bias)
        self._add(amounts, seconds, weight, keep)
        self._is_behind = True
        self.settle(now)

    def settle(self, now: float) -> bool:
        """Solve what was observed, if that is due. Whether nothing is left to be solved."""
        if self._is_behind and (self._seen <= EAGER or not 0.0 <= now - self._solved_at < SOLVE_SECONDS):
            self._solve(now)
        return not self._is_behind

    def observe_hits(self, expected: float, actual: float) -> None:
        """How many of the tokens that the map promised were hits."""
        self.trust = self._hits.observe(expected, actual)

    def observe_guess(self, expected: float, actual: float) -> None:
        """How many of the tokens that were guessed to be hits were. It says nothing of the map: a
        replica that starts caches nothing until its driver is there, and then a map is known."""
        self.guess_trust = self._guesses.observe(expected, actual)

    def observe_borrowed(self, expected: float, actual: float) -> None:
        """How many of the tokens that were expected to be borrowed were hits. Also called where none
        were expected, so that a fault of siblings is forgotten though nothing is borrowed."""
        self.sibling_trust = self._borrowed.observe(expected, actual)

    def follow(self, prior: Prior, now: float) -> None:
        """Take over what is known of the others by now."""
        self._prior = prior
        fade = self._fade(now)
        if math.isfinite(self._at):
            self._at = max(now, self._at)
        if fade < 1.0:
            self.observations *= fade
            self._seen *= fade
            self._plain *= fade
            for row in self._gram:
                row[:] = [value * fade for value in row]
            self._moment = [value * fade for value in self._moment]
        self._is_behind = True
        self.settle(now)

    def has_observed(self, kind: int) -> bool:
        """Whether its rate of this is more of what was observed here than of what is assumed."""
        return self._gram[kind][kind] > DEFAULT_OBSERVATIONS

    def add_to(self, gram: list[list[float]]) -> None:
        """Add what was observed here to a sum over replicas."""
        for row, own in zip(gram, self._gram, strict=True):
            row[:] = map(float.__add__, row, own)

    def _keep(self) -> float:
        """What the next observation leaves of those before: the less the more they all err on one
        side, which is what they do when the truth has moved."""
        one_sided = min(1.0, abs(self._bias) / self.spread)
        return math.pow(_KEEP, 1.0 + (DRIFT_TIMES - 1.0) * one_sided * one_sided)

    def _fade(self, now: float) -> float:
        seconds = now - self._at
        return 0.5 ** (seconds / HALF_LIFE_SECONDS) if 0.0 < seconds < math.inf else 1.0

    def _add(self, amounts: Amounts, seconds: float, weight: float, keep: float) -> None:
        scaled = [float(amount) * scale for amount, scale in zip(amounts, SCALE, strict=True)]
        for row, one in zip(self._gram, scaled, strict=True):
            if one:
                by = weight * one
                row[:] = [value * keep + by * other for value, other in zip(row, scaled, strict=True)]
            else:
                row[:] = [value * keep for value in row]
        by = weight * seconds
        self._moment = [value * keep + by * one for value, one in zip(self._moment, scaled, strict=True)]

    def _solve(self, now: float) -> None:
        """The rates that fit best, by coordinate descent from those of before: none is negative, and a
        token takes as long as it must."""
        self._is_behind, self._solved_at = False, now
        gram, moment = self._gram, self._moment
        toward: tuple[float, ...] = DEFAULT
        if prior := self._prior:
            toward = tuple(prior.rates)
            part = 1.0 / (1.0 + self._seen / PRIOR_OBSERVATIONS)
            gram = [
                [own + part * other for own, other in zip(*rows, strict=True)]
                for rows in zip(gram, prior.gram, strict=True)
            ]
            moment = [own + part * other for own, other in zip(moment, prior.moment, strict=True)]
        pulls = [rate / scale for rate, scale in zip(toward, SCALE, strict=True)]
        self._free = known = _fit(gram, moment, self._free, pulls)
        least = self._token_min(toward) / SCALE[TOKEN]
        if known[TOKEN] < least:
            known = _fit(gram, moment, known, pulls, least)
        self.seconds = tuple(rate * scale for rate, scale in zip(known, SCALE, strict=True))

    def _token_min(self, toward: Sequence[float]) -> float:
        """The default counts as well, since the other replicas may seem as fast for the same reason."""
        usual = max(toward[TOKEN], DEFAULT[TOKEN])
        seen = 1.0 / self.pace if self.pace else usual
        return max(TOKEN_PART * min(usual, seen), TOKEN_SECONDS_MIN)


def _fit(
    gram: Sequence[Amounts],
    moment: Amounts,
    before: Amounts,
    pulls: Amounts,
    token_min: float = 0.0,
) -> list[float]:
    """Rates, from those of `before` on. What nothing was observed of goes where it is pulled."""
    known = list(before)
    for _ in range(SWEEPS_MAX):
        change = 0.0
        for index, row in enumerate(gram):
            own, last = row[index], known[index]
            left = moment[index] - sum(map(float.__mul__, row, known)) + own * last
            rate = (left + DEFAULT_OBSERVATIONS * pulls[index]) / (own + DEFAULT_OBSERVATIONS)
            known[index] = rate = max(token_min if index == TOKEN else 0.0, rate)
            change = max(change, abs(rate - last) - CLOSE * rate)
        if change <= 0.0:
            break
    return known
