"""Candidates as arrays: of a thousand replicas most are told apart by their queues and rates only, and
to make an object of each takes longer than all the rest of a decision.

What does not depend on the request is kept in columns, a number for each replica, and written anew for
those of which it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from inference_brain.choice.candidates import Candidate, Load
from inference_brain.choice.rates import PAIR, SIBLING, TOKEN, Rates

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class RateColumns:
    """Rates of replicas, by their places among `names`. `is_known`: whether there are any."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.is_known = np.zeros(len(names), bool)
        self._places = {name: place for place, name in enumerate(names)}
        self._all = np.zeros((5, len(names)))
        self.token, self.pair, self.sibling, self.trust, self.sibling_trust = self._all

    def set(self, name: str, rates: Rates) -> None:
        if (place := self._places.get(name)) is not None:
            seconds = rates.seconds
            self.is_known[place] = True
            self._all[:, place] = (
                *(seconds[TOKEN], seconds[PAIR], seconds[SIBLING]),
                *(rates.trust, rates.sibling_trust),
            )


class Queues(NamedTuple):
    """What replicas have to do before they get to another request, as in `Load`."""

    tokens: Floats
    pairs: Floats
    overdue_seconds: Floats

    @classmethod
    def none(cls, count: int) -> Queues:
        """Of so many replicas that have nothing to do."""
        return cls(*np.zeros((3, count)))

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Queues:
        kinds = zip(
            *((one.waiting_tokens, one.waiting_pairs, one.overdue_seconds) for one in loads), strict=True
        )
        return cls(*(np.array(kind, np.float64) for kind in kinds))

    def plus(self, other: Queues) -> Queues:
        return Queues(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            np.maximum(self.overdue_seconds, other.overdue_seconds),
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

    def best(self, tokens: int, count: int) -> list[Candidate]:
        """The best so many for a request of so many tokens, by a rough estimate; of equals those whose
        names come first."""
        rough = self._rough(tokens)[self._which]
        bound = np.partition(rough, count - 1)[count - 1]
        [best] = (rough < bound).nonzero()
        [equal] = (rough == bound).nonzero()
        places = np.concatenate((best, equal[: count - best.size]))
        return [self._make(one) for one in self._which[places].tolist()]

    def _rough(self, tokens: int) -> Floats:
        """Seconds until the first token, as far as replicas are told apart by them, and where nothing
        has to be fetched."""
        queues, rates = self._queues(), self._rates
        hit, tier2, lent = self._hit_tokens, self._tier2_tokens, self._sibling_tokens
        missed = queues.tokens + tokens - (hit + tier2) * rates.trust
        rough: Floats = queues.overdue_seconds + rates.token * missed + rates.pair * queues.pairs
        if lent.any():
            # With what fetching takes: else who has the tokens would be no better than who borrows them.
            borrows = (lent > tier2) & (rates.sibling < rates.token)
            saved = (rates.token - rates.sibling) * (lent - tier2) * rates.sibling_trust
            rough -= np.where(borrows, saved, 0.0)
        return rough
