"""Candidates as arrays: of a thousand replicas most are told apart by their queues and rates only, and
to make an object of each takes longer than all the rest of a decision.

What does not depend on the request is kept in columns, a number for each replica, and written anew for
those of which it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from inference_brain.choice.affinity import scores
from inference_brain.choice.candidates import Candidate, Load
from inference_brain.choice.rates import (
    DECODE,
    EACH,
    PAIR,
    REQUEST,
    SIBLING,
    STEP_TOKENS,
    TOKEN,
    Rates,
)

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class RateColumns:
    """Rates of replicas, by their places among `names`. `unknown`: those of which there are none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.unknown = {*range(len(names))}
        self._places = {name: place for place, name in enumerate(names)}
        self._all = np.zeros((9, len(names)))
        self.each, self.token, self.pair, self.decode, self.request, *rest = self._all
        self.sibling, self.trust, self.guess_trust, self.sibling_trust = rest

    @cached_property
    def encoded(self) -> Sequence[bytes]:
        """Names, as `scores` takes them."""
        return [name.encode() for name in self.names]

    def set(self, name: str, rates: Rates) -> None:
        if (place := self._places.get(name)) is not None:
            seconds = rates.seconds
            self.unknown.discard(place)
            self._all[:, place] = (
                *(seconds[kind] for kind in (EACH, TOKEN, PAIR, DECODE, REQUEST, SIBLING)),
                *(rates.trust, rates.guess_trust, rates.sibling_trust),
            )


class Queues(NamedTuple):
    """What replicas have to do before they get to another request, as in `Load`."""

    tokens: Floats
    pairs: Floats
    overdue_seconds: Floats
    running: Floats
    waiting: Floats

    @classmethod
    def none(cls, count: int) -> Queues:
        """Of so many replicas that have nothing to do."""
        return cls(*np.zeros((5, count)))

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Queues:
        kinds = zip(
            *(
                (
                    *(one.waiting_tokens, one.waiting_pairs, one.overdue_seconds),
                    *(one.running, one.waiting),
                )
                for one in loads
            ),
            strict=True,
        )
        return cls(*(np.array(kind, np.float64) for kind in kinds))

    def plus(self, other: Queues) -> Queues:
        return Queues(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            np.maximum(self.overdue_seconds, other.overdue_seconds),
            self.running + other.running,
            self.waiting + other.waiting,
        )


class Many(Sequence[Candidate]):
    """Candidates in the order of their names, each of which is made when it is asked for. `which`: of
    each, its place in the columns. `queues`: is asked when many have to be compared."""

    def __init__(
        self,
        which: Integers,
        hit_tokens: Integers,
        tier2_tokens: Integers,
        sibling_tokens: Integers,
        is_guess: npt.NDArray[np.bool_],
        queues: Callable[[], Queues],
        rates: RateColumns,
        make: Callable[[int], Candidate],
    ) -> None:
        self._which, self._make = which, make
        self._hit_tokens, self._tier2_tokens, self._sibling_tokens = (
            hit_tokens,
            tier2_tokens,
            sibling_tokens,
        )
        self._is_guess = is_guess
        self._queues, self._rates = queues, rates

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Many:
        """Of candidates that there are."""
        ordered = sorted(candidates, key=lambda one: one.name)
        rates = RateColumns([one.name for one in ordered])
        for one in ordered:
            rates.set(one.name, one.rates)
        return cls(
            np.arange(len(ordered)),
            np.array([one.hit_tokens for one in ordered], np.int64),
            np.array([one.tier2_tokens for one in ordered], np.int64),
            np.array([one.sibling_tokens for one in ordered], np.int64),
            np.array([one.is_guess for one in ordered], bool),
            lambda: Queues.of([one.load for one in ordered]),
            rates,
            ordered.__getitem__,
        )

    def __len__(self) -> int:
        return self._which.size

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice):
            return [self._make(one) for one in self._which[at].tolist()]
        return self._make(int(self._which[at]))

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._make, self._which.tolist())

    def best(
        self, tokens: int, affinity: bytes, count: int, *, anywhere: bool = False
    ) -> list[Candidate]:
        """So many that are worth an exact estimate for a request of so many tokens, by a rough one of
        each.

        Half of them are the best; of equals those that the affinity prefers. The others are those that
        it prefers among all that are as good as the best, within noise, or with `anywhere` among all: so
        a prefix stays with one of many equals, and each of them has prefixes. Where there are fewer, the
        next best.
        """
        rough = self._rough(tokens)[self._which]
        by_score = np.argsort(self._scores(affinity), kind="stable")[::-1]
        by_rough = by_score[np.argsort(rough[by_score], kind="stable")]
        first = by_rough[: count // 2]
        best, least = self[int(first[0])], float(rough[first[0]])
        may_follow = rough <= (np.inf if anywhere else least + best.rates.noise(least))
        may_follow[first] = False
        second = by_score[may_follow[by_score]][: count - first.size]
        is_left = np.ones(rough.size, bool)
        is_left[first] = is_left[second] = False
        third = by_rough[is_left[by_rough]][: count - first.size - second.size]
        places = self._which[np.concatenate((first[1:], second, third))]
        return [best, *map(self._make, places.tolist())]

    def _scores(self, affinity: bytes) -> npt.NDArray[np.uint64]:
        names = self._rates.encoded
        if len(self) < len(names):
            names = [names[place] for place in self._which.tolist()]
        return scores(affinity, names)

    def _rough(self, tokens: int) -> Floats:
        """Seconds until the first token, as `estimate` has them, where nothing has to be fetched."""
        queues, rates = self._queues(), self._rates
        hit, tier2, lent = self._hit_tokens, self._tier2_tokens, self._sibling_tokens
        with np.errstate(invalid="ignore", over="ignore"):  # a queue may be of any length
            own = tokens - (hit + tier2) * np.where(self._is_guess, rates.guess_trust, rates.trust)
            step = rates.decode * queues.running
            each_token = rates.token + step / STEP_TOKENS
            wait: Floats = queues.overdue_seconds + each_token * queues.tokens
            wait += rates.pair * queues.pairs + rates.request * queues.waiting
            pairs = own * (tokens - own + (own + 1.0) / 2.0)
            rough: Floats = wait + (rates.each + step + each_token * own + rates.pair * pairs)
            if lent.any():
                # With what fetching takes: else who has the tokens would be no better than who borrows
                # them.
                borrows = (lent > tier2) & (rates.sibling < each_token)
                saved = (each_token - rates.sibling) * (lent - tier2) * rates.sibling_trust
                rough -= np.where(borrows, saved, 0.0)
        rough[~(np.isfinite(rough) & (wait >= 0.0))] = np.inf
        return rough
