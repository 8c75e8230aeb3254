"""Which driver could lend what a replica's driver does not have in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from inference_brain.maps.hits import Hits, Numbers
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.lending import KEYS_MAX

# Columns that expire sooner are gone before they are copied.
EXPIRES_SECONDS_MIN: Final = 5.0
# A driver reports every 5 s at least. One that has not for so long may have ended, and lends nothing.
SILENT_SECONDS_MAX: Final = 15.0
ASKED_KEPT: Final = 256  # sets of drivers that were asked for
_TOKENS_MAX: Final = KEYS_MAX * COLUMN_TOKENS  # that one request to borrow can name


class Asked(NamedTuple):
    """Drivers that prompts are looked up at. `names`: those of replicas, then those that may lend to
    them. `numbers`: of each, its number; `lenders`: a row of numbers for each of the replicas."""

    names: tuple[str, ...]
    numbers: Numbers
    lenders: npt.NDArray[np.int32]


class Lent(NamedTuple):
    """What the best sibling of each driver has in memory of a prompt: tokens from the first one on, 0
    where none has any. `siblings`: numbers of `names`."""

    tokens: Numbers
    siblings: npt.NDArray[np.int32]
    names: Sequence[str]

    def sibling(self, at: int) -> str:
        """Of one driver; empty for none."""
        return self.names[self.siblings[at]] if self.tokens[at] else ""


class Siblings:
    """`permitted`: the drivers that each driver may borrow from. Of those with equally many tokens the
    first is asked."""

    def __init__(self, permitted: Mapping[str, Sequence[str]]) -> None:
        self._names = [*permitted]
        self._numbers = {name: number for number, name in enumerate(permitted)}
        self._nobody = len(permitted)
        width = max((len(one) for one in permitted.values()), default=0)
        # The last row is that of replicas without a driver.
        self._lenders = np.full((len(permitted) + 1, width), self._nobody, np.int32)
        for number, siblings in enumerate(permitted.values()):
            known = [
                self._numbers[one]
                for one in siblings
                if one in self._numbers and one != self._names[number]
            ]
            self._lenders[number, : len(known)] = known
        self._any = bool((self._lenders != self._nobody).any())
        self._asked: dict[tuple[str, ...], Asked | None] = {}

    def asked(self, drivers: Sequence[str]) -> Asked | None:
        """Whom to look up for replicas with these drivers; None if none of them may borrow."""
        if not self._any:
            return None
        key = tuple(drivers)
        if key not in self._asked:
            if len(self._asked) >= ASKED_KEPT:
                self._asked.clear()
            self._asked[key] = self._of(key)
        return self._asked[key]

    def _of(self, drivers: tuple[str, ...]) -> Asked | None:
        numbers = np.array([self._numbers.get(one, self._nobody) for one in drivers], np.int64)
        lenders = self._lenders[numbers]
        is_wanted = np.zeros(self._nobody + 1, bool)
        is_wanted[lenders] = True
        is_wanted[self._nobody] = False
        if not is_wanted.any():
            return None
        is_wanted[numbers] = False
        further = np.flatnonzero(is_wanted)
        names = (*drivers, *(self._names[one] for one in further.tolist()))
        return Asked(names, np.concatenate((numbers, further)), lenders)

    def lent(self, asked: Asked, hits: Hits, now: float, age: Callable[[str], float | None]) -> Lent:
        """`hits`: of all drivers in `asked`, at this wall time. `age`: seconds since a driver last
        reported; None if its map is not known."""
        columns = np.where(hits.expires_at > now + EXPIRES_SECONDS_MIN, hits.tokens, 0) // COLUMN_TOKENS
        tokens = np.zeros(self._nobody + 1, np.int64)
        tokens[asked.numbers] = np.clip(columns * COLUMN_TOKENS, 0, _TOKENS_MAX)
        tokens[self._nobody] = 0
        rows = np.arange(len(asked.lenders))
        while True:
            best = asked.lenders[rows, tokens[asked.lenders].argmax(axis=1)]
            found = tokens[best]
            numbers = np.unique(best[found > 0]).tolist()
            silent = [one for one in numbers if not _reports(age(self._names[one]))]
            if not silent:
                break
            tokens[silent] = 0
        return Lent(found, best, self._names)


def _reports(age: float | None) -> bool:
    return age is not None and age <= SILENT_SECONDS_MAX
