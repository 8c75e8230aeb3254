"""What is known of all replicas of a model: their rates, what they have in common, and how far estimates
are off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from inference_brain.choice.choice import Choice, Estimate, Mode, work
from inference_brain.choice.columns import RateColumns
from inference_brain.choice.outcome import Outcome
from inference_brain.choice.rates import (
    CLOSE,
    SECONDS_MIN,
    SIZE,
    TOKEN,
    TOKEN_SECONDS_MIN,
    Prior,
    Rates,
    Traffic,
    prior,
)

REPLICAS_MAX: Final = 4096
KNOWN: Final = 4.0  # observations from which on a replica counts for the others
REFRESH: Final = 8  # observations after which what replicas have in common is taken anew, at least
JUDGED: Final = 32.0  # observations from which on estimates may be called off
# Estimates are off while their mean error is above half of the mean time, and above that of taking the
# mean for an estimate. They hold again when it is below so much of either.
OFF: Final = 0.5
AGAIN: Final = 0.8
_STEP: Final = 1 / 64


class ModelRates:
    """Of one model."""

    def __init__(self) -> None:
        self._rates: dict[str, Rates] = {}
        self._prior: Prior | None = None
        self._until_refresh = REFRESH
        self._turn: list[str] = []  # replicas that are brought up to date next, one at a time
        self._behind: set[str] = set()  # replicas of which something observed is not solved
        self._columns: RateColumns | None = None
        self._changed: set[str] = set()  # replicas whose rates are others than the columns have
        self.error = Error()
        self.traffic = Traffic()

    def __len__(self) -> int:
        return len(self._rates)

    def columns(self, names: Sequence[str]) -> RateColumns:
        """Of these replicas, by their places. Whoever asks again gives the same list."""
        if self._columns is None or self._columns.names is not names:
            self._columns = RateColumns(names)
            self._changed = set(names)
        for name in self._changed:
            if rates := self._rates.get(name):
                self._columns.set(name, rates)
        self._changed = set()
        return self._columns

    @property
    def mode(self) -> Mode:
        return Mode.AFFINITY if self.error.is_off else Mode.ESTIMATE

    def of(self, name: str) -> Rates:
        """A new replica begins with what the others have in common. Raises ValueError for too many."""
        found = self._rates.get(name)
        if found is None:
            if len(self._rates) >= REPLICAS_MAX:
                raise ValueError(f"a model has at most {REPLICAS_MAX} replicas")
            found = self._rates[name] = Rates(self._prior, self.traffic)
            self._changed.add(name)
        return found

    def answered(self, choice: Choice, seconds: float) -> None:
        """A whole answer came after so many seconds: the replica computes no slower than that. Of an
        answer that is no stream nothing else is known."""
        if rates := self._rates.get(choice.replica):
            rates.show_pace(choice.chosen.missed_tokens, seconds)

    def pace(self, name: str) -> float:
        """Tokens of prompts that a replica computes in a second, at least. What may be sent to it at
        once is bounded by that; where it is better to be is not: then the first one to answer would get
        all requests."""
        rates = self.of(name)
        return max(1.0 / max(rates.seconds[TOKEN], TOKEN_SECONDS_MIN), rates.pace)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget replicas that are not served any more."""
        kept = set(names)
        self._rates = {name: rates for name, rates in self._rates.items() if name in kept}
        self._behind &= kept
        self._columns = None

    def settle(self, now: float) -> None:
        """Take what was observed into the rates, as far as that is due; before they are used."""
        if self._behind:
            settled = {name for name in self._behind if self.of(name).settle(now)}
            self._behind -= settled
            self._changed |= settled

    def observe(self, choice: Choice, outcome: Outcome, now: float) -> None:
        """The first token of a request came. What failed before it is not observed.

        Of a request that is not plain the engine may prepare something for as long as its client likes.
        Nothing is learned from how long that takes where plain ones are observed as well: else one org
        would decide what is known of a replica, and where requests of others go.
        """
        seconds = outcome.ttft_seconds
        if seconds is None or not math.isfinite(seconds) or seconds < 0:
            return
        rates = self._rates.get(choice.replica)
        if rates is None:  # it was removed meanwhile
            return
        turn = choice.chosen.fetch_seconds + choice.chosen.compute_seconds
        self.traffic.add(turn, choice.candidates, now)
        if outcome.cached_tokens is not None:
            _observe_hits(rates, choice.chosen, outcome.cached_tokens)
        self._changed.add(choice.replica)
        is_plain, cached = choice.asked.is_plain, outcome.cached_tokens
        if is_plain and cached is not None:
            rates.show_pace(work(choice.asked.tokens, cached)[0], seconds)
        if not is_plain and rates.plain_at(now) >= KNOWN:
            return
        self.error.add(choice.chosen.seconds, seconds)
        rates.observe(choice.amounts(cached), seconds, now, is_plain=is_plain)
        self._behind.add(choice.replica)
        self._refresh(now)

    def _refresh(self, now: float) -> None:
        """Now and then what replicas have in common, and one replica that may be out of date."""
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._until_refresh = max(REFRESH, len(self._rates) // 4)
            self._prior = self._common(now) or self._prior
        if not self._prior or self._until_refresh % 4:
            return
        if not self._turn:
            self._turn = list(self._rates)
        name = self._turn.pop()
        if rates := self._rates.get(name):
            rates.follow(self._prior, now)
            self._behind.add(name)
            self._changed.add(name)

    def _common(self, now: float) -> Prior | None:
        """The median of each rate, so that no single replica spoils the others' estimates: of replicas
        that it was observed of, if there are any. The others only repeat what they were told of it."""
        known = [one for one in self._rates.values() if one.observations_at(now) >= KNOWN]
        if not known:
            return None
        gram = [[0.0] * SIZE for _ in range(SIZE)]
        for one in known:
            one.add_to(gram)
        count = sum(one.observations for one in known)
        common = []
        for kind in range(SIZE):
            observed = [one for one in known if one.has_observed(kind)] or known
            common.append(statistics.median(one.seconds[kind] for one in observed))
        return prior(common, gram, count)


def _observe_hits(rates: Rates, of: Estimate, cached: int) -> None:
    """What was to be borrowed is judged by itself: siblings that do not lend say nothing of the map. So
    is what precedes it; what follows it can be no hit without it, and is not judged."""
    own, borrowed = of.candidate.own_tokens, of.borrowed_tokens
    if borrowed:
        own = of.candidate.hit_tokens
    if own and of.candidate.is_guess:
        rates.observe_guess(own, cached)
    elif own:
        rates.observe_hits(own, cached)
    rates.observe_borrowed(borrowed, max(0, cached - own))


class Error:
    """How far estimates are off, as means that forget."""

    __slots__ = (
        "is_off",
        "mean_seconds",
        "observations",
        "seconds",
        "seconds_of_mean",
        "signed_seconds",
    )

    def __init__(self) -> None:
        self.observations = 0.0
        self.seconds = 0.0  # of the estimate
        self.signed_seconds = 0.0  # positive: first tokens come later than expected
        self.mean_seconds = 0.0  # to the first token
        self.seconds_of_mean = 0.0  # of taking the mean for an estimate
        self.is_off = False

    @property
    def share(self) -> float:
        """Of the mean time to the first token."""
        return self.seconds / max(self.mean_seconds, SECONDS_MIN)

    def add(self, expected: float, actual: float) -> None:
        self.observations += 1.0
        step = max(_STEP, 1.0 / self.observations)
        off = actual - expected
        plain = abs(actual - self.mean_seconds) if self.observations > 1 else 0.0
        self.seconds += step * (abs(off) - self.seconds)
        self.signed_seconds += step * (off - self.signed_seconds)
        self.seconds_of_mean += step * (plain - self.seconds_of_mean)
        self.mean_seconds += step * (actual - self.mean_seconds)
        if self.observations >= JUDGED:
            factor = AGAIN if self.is_off else 1.0
            self.is_off = self.seconds > factor * OFF * self.mean_seconds + CLOSE and (
                self.seconds > factor * self.seconds_of_mean
            )
