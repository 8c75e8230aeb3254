"""Which files lack fragments, and when to try to repair each again."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.tier2.address import Address, Scope

REPAIR_RETRY_SECONDS: Final = 10.0  # after a repair that failed; twice as long each time, up to
REPAIR_RETRY_SECONDS_MAX: Final = 600.0


@dataclass(slots=True)
class _Lack:
    """The places where a file's fragments are missing, each with the number of the mark that said so
    last, and when to try to repair it again."""

    places: dict[int, int] = field(default_factory=dict)
    retry_at: float = 0.0
    wait_seconds: float = REPAIR_RETRY_SECONDS


class Incomplete:
    """In the order in which they wait for repair."""

    def __init__(self) -> None:
        self.marks = 0  # since the start
        self._lacks: dict[Address, _Lack] = {}
        self._at: Counter[int] = Counter()  # files that lack the fragment of a place
        self._by_count: Counter[int] = Counter()  # files that lack so many
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lacks)

    def at(self, places: int) -> list[int]:
        """By place, how many files lack the fragment there."""
        return [self._at[place] for place in range(places)]

    @property
    def most(self) -> int:
        """How many fragments the file lacks that lacks most."""
        with self._lock:
            return max((count for count, files in self._by_count.items() if files), default=0)

    def mark(self, address: Address, places: Collection[int]) -> None:
        """It lacks these fragments, too."""
        with self._lock:
            lack = self._lacks.setdefault(address, _Lack())
            self._count(lack, -1)
            self.marks += 1
            lack.places.update(dict.fromkeys(places, self.marks))
            self._count(lack, 1)

    def some(self, most: int, usable: Collection[int]) -> list[Address]:
        """Those that have waited longest, of those that can be repaired now, at these places."""
        with self._lock:
            now = time.monotonic()
            some = (
                address
                for address, lack in self._lacks.items()
                if lack.places.keys() & usable and lack.retry_at <= now
            )
            return list(itertools.islice(some, most))

    def put_off(self, address: Address) -> None:
        """Behind the others: what can't be mended now must not hold them up."""
        with self._lock:
            if lack := self._lacks.pop(address, None):
                self._lacks[address] = lack
                lack.retry_at = time.monotonic() + lack.wait_seconds
                lack.wait_seconds = min(2 * lack.wait_seconds, REPAIR_RETRY_SECONDS_MAX)

    def forget(self, addresses: Sequence[Address], marks: int | None = None) -> None:
        """These lack nothing, or are not there any more. `marks`: so many had been made when that was
        looked at; what others have marked since is still missing."""
        with self._lock:
            most = self.marks if marks is None else marks
            for address in addresses:
                if lack := self._drop(address):
                    lack.places = {place: mark for place, mark in lack.places.items() if mark > most}
                    if lack.places:
                        self._lacks[address] = lack
                        self._count(lack, 1)

    def forget_scope(self, scope: Scope) -> None:
        """Nothing of this scope is there any more."""
        with self._lock:
            for address in [one for one in self._lacks if scope.covers(one)]:
                self._drop(address)

    def _drop(self, address: Address) -> _Lack | None:
        if lack := self._lacks.pop(address, None):
            self._count(lack, -1)
        return lack

    def _count(self, lack: _Lack, by: int) -> None:
        if lack.places:
            self._by_count[len(lack.places)] += by
        for place in lack.places:
            self._at[place] += by
