"""Why tokens were missed: every missed token has exactly one of these reasons. And what was removed for
one, until nothing is left anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from swdriver_shim import loops

GHOSTS_MIN: Final = 3 * 43_690  # as many as three dicts have before they grow once more
DRAM: Final = "dram"  # the tiers that hits come from
TIER2: Final = "tier2"
SIBLING: Final = "sibling"  # the memory of another driver


class Reason(StrEnum):
    NEVER_STORED = "never_stored"  # or so long ago that it is not known any more
    WRITING = "writing"  # being evicted at that time
    EXPIRED = "expired"
    DISPLACED = "displaced"  # to make room
    QUOTA = "quota"  # its org had reached its quota
    PURGED = "purged"
    DELETED = "deleted"
    OTHER_NAMESPACE = "other_namespace"  # stored, but in another namespace of its org
    NO_STATE = "no_state"  # its KV is stored, but no state to continue from
    NO_STORE = "no_store"  # by a request or the policy
    PREFIX_ONLY = "prefix_only"  # only the prompt's beginning is stored, by a request or the policy
    TIER2_LATE = "tier2_late"  # it was in tier 2, and was not recalled in time
    NOT_BORROWED = "not_borrowed"  # a sibling had it, and it did not come, or not in time
    NOT_WORTH_IT = "not_worth_it"  # computing it is faster than refilling it
    AGENT_LOST = "agent_lost"
    SEAL_REFUSED = "seal_refused"  # its bytes were not the stored ones, or not complete

    __hash__ = str.__hash__  # each request counts some: that of enumerations is in Python


_Generation: TypeAlias = dict[bytes, Reason]


class NoSpill(StrEnum):
    """Why a column in memory is not copied to tier 2."""

    POLICY = "policy"  # which stores nothing there
    REQUEST = "request"  # memory only, by the rules of the request
    NOT_ENCRYPTED = "not_encrypted"  # by the rules of the request only encrypted, by the policy not
    NO_DATA_KEY = "no_data_key"  # the policy encrypts, and the org has no key
    OWN_TTL = "own_ttl"  # files have the policy's TTL only
    TAIL = "tail"


class Ghosts:
    """The last removed columns, by key, with the reason: so many at least, and a third as many more at
    most. One that is stored again may still be among them, as long as nobody asks for its key here.

    They are kept in four generations. When the newest one is full, the oldest one is dropped: to drop
    the oldest column with each new one takes three times as long, and as much memory for half as many.
    A generation is small enough to grow in about a millisecond. One that is dropped is emptied as
    the next one is filled, since to free all of its keys at once takes longer.
    """

    def __init__(self, least: int = GHOSTS_MIN) -> None:
        self._size = max(1, -(-least // 3))
        # The newest first: of a key that is in several, that reason holds.
        self._generations: tuple[_Generation, ...] = ({}, {}, {}, {})
        self._dropped: _Generation = {}

    def __len__(self) -> int:
        return len({key for generation in self._generations for key in generation})

    def add(self, key: bytes, reason: Reason) -> None:
        self.add_all([key], reason)

    def add_all(self, keys: list[bytes], reason: Reason) -> None:
        """Remember that all of these were removed for this reason, as `add` does for one."""
        for _ in range(min(len(keys), len(self._dropped))):
            self._dropped.popitem()
        while keys:
            newest = self._generations[0]
            room = self._size - len(newest)
            some, keys = keys[:room], keys[room:]
            loops.current.put_by_key([newest], some, [reason] * len(some))
            if len(newest) >= self._size:
                *still, self._dropped = self._generations
                self._generations = ({}, *still)

    def forget(self, keys: Sequence[bytes]) -> None:
        """The reasons of these do not count any more."""
        for reasons in self._generations:
            for key in filter(reasons.__contains__, keys):  # most were never stored before
                del reasons[key]

    @property
    def generations(self) -> tuple[_Generation, ...]:
        return self._generations

    def reason_of(self, key: bytes) -> Reason:
        return self.reasons([key])[0]

    def reasons(self, keys: list[bytes]) -> list[Reason]:
        return loops.current.values_in(self._generations, keys, Reason.NEVER_STORED)


@dataclass(slots=True)
class Tally:
    """The requests of an org, in tokens. Hits are counted by tier."""

    requests: int = 0
    requested: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    missed: Counter[Reason] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float | None:
        """Hits of the tokens asked for; None without traffic."""
        return self.hits.total() / self.requested if self.requested else None


@dataclass(slots=True, eq=False)
class Removal:
    """What a delete, a purge or a stricter policy removes."""

    reason: Reason
    columns: int = 0
    bytes: int = 0
    files: int = 0  # in tier 2: one for each column and shard
    file_bytes: int = 0
    pending: int = 0  # slots to empty, maps to take down, work in tier 2
    after: set[Removal] = field(default_factory=set)  # all earlier removals that it has to wait for
    slots: set[tuple[int, int]] = field(default_factory=set)  # slots freed earlier, to be empty as well
    confirmed: dict[str, float] = field(default_factory=dict)  # by shard: when it last emptied a slot

    def wait_for(self, earlier: Iterable[Removal]) -> None:
        """And for those that they wait for: `done` is asked often, and there may be many in a row."""
        for one in earlier:
            self.after |= {one, *one.after}

    @property
    def done(self) -> bool:
        # In place: another thread may add some meanwhile.
        self.after -= {one for one in tuple(self.after) if not (one.pending or one.slots)}
        return not self.pending and not self.slots and not self.after
