"""What became of the last requests that had a name, for people who ask why one was slow.

No tokens: the keys of its columns, what was hit and why the rest was not. No clock and no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat
from typing import Final

from swdriver_shim.cache.reasons import Reason
from swdriver_shim.keys import COLUMN_TOKENS, KEY_BYTES, Keys

REQUESTS_MAX: Final = 1024
COLUMNS_MAX: Final = 1 << 18  # of all of them together: four megabytes of keys


@dataclass(frozen=True, slots=True)
class Remembered:
    """One request: `hit` tokens by tier, `missed` by reason. `reasons`: of each column behind what was
    hit and behind `left`, hits that were left for another reason."""

    request: str
    maker: Keys
    at: float  # when it had been loaded, or not
    asked: int
    at_first: int  # tokens that were in memory
    hit: int
    left: tuple[tuple[Reason, int], ...]
    missed: Mapping[Reason, int]
    reasons: Sequence[Reason]
    raw_keys: bytes

    @property
    def name(self) -> tuple[str, str]:
        return self.maker.org, self.request

    @property
    def keys(self) -> list[bytes]:
        raw = self.raw_keys
        return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]

    @property
    def columns(self) -> int:
        return len(self.raw_keys) // KEY_BYTES

    def runs(self) -> list[tuple[str, int]]:
        """What became of its whole columns, in order: a tier or a reason, of so many in a row."""
        outcomes = islice(self._outcomes(), self.columns)
        return [(outcome, sum(1 for _ in run)) for outcome, run in groupby(outcomes)]

    def _outcomes(self) -> Iterator[str]:
        dram = self.at_first // COLUMN_TOKENS
        last = self.reasons[-1] if self.reasons else next(iter(self.missed), Reason.NEVER_STORED)
        return chain(
            repeat("dram", dram),
            repeat("tier2", self.hit // COLUMN_TOKENS - dram),
            *(repeat(reason.value, tokens // COLUMN_TOKENS) for reason, tokens in self.left),
            (reason.value for reason in self.reasons),
            repeat(last.value),
        )


class Requests:
    """The last ones, by org and name. A name that comes again takes the place of what it was before."""

    def __init__(self, requests_max: int = REQUESTS_MAX, columns_max: int = COLUMNS_MAX) -> None:
        self._requests_max = requests_max
        self._columns_max = columns_max
        self._columns = 0
        self._kept: OrderedDict[tuple[str, str], Remembered] = OrderedDict()

    def note(self, one: Remembered) -> None:
        """A load is over."""
        self._drop(one.name)
        self._kept[one.name] = one
        self._columns += one.columns
        while len(self._kept) > self._requests_max or self._columns > self._columns_max:
            self._drop(next(iter(self._kept)))

    def renew(self, known: Remembered, one: Remembered) -> None:
        """More is known of why the same columns were missed. Its name may be another request's now."""
        if self._kept.get(one.name) is known:
            self._kept[one.name] = one

    def find(self, org: str, request: str) -> Remembered | None:
        return self._kept.get((org, request))

    def orgs_of(self, request: str) -> list[str]:
        """Whose request it was: two orgs may have called one alike."""
        return [org for org, name in self._kept if name == request]

    def newest(self, org: str, most: int) -> list[Remembered]:
        its = (one for (of, _), one in reversed(self._kept.items()) if of == org)
        return list(islice(its, most))

    def forget(self, org: str) -> None:
        for key in [key for key in self._kept if key[0] == org]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        if gone := self._kept.pop(key, None):
            self._columns -= gone.columns
