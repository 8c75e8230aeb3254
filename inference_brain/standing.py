"""What is known of a model's replicas, by their numbers in its roster, so that a decision among many
costs little more than one among few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inference_brain.choice.candidates import Load
from inference_brain.choice.columns import Queues
from inference_brain.maps import CacheMaps, Hits, Siblings
from inference_brain.maps.siblings import Lent
from inference_brain.upstream.fleet import Numbers, Roster


class Found(NamedTuple):
    """What replicas have of a prompt, by their numbers: tokens in memory, or of which that is guessed;
    further ones in tier 2; and what follows those in memory and their best siblings have there."""

    hit_tokens: Numbers
    tier2_tokens: Numbers
    sibling_tokens: Numbers
    is_guess: npt.NDArray[np.bool_]
    lent: Lent | None
    is_unknown: bool = False  # nothing is known of any

    def sibling(self, number: int) -> str:
        return self.lent.sibling(number) if self.lent and self.sibling_tokens[number] else ""

    def cached(self, among: Numbers) -> int:
        """The most that any of these has, or could borrow."""
        if self.is_unknown:
            return 0
        more = np.maximum(self.tier2_tokens, self.sibling_tokens)
        return int((self.hit_tokens + more)[among].max())


class Standing:
    """What is the same for all requests to a model until the next document, or hardly ever changes: by
    the numbers of its replicas. `asked`: which drivers are looked up where replicas may borrow."""

    def __init__(self, model: str, roster: Roster, siblings: Siblings) -> None:
        drivers = [one.spec.driver for one in roster.replicas]
        self.drivers = tuple(one.name if one else "" for one in drivers)
        self.without_driver = [number for number, one in enumerate(drivers) if one is None]
        self.asked = siblings.asked(self.drivers)
        self.roster = roster
        self._model = model
        self._elsewhere: Mapping[tuple[str, str], Load] | None = None
        self._queues = Queues.none(len(roster))
        self._changes = -1
        self._may_borrow = np.zeros(len(roster), bool)
        nobody = np.zeros(len(roster), np.int64)
        nobody.setflags(write=False)
        # Of a prompt of which nothing is known, or no cache map.
        self.no_hits = Hits.unknown(len(roster))
        for one in (self.no_hits.tokens, self.no_hits.tier2_tokens, self.no_hits.expires_at):
            one.setflags(write=False)
        self.unknown = Found(nobody, nobody, nobody, np.ones(len(roster), bool), None, is_unknown=True)

    def elsewhere(self, loads: Mapping[tuple[str, str], Load]) -> Queues:
        """What other brains have sent. What they have told is never changed, but replaced."""
        if loads is not self._elsewhere:
            self._elsewhere = loads
            self._queues = Queues.none(len(self.roster))
            numbers = self.roster.numbers
            here = [
                (numbers[name], load)
                for (model, name), load in loads.items()
                if model == self._model and name in numbers
            ]
            if here:
                which, found = zip(*here, strict=True)
                for kind, values in zip(self._queues, Queues.of(found), strict=True):
                    kind[[*which]] = values
        return self._queues

    def may_borrow(self, maps: CacheMaps) -> npt.NDArray[np.bool_]:
        """Whose maps are to be believed: else nobody knows what is missing."""
        if maps.changes != self._changes:
            self._changes = maps.changes
            self._may_borrow = np.array([maps.is_served(driver) for driver in self.drivers], bool)
        return self._may_borrow
