"""One agent that stores fragments, seen from the agent of the shard: a driver of its fragment shard.

A fragment passes through a slot of that shard: it is evicted there and spilled to the holder's tier 2,
or recalled and refilled. So it is checked by its seal in both directions.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from kvss_agent.client import (
    WAIT_SECONDS,
    Cause,
    Column,
    Credentials,
    Evict,
    Header,
    Lost,
    Miss,
    NotListed,
    Recalled,
    ShardClient,
    TierAnswer,
    Wanted,
    connect,
)
from kvss_agent.client.withdrawal import Withdrawal
from kvss_agent.data_plane.wire import ListedColumn
from kvss_agent.redundancy.layout import SLOTS
from kvss_agent.shard.seal import HEADER_BYTES, KEY_BYTES, TAG_BYTES
from kvss_agent.tier2.backend import Failed, Fault

AWAY_SECONDS: Final = 5.0  # for which a holder that can't be reached is not tried again, and up to
AWAY_SECONDS_MAX: Final = 60.0  # so many if it still can't
SUPERSEDED_SECONDS: Final = 60.0  # without a connection after another agent has connected instead
OPEN_SECONDS: Final = 5.0  # to wait for somebody else who connects
PURGE_SECONDS: Final = 15.0  # a holder answers after 10, whether it is done or not
LIST_SECONDS: Final = 20.0  # for one page
# For the holder's disk. With the second that a request may wait, and the stall time in which its answer
# may come, it counts as unreachable after ten: recalls of columns whose fragments it has wait for that.
DISK_SECONDS: Final = 3.0
NOTHING: Final = Column(bytes(KEY_BYTES), bytes(TAG_BYTES), 0)
TOKENS: Final = 1  # of a fragment's header: nobody reads it

T = TypeVar("T")


class Fragment(NamedTuple):
    """A fragment, and the slot that it passes through."""

    slot: int
    key: bytes
    tag: bytes
    bytes: memoryview


class Evicted(NamedTuple):
    """A fragment that lies in its slot, and over which connection it got there."""

    wanted: Wanted
    by: ShardClient | None


class Place(NamedTuple):
    """A fragment to be read: the slot that it passes through."""

    slot: int
    key: bytes
    tag: bytes


class Holder:
    """Any thread may ask. Every method raises Failed where the holder can't be reached."""

    def __init__(
        self,
        address: str,
        shard: str,
        credentials: Callable[[], Credentials],
        payload_bytes: int,
        since: float = 0.0,
    ) -> None:
        """`payload_bytes`: of the largest fragment. `credentials` raises Lost if there are none.
        `since`: what it has stored before is not used. A listing finds out what that is, and has it
        removed; until then nothing of it is used."""
        self.address, self.since = address, since
        self._shard, self._credentials = shard, credentials
        self._payload_bytes = payload_bytes
        self._client: ShardClient | None = None
        self._opening = threading.Lock()
        self._evicting = threading.Lock()
        self._away_until = -math.inf
        self._away_seconds = AWAY_SECONDS
        self._why_away = ""
        self._ended = threading.Event()
        self.is_superseded = False  # another agent has connected to the fragment shard instead
        self._listed = b""  # the incarnation whose fragments have been listed
        self._was_listed = False

    @property
    def is_away(self) -> bool:
        """Whether it is not asked now, since it could not be reached a moment ago."""
        return self._ended.is_set() or time.monotonic() < self._away_until

    @property
    def incarnation(self) -> bytes:
        """Of the holder that this is connected with; empty if it is not."""
        client = self._client
        return client.incarnation if client is not None and client.lost is None else b""

    @property
    def is_known(self) -> bool:
        """Whether it is known what it has: it is connected, and was listed since it was started."""
        return bool(self._listed) and self.incarnation == self._listed

    def note_listed(self, incarnation: bytes) -> None:
        self._listed, self._was_listed = incarnation, True

    def evict(self, fragments: Sequence[Fragment]) -> list[Evicted]:
        """Put fragments into their slots."""
        columns = [Evict(slot, key, tag, TOKENS, its) for slot, key, tag, its in fragments]

        def ask(client: ShardClient) -> list[Evicted]:
            with self._evicting:  # the numbers of one batch follow each other
                last = client.evict_batch(columns)
            first = last - len(columns) + 1
            return [
                Evicted(Wanted(one.slot, Column(one.key, one.tag, first + at)), client)
                for at, one in enumerate(columns)
            ]

        return self._ask(ask)

    def spill(self, evicted: Sequence[Evicted], notes: Sequence[int]) -> list[TierAnswer | Miss]:
        """Store what was evicted. ALREADY where the holder has a fragment of this column."""

        def ask(client: ShardClient) -> list[TierAnswer | Miss]:
            if any(one.by is not client for one in evicted):  # somebody else may be its writer now
                raise Failed(Fault.UNREACHABLE, f"{self.address} was lost before it had stored all")
            wanted = [one.wanted for one in evicted]
            return client.spill(wanted, notes=notes, seconds=DISK_SECONDS)

        return self._ask(ask)

    def recall(self, places: Sequence[Place]) -> list[Recalled | Miss]:
        """Have the holder read these from its disk into their slots; each with its note."""
        self._check_old()
        wanted = [Wanted(slot, Column(key, tag, 0)) for slot, key, tag in places]
        return self._ask(lambda client: client.recall(wanted, seconds=DISK_SECONDS))

    def refill(
        self,
        places: Sequence[Place],
        numbers: Sequence[int],
        into: Sequence[memoryview],
        withdrawal: Withdrawal,
    ) -> list[Header | Miss]:
        """Read what was recalled, at most BATCH_MAX. `withdrawal`: takes `into` back."""
        wanted = [
            Wanted(slot, Column(key, tag, number))
            for (slot, key, tag), number in zip(places, numbers, strict=True)
        ]
        return self._ask(
            lambda client: client.requests.refill(
                wanted, into, max(numbers), WAIT_SECONDS, withdrawal=withdrawal
            )
        )

    def exists(self, columns: Sequence[Column]) -> list[bool]:
        """Also raises Failed while its tier 2 is being opened."""
        self._check_old()
        answers = self._ask(lambda client: client.look(columns, seconds=DISK_SECONDS))
        if not all(one in (TierAnswer.DONE, Miss.ABSENT) for one in answers):
            raise Failed(Fault.UNREACHABLE, f"{self.address} can't tell now what it has")
        return [one is TierAnswer.DONE for one in answers]

    def delete(self, columns: Sequence[Column]) -> None:
        """Raises Failed unless all are gone."""
        answers = self._ask(lambda client: client.tier_delete(columns, seconds=DISK_SECONDS))
        if any(answer is not TierAnswer.DONE for answer in answers):
            raise Failed(Fault.UNREACHABLE, f"{self.address} could not remove all fragments")

    def purge(self, tag: bytes) -> tuple[int, int]:
        """How many files, and bytes. Raises Failed unless nothing of this tag is left."""
        receipt = self._ask(lambda client: client.purge(tag, seconds=PURGE_SECONDS))
        if receipt is None:
            raise Failed(Fault.UNREACHABLE, f"{self.address} has not removed all fragments yet")
        return receipt

    def listed(self) -> Iterator[ListedColumn]:
        """All fragments, in the order of tag and key."""
        try:
            yield from self._ask(lambda client: client.listed(seconds=LIST_SECONDS))
        except (Lost, NotListed) as error:
            raise Failed(Fault.UNREACHABLE, str(error)) from error

    def open(self) -> None:
        """Connect, unless it is connected."""
        self._ask(lambda _: None)

    def reach(self) -> None:
        """Connect, and have it answer something."""
        self._ask(lambda client: client.exists([NOTHING], seconds=DISK_SECONDS))

    def close(self) -> None:
        self._ended.set()
        if client := self._client:
            client.close()

    # Inside

    def _check_old(self) -> None:
        if self.since > 0 and not self._was_listed:
            raise Failed(Fault.UNREACHABLE, f"{self.address} has not been listed since it is a holder")

    def _ask(self, ask: Callable[[ShardClient], T]) -> T:
        client = self._open()
        try:
            answer = ask(client)
        except Lost as error:
            if error.cause is Cause.SUPERSEDED and client is self._client:
                self._give_up(str(error))
            self._lose(client, str(error))
            raise Failed(Fault.UNREACHABLE, str(error)) from error
        return answer

    def _open(self) -> ShardClient:
        if not self._opening.acquire(timeout=OPEN_SECONDS):
            raise Failed(Fault.UNREACHABLE, f"{self.address} takes long to connect to")
        try:
            if there := self._client:
                if (why := there.why_lost()) is None:
                    return there
                there.close()
                if why.cause is Cause.SUPERSEDED:
                    self._give_up(str(why))
                    raise Failed(Fault.UNREACHABLE, self._why_away)
            if self._ended.is_set():
                raise Failed(Fault.UNREACHABLE, self._why_away or "redundancy was closed")
            if self.is_away:
                raise Failed(Fault.UNREACHABLE, self._why_away)
            try:
                self._client = self._connected()
            except (Lost, ValueError) as error:
                self._lose(None, str(error))
                raise Failed(Fault.UNREACHABLE, str(error)) from error
            self.is_superseded = False
            if self._ended.is_set():  # meanwhile
                self._client.close()
            return self._client
        finally:
            self._opening.release()

    def _connected(self) -> ShardClient:
        client = connect(self.address, self._shard, self._credentials(), transport="stream")
        if client.slots < SLOTS or client.payload_bytes_max < self._payload_bytes:
            client.close()
            raise Lost(
                f"{self.address} has {client.slots} slots of {client.slot_bytes} bytes for fragments: "
                f"{SLOTS} of {HEADER_BYTES + self._payload_bytes} are needed"
            )
        return client

    def _give_up(self, why: str) -> None:
        """Do not connect for a while: another agent is the home of the shard, and a new connection would
        end its own. Not for ever: it may be the former home, started anew with its old document."""
        self.is_superseded, self._why_away = True, why
        self._away_until = time.monotonic() + SUPERSEDED_SECONDS

    def _lose(self, client: ShardClient | None, why: str) -> None:
        now = time.monotonic()
        if now > self._away_until:  # once for all who find out at the same time
            is_new = now > self._away_until + AWAY_SECONDS_MAX
            self._away_seconds = (
                AWAY_SECONDS if is_new else min(AWAY_SECONDS_MAX, 2 * self._away_seconds)
            )
            self._away_until, self._why_away = now + self._away_seconds, why
        if client:
            client.close()
            if self._client is client:
                self._client = None
