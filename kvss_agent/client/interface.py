"""The interface that all transports share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from kvss_agent.client.connection import Lost
from kvss_agent.data_plane.wire import TierAnswer
from kvss_agent.shard.seal import Column, Header, Miss

WAIT_SECONDS: Final = 1.0  # for what a request comes after
TIER_SECONDS: Final = 60.0  # for a disk or bucket; an agent that takes longer is lost


class Evict(NamedTuple):
    """One column to put into a slot. The payload must not change before the evict returns."""

    slot: int
    key: bytes
    tag: bytes
    tokens: int
    payload: memoryview


class Wanted(NamedTuple):
    """One column to get: what is expected in this slot."""

    slot: int
    column: Column


class Recalled(NamedTuple):
    """A column is back from tier 2: the number to refill it by, and the note of its spill."""

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


class ShardClient(ABC):
    """A shard in the hands of its driver.

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

    @property
    @abstractmethod
    def slots(self) -> int:
        """The slot limit: slots below it may be used."""

    @property
    @abstractmethod
    def applied(self) -> int:
        """The number of the last evict that is known to be applied."""

    @abstractmethod
    def evict(self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview) -> int:
        """Put a column into a slot; the number of this evict.

        Waits for no answer, unless too much is on its way: then until a part of it is applied, at most
        for a minute, after which the agent is lost. What the slot held before is gone. A slot above the
        line takes nothing: the evict counts, and a refill will find nothing there.
        """

    @abstractmethod
    def evict_batch(self, columns: Sequence[Evict]) -> int:
        """The same for many, in this order; the number of the last."""

    @abstractmethod
    def wait_applied(self, number: int, seconds: float = WAIT_SECONDS) -> None:
        """Return when this evict is applied. Raises NotApplied after so long."""

    @abstractmethod
    def refill(
        self,
        wanted: Sequence[Wanted],
        into: Sequence[memoryview],
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> list[Header | Miss]:
        """Copy columns to the front of `into`, and check them there: whose they are, and every byte.

        Comes after the evicts that wrote them; waits for those at most so long. Where there is a
        Miss, `into` may hold anything.
        """

    @abstractmethod
    def view(self, wanted: Sequence[Wanted], *, wait_seconds: float = WAIT_SECONDS) -> Views:
        """The same to read in place, where the transport can: checked, and under lease."""

    @abstractmethod
    def delete(
        self, slots: Sequence[int], *, scrub: bool = False, wait_seconds: float = WAIT_SECONDS
    ) -> Miss | None:
        """Empty slots of what has been evicted so far; with zeros, if `scrub`. None when it is done."""

    @abstractmethod
    def exists(self, columns: Sequence[Column]) -> list[bool]:
        """Which of these are in tier 2. Sequence numbers do not matter there."""

    @abstractmethod
    def spill(
        self,
        columns: Sequence[Wanted],
        *,
        notes: Sequence[int] = (),
        data_key: bytes = b"",
        wait_seconds: float = WAIT_SECONDS,
        seconds: float = TIER_SECONDS,
    ) -> list[TierAnswer | Miss]:
        """Copy these columns from their slots to tier 2. DONE or ALREADY where they are there now.

        `notes`, a number of 64 bits for each, come back when the columns are recalled. What is there
        ALREADY keeps the note that it has. With a data key, of 32 bytes, the files are encrypted; over a
        connection that others could listen to that is REFUSED.
        """

    @abstractmethod
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

    @abstractmethod
    def tier_delete(self, columns: Sequence[Column]) -> list[TierAnswer | Miss]:
        """Remove these columns from tier 2. DONE where none is left, or there is no tier 2. Whatever
        else it says has to be repeated, REFUSED too: tier 2 may be about to open."""

    @abstractmethod
    def purge(self, tag: bytes, *, seconds: float = TIER_SECONDS) -> Purged | None:
        """Remove all that carries this tag from tier 2, in the shard's namespace. None if some may be
        left, and it has to be repeated: it goes on meanwhile. Files count once, for who is told of it
        first. Nothing where there is no tier 2."""

    @abstractmethod
    def close(self) -> None:
        """Leave. What was evicted stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
