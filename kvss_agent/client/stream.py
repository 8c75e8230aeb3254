"""A shard over a Unix socket or TCP: one connection for evicts, one for requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvss_agent.client.connection import AgentConnection, Credentials, Lost, lost
from kvss_agent.client.interface import (
    WAIT_SECONDS,
    Evict,
    NotApplied,
    ShardClient,
    Views,
)
from kvss_agent.client.requests import Requests, Wanted
from kvss_agent.data_plane import wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.wire import Feature, Role
from kvss_agent.memory import unwritten
from kvss_agent.mover import Mover
from kvss_agent.shard import seal
from kvss_agent.shard.core import BATCH_MAX, batches
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss

UNCOUNTED_MAX: Final = 32  # runs on their way at once, before we wait for the agent's count
SPARE_BYTES_MAX: Final = 64 << 20  # that a client keeps for its next view
APPLY_SECONDS: Final = 60.0  # for that: a reader's lease keeps an evict waiting for half as long


class StreamClient(ShardClient):
    def __init__(
        self, address: Address, shard: str, credentials: Credentials, mover: Mover, *, write: bool
    ) -> None:
        self._address, self._shard, self._credentials, self._mover = address, shard, credentials, mover
        self.transport = "unix" if address.path else "tcp"
        self._requests = Requests(address, shard, credentials, mover)
        self._connection: AgentConnection | None = None
        if write:
            try:
                self._connection = AgentConnection(address, shard, credentials, Role.EVICT)
            except BaseException:
                self._requests.close()
                raise
        welcome = (self._connection or self._requests.connection).welcome
        self.slot_bytes = welcome.slot_bytes
        self.payload_bytes_max = welcome.slot_bytes - HEADER_BYTES
        self.incarnation = welcome.incarnation
        self._slots = welcome.slots
        self._number = self._applied = welcome.applied
        self._uncounted: deque[int] = deque()  # last numbers of runs that are on their way
        self._evicting = threading.Lock()
        self._lost: Lost | None = None  # why an evict has failed
        self._spare: memoryview | None = None

    @property
    def requests(self) -> Requests:
        return self._requests

    def use_mover(self, mover: Mover) -> None:
        """Make checksums with this mover from now on."""
        self._mover = mover
        self._requests.use_mover(mover)

    @property
    def lost(self) -> Lost | None:
        connections = [self._requests.connection, self._connection]
        if any(one.channel.has_ended for one in connections if one):
            return Lost(f"{self._address} is gone")
        return None

    def why_lost(self) -> Lost | None:
        found = self.lost
        if found is None or self._connection is None:
            return found
        with self._evicting:
            return self._lost or self._connection.last_words(found)

    @property
    def may_wait_in_front(self) -> bool:
        return bool(self._requests.connection.features & Feature.FRONT)

    @property
    def number(self) -> int:
        return self._number

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def applied(self) -> int:
        return self._applied

    def evict(self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview) -> int:
        return self.evict_batch([Evict(slot, key, tag, tokens, payload)])

    def evict_batch(self, columns: Sequence[Evict]) -> int:
        with self._evicting:
            connection = self._writing()
            try:
                for start in range(0, len(columns), BATCH_MAX):
                    self._send(connection, columns[start : start + BATCH_MAX])
            except Lost as error:
                self._lost = error
                raise
            return self._number

    def _send(self, connection: AgentConnection, columns: Sequence[Evict]) -> None:
        first = self._number + 1
        sealed = []
        for sequence, one in enumerate(columns, first):
            checksum = self._mover.checksum(one.payload)
            column = Column(one.key, one.tag, sequence)
            sealed.append((one.slot, seal.pack(column, one.tokens, len(one.payload), checksum)))
        while len(self._uncounted) >= UNCOUNTED_MAX:
            self._receive_count(connection, time.monotonic() + APPLY_SECONDS)
        try:
            connection.send(wire.Evict(first, tuple(sealed)), [one.payload for one in columns])
        except Lost as error:
            raise connection.last_words(error) from error
        self._number += len(columns)
        self._uncounted.append(self._number)

    def wait_applied(self, number: int, seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        late = NotApplied(f"evict {number} is not applied after {seconds:g} s")
        if not self._evicting.acquire(timeout=max(0.0, seconds)):  # another evict waits for the agent
            raise late
        try:
            connection = self._writing()
            while self._applied < number:
                if number > self._number:
                    raise ValueError(f"there was no evict {number} yet, the last is {self._number}")
                with lost(self._address):
                    comes = connection.channel.comes_within(deadline - time.monotonic())
                if not comes:
                    raise late
                self._receive_count(connection, deadline)
        finally:
            self._evicting.release()

    def _receive_count(self, connection: AgentConnection, deadline: float) -> None:
        """A count, or nothing where the agent says goodbye: what it holds up it counts much later."""
        count = connection.receive_a_or_goodbye(wire.Count, deadline)
        if count is None:
            return
        self._applied = count.applied
        while self._uncounted and self._uncounted[0] <= count.applied:
            self._uncounted.popleft()

    def _writing(self) -> AgentConnection:
        if self._connection is None:
            raise Lost("this client only reads")
        return self._connection

    def refill(self, wanted: Sequence[Wanted], into: Sequence[memoryview]) -> list[Header | Miss]:
        if len(wanted) != len(into):
            raise ValueError("there is one place for each column")
        found: list[Header | Miss] = []
        for start in range(0, len(wanted), BATCH_MAX):
            some = wanted[start : start + BATCH_MAX]
            after = max(one.column.sequence for one in some)
            places = into[start : start + BATCH_MAX]
            found += self._requests.refill(some, places, after, WAIT_SECONDS)
        return found

    def view(self, wanted: Sequence[Wanted]) -> Views:
        """There is nothing to read in place: the columns come into memory of this client."""
        each, size = self.payload_bytes_max, self.payload_bytes_max * len(wanted)
        spare, self._spare = self._spare, None
        room = spare if spare and len(spare) >= size else unwritten(size)
        into = [room[at : at + each] for at in range(0, size, each)]
        found = self.refill(wanted, into)
        return _Received(found, into, lambda: self._keep(room))

    def _keep(self, room: memoryview) -> None:
        """For the next view: memory that is new costs as much as half of what is received into it."""
        if len(room) <= SPARE_BYTES_MAX:
            self._spare = room

    def delete(self, slots: Sequence[int], *, scrub: bool = False) -> Miss | None:
        for batch in batches(slots):
            if reason := self._requests.delete(batch, self._number, WAIT_SECONDS, scrub=scrub):
                return reason
        return None

    def close(self) -> None:
        if self._connection:
            self._connection.close()
        self._requests.close()


class _Received(Views):
    """`give_back` is called once nobody can read the memory any more."""

    def __init__(
        self,
        found: Sequence[Header | Miss],
        into: Sequence[memoryview],
        give_back: Callable[[], None],
    ) -> None:
        self.columns = [
            one if isinstance(one, Miss) else place[: one.length].toreadonly()
            for one, place in zip(found, into, strict=True)
        ]
        self._give_back = give_back

    def release(self) -> None:
        columns, self.columns = self.columns, []
        if not columns:
            return
        try:
            for column in columns:
                if isinstance(column, memoryview):
                    column.release()  # whoever reads it later gets an error, and no other column
        except BufferError:  # somebody still reads in it: it is theirs
            return
        self._give_back()
