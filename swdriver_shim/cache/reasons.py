"""Why tokens were missed. Every missed token has one of these, and nobody has to guess."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from itertools import repeat
from typing import Final

GHOSTS_MAX: Final = 1 << 17
DRAM: Final = "dram"  # where hits come from: memory,
TIER2: Final = "tier2"  # or what lies beyond


class Reason(StrEnum):
    NEVER_STORED = "never_stored"  # or so long ago that nobody remembers
    WRITING = "writing"  # on its way out at this moment
    EXPIRED = "expired"
    DISPLACED = "displaced"  # room was needed
    QUOTA = "quota"  # its org had as much as it may have
    PURGED = "purged"
    DELETED = "deleted"
    OTHER_NAMESPACE = "other_namespace"  # stored, but of another model, revision, dtype, layout, adapter
    NO_STORE = "no_store"  # a request or the policy did not want it stored
    TIER2_LATE = "tier2_late"  # it was on disk, and not here in time
    NOT_WORTH_IT = "not_worth_it"  # computing it anew is faster than fetching it
    AGENT_LOST = "agent_lost"
    SEAL_REFUSED = "seal_refused"  # what lay there was not it, or not whole


class Ghosts:
    """What is gone and why: the last so many columns, by key. Nothing else of them is kept."""

    def __init__(self, size: int = GHOSTS_MAX) -> None:
        self._size = size
        self._reasons: OrderedDict[bytes, Reason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reasons)

    def add(self, key: bytes, reason: Reason) -> None:
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._size:
            self._reasons.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """It is here again."""
        self._reasons.pop(key, None)

    def why(self, key: bytes) -> Reason:
        return self._reasons.get(key, Reason.NEVER_STORED)

    def reasons(self, keys: Sequence[bytes]) -> list[Reason]:
        """The same of each."""
        return list(map(self._reasons.get, keys, repeat(Reason.NEVER_STORED)))


class Tally:
    """What an org asked for and got, in tokens. Hits are counted by the tier that they came from."""

    __slots__ = ("hits", "missed", "requested", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.requested = 0
        self.hits: Counter[str] = Counter()
        self.missed: Counter[Reason] = Counter()

    @property
    def hit_rate(self) -> float | None:
        """Of the tokens asked for; None if none were."""
        return self.hits.total() / self.requested if self.requested else None

    def check_integrity(self) -> None:
        if self.hits.total() + self.missed.total() != self.requested:
            raise RuntimeError("each token that is asked for is hit or missed")
