"""The interface that all transports share, with the verbs of tier 2: requests to the agent, which moves
the bytes by itself."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple, Self, TypeVar

from kvss_agent.client.connection import Lost
from kvss_agent.client.requests import Requests, Wanted
from kvss_agent.data_plane.wire import (
    Feature,
    Lender,
    ListedColumn,
    TierAnswer,
    TierColumn,
    TierVerb,
)
from kvss_agent.shard.core import batches
from kvss_agent.shard.seal import KEY_BYTES, TAG_BYTES, Column, Header, Miss

T = TypeVar("T")

WAIT_SECONDS: Final = 1.0  # for what a request comes after
TIER_SECONDS: Final = 60.0  # for a disk or bucket; an agent that takes longer is lost
# Of one list of tier 2, all pages together: a hostile agent would go on for ever.
LISTED_MAX: Final = 1 << 24
LISTING_SECONDS_MAX: Final = 600.0  # waited for its pages


class Evict(NamedTuple):
    """One column to put into a slot. The payload must not change before the evict returns."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int
    payload: memoryview


class Recalled(NamedTuple):
    """A column is back: the number to refill it by, and the note of its spill, 0 if it is borrowed."""

    number: int
    note: int


class Purged(NamedTuple):
    """What is gone from tier 2: a file is one shard's part of a column."""

    files: int
    bytes: int


class Views(ABC):
    """Columns to read in place. Valid until released, at most for LEASE_SECONDS_MAX."""

    columns: list[memoryview | Miss]

    @abstractmethod
    def release(self) -> None:
        """Read no more."""

    def __enter__(self) -> list[memoryview | Miss]:
        return self.columns

    def __exit__(self, *_: object) -> None:
        self.release()


class NotApplied(Exception):
    """An evict was not applied in time."""


class NotListed(Exception):
    """Tier 2 of an agent is not open, or the agent is of a version that lists nothing."""


class ShardClient(ABC):
    """A shard, as its driver uses it.

    Evicts are numbered in the order of the calls. Refills, deletes and tier 2 may be asked by any
    number of threads; evicts by one at a time. Every method raises `Lost` once the agent is.

    Nothing here assumes a byte stream: slots are addressed by number, columns vouch for themselves, and
    the count is a number that goes up.
    """

    transport: str  # "shm", "unix" or "tcp"
    slot_bytes: int
    payload_bytes_max: int
    incarnation: bytes  # another one than before: the memory is new, and empty
    on_slot_limit: Callable[[int], None] | None = (
        None  # called in a thread of the client when the slot limit changes
    )
    on_lost: Callable[[], None] | None = None  # likewise, when the agent is found to be lost

    @property
    def lost(self) -> Lost | None:
        """Why the agent is lost, if that is known before anybody asks it for something."""
        return None

    def why_lost(self) -> Lost | None:
        """The same, in the agent's own words if it has said why. May wait for who evicts."""
        return self.lost

    @property
    @abstractmethod
    def slots(self) -> int:
        """The slot limit: slots below it may be used."""

    @property
    @abstractmethod
    def applied(self) -> int:
        """The number of the last evict that is known to be applied."""

    @property
    @abstractmethod
    def number(self) -> int:
        """The number of the last evict so far, applied or not."""

    @property
    @abstractmethod
    def requests(self) -> Requests:
        """The connection for requests; opened when it is first needed."""

    @abstractmethod
    def evict(self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview) -> int:
        """Put a column into a slot; the number of this evict.

        Waits for no answer, unless too much is on its way: then until a part of it is applied, at most
        for a minute, after which the agent is lost. The slot's earlier content is lost. A slot above the
        slot limit takes nothing: the evict counts, and a refill finds nothing there.
        """

    @abstractmethod
    def evict_batch(self, columns: Sequence[Evict]) -> int:
        """Put columns into slots, in this order; the number of the last evict."""

    @abstractmethod
    def wait_applied(self, number: int, seconds: float = WAIT_SECONDS) -> None:
        """Return when this evict is applied. Raises NotApplied after so long, also while a later evict
        is being sent."""

    @abstractmethod
    def refill(self, wanted: Sequence[Wanted], into: Sequence[memoryview]) -> list[Header | Miss]:
        """Copy columns to the front of `into`, and check them there: whose they are, and every byte.

        Comes after the evicts that wrote them; waits for those at most WAIT_SECONDS. Where there is a
        Miss, `into` may hold anything.
        """

    @abstractmethod
    def view(self, wanted: Sequence[Wanted]) -> Views:
        """Columns to read in place, where the transport can: checked, and under lease."""

    @abstractmethod
    def delete(self, slots: Sequence[int], *, scrub: bool = False) -> Miss | None:
        """Empty slots of what has been evicted so far; with zeros, if `scrub`. None when it is done.
        Waits at most WAIT_SECONDS."""

    def exists(self, columns: Sequence[Column], *, seconds: float = TIER_SECONDS) -> list[bool]:
        """Which of these are in tier 2, as far as it can tell now. Sequence numbers do not matter
        there."""
        return [one is TierAnswer.DONE for one in self.look(columns, seconds=seconds)]

    def look(
        self, columns: Sequence[Column], *, seconds: float = TIER_SECONDS
    ) -> list[TierAnswer | Miss]:
        """As `exists`: DONE or ABSENT. Whatever else it says, it can't tell now."""
        asked = [TierColumn(0, column.key, column.tag) for column in columns]
        return [answer for answer, _ in self._tier(TierVerb.EXISTS, asked, 0, seconds=seconds)]

    def spill(
        self,
        columns: Sequence[Wanted],
        *,
        notes: Sequence[int] = (),
        data_key: bytes = b"",
        redundant: bool = False,
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[TierAnswer | Miss]:
        """Copy these columns from their slots to tier 2. DONE or ALREADY where they are there now.

        `redundant`: as fragments on several agents, as the document of this one says; where it says
        nothing of it, or the agent is of an older version, as without.

        `notes`, a number of 64 bits for each, come back when the columns are recalled. What is there
        ALREADY keeps the note that it has. With a data key, of 32 bytes, the files are encrypted; over a
        connection that others could listen to that is REFUSED.
        """
        asked = [
            TierColumn(slot, *column, note)
            for (slot, column), note in zip(columns, notes or repeat(0, len(columns)), strict=True)
        ]
        after = max((one.column.sequence for one in columns), default=0)
        can = redundant and self.requests.connection.features & Feature.REDUNDANCY
        verb = TierVerb.SPILL_REDUNDANT if can else TierVerb.SPILL
        answers = self._tier(verb, asked, after, wait_seconds, seconds, data_key)
        return [answer for answer, _ in answers]

    def listed(self, *, seconds: float = TIER_SECONDS) -> Iterator[ListedColumn]:
        """The columns of this shard in tier 2, in the order of tag and key. `seconds`: for one page.
        Raises NotListed, also in the middle."""
        key, tag = bytes(KEY_BYTES), bytes(TAG_BYTES)
        count, waited = 0, 0.0
        while True:
            asked_at = time.monotonic()
            found = self.requests.list(TierColumn(0, key, tag), seconds)
            if found is None:
                raise NotListed("the agent can't list its tier 2 now")
            count += len(found.columns)
            waited += time.monotonic() - asked_at
            if count > LISTED_MAX or waited > LISTING_SECONDS_MAX:
                raise NotListed("the agent does not come to an end of its list of tier 2")
            for one in found.columns:
                if (one.tag, one.key) <= (tag, key):
                    raise NotListed("the agent lists its tier 2 out of order")
                key, tag = one.key, one.tag
                yield one
            if not found.more or not found.columns:
                return

    def recall(
        self,
        columns: Sequence[Wanted],
        *,
        data_key: bytes = b"",
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[Recalled | Miss]:
        """Copy these columns from tier 2 into these slots: how to refill them, or why not.

        With the data key that they were copied with, or without one if it was without.

        The slots are the caller's: nothing is evicted to them until this returns.
        """
        after = self.number
        asked = [TierColumn(one.slot, one.column.key, one.column.tag) for one in columns]
        answers = self._tier(TierVerb.RECALL, asked, after, wait_seconds, seconds, data_key)
        return [_recalled(answer, after, note) for answer, note in answers]

    def borrow(
        self,
        columns: Sequence[Wanted],
        slots: Sequence[int],
        lender: Lender,
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> list[Recalled | Miss]:
        """Copy these columns into these slots, from those of a lender: how to refill them, or why not.
        `slots`: of the lender, one for each.

        As with `recall`, nothing is evicted to the caller's slots until this returns, which takes at
        most as long as the lender is given.
        """
        if not self.requests.connection.features & Feature.BORROW:
            return [Miss.REFUSED for _ in columns]
        after = self.number
        asked = [
            TierColumn(into, key, tag, 0, slot)
            for (into, (key, tag, _)), slot in zip(columns, slots, strict=True)
        ]
        seconds = wait_seconds + lender.seconds
        answers = self._tier(TierVerb.BORROW, asked, after, wait_seconds, seconds, lender=lender)
        borrowed = Recalled(after, 0)
        return [
            borrowed if answer is TierAnswer.DONE else _recalled(answer, after, 0)
            for answer, _ in answers
        ]

    def tier_delete(
        self, columns: Sequence[Column], *, seconds: float = TIER_SECONDS
    ) -> list[TierAnswer | Miss]:
        """Remove these columns from tier 2. DONE where none is left, or there is no tier 2. Whatever
        else it says has to be repeated, REFUSED too: tier 2 may be about to open."""
        if self._is_without_tier2:
            return [TierAnswer.DONE for _ in columns]
        asked = [TierColumn(0, column.key, column.tag) for column in columns]
        return [answer for answer, _ in self._tier(TierVerb.DELETE, asked, 0, seconds=seconds)]

    def purge(self, tag: bytes, *, seconds: float = TIER_SECONDS) -> Purged | None:
        """Remove all that carries this tag from tier 2, in the shard's namespace. None if some may be
        left: it continues, and has to be asked for again. Files are counted in the first answer only.
        Zeros where there is no tier 2."""
        if self._is_without_tier2:
            return Purged(0, 0)
        asked = [TierColumn(0, bytes(KEY_BYTES), tag)]
        answers = self.requests.tier(TierVerb.PURGE, asked, 0, 0, seconds)
        (first, files), *rest = answers
        if first is TierAnswer.DONE and rest:
            return Purged(files, rest[0][1])
        return None  # also if it was refused: tier 2 may be on its way, and have much of this tag

    @property
    @abstractmethod
    def may_wait_in_front(self) -> bool:
        """Whether columns may be in front of the agent's tier 2 alone, as it was when we connected."""

    def flush(self, *, seconds: float = TIER_SECONDS) -> int | None:
        """The shard is leaving: have the agent copy behind what waits of it in front of its tier 2. How
        many columns still wait: that continues, and has to be asked for again. None: nobody can tell
        now."""
        if not self.requests.connection.features & Feature.FLUSH:
            return 0
        asked = [TierColumn(0, bytes(KEY_BYTES), bytes(TAG_BYTES))]
        ((answer, left),) = self.requests.tier(TierVerb.FLUSH, asked, 0, 0, seconds)
        return left if answer is TierAnswer.DONE else None

    @abstractmethod
    def close(self) -> None:
        """Leave. What was evicted stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_without_tier2(self) -> bool:
        """This agent never has one. One whose tier 2 is off just now says so when it is asked."""
        return not self.requests.connection.features & Feature.TIER

    def _tier(
        self,
        verb: TierVerb,
        columns: Sequence[TierColumn],
        after: int,
        wait_seconds: float = 0,
        seconds: float = TIER_SECONDS,
        data_key: bytes = b"",
        lender: Lender | None = None,
    ) -> list[tuple[TierAnswer | Miss, int]]:
        """Each with its note, 0 where there is none."""
        answers: list[tuple[TierAnswer | Miss, int]] = []
        for batch in batches(columns):
            answers += self.requests.tier(verb, batch, after, wait_seconds, seconds, data_key, lender)
        return answers


def _recalled(answer: TierAnswer | Miss, after: int, note: int) -> Recalled | Miss:
    if answer is TierAnswer.DONE:
        return Recalled(after, note)
    return answer if isinstance(answer, Miss) else Miss.LOST
