"""The refill and delete queue, seen from the driver: requests on one connection, answered in any order.

Any thread may ask. The first thread that waits receives for all; when its own answer has come, the next
one takes over. So a single caller needs no further thread, and many share one connection.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from kvss_agent.client.connection import AgentConnection, Credentials, Lost
from kvss_agent.client.withdrawal import Withdrawal
from kvss_agent.data_plane import wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.channel import DiscardBuffer
from kvss_agent.data_plane.wire import Role
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard import seal
from kvss_agent.shard.leases import FOREVER
from kvss_agent.shard.seal import Column, Header, Miss

_NEEDED = {
    wire.TierVerb.PURGE: wire.Feature.PURGE,
    wire.TierVerb.BORROW: wire.Feature.BORROW,
    wire.TierVerb.FLUSH: wire.Feature.FLUSH,
}
Found = list[Header | Miss]
Answer = wire.Refilled | wire.Deleted | wire.Tiered | wire.Listed | wire.Rejected


class Wanted(NamedTuple):
    """One column to get: what is expected in this slot."""

    slot: int
    column: Column


@dataclass(slots=True, eq=False)
class Pending:
    """A request, from before it is sent until its answer is there."""

    kind: type[Answer]  # of its answer, unless it is rejected
    columns: Sequence[Column] = ()
    into: Sequence[memoryview] = ()
    are_slots: bool = False  # open for these columns, whichever evict wrote them there
    withdrawal: Withdrawal | None = None
    number: int = 0
    deadline: float = FOREVER
    found: Found = field(default_factory=list)
    answer: Answer | None = None


class Requests:
    """Raises Lost where the agent is; after that it stays lost."""

    def __init__(
        self, address: Address, shard: str, credentials: Credentials, mover: Mover = PYTHON
    ) -> None:
        self.connection = AgentConnection(address, shard, credentials, Role.REFILL)
        self.use_mover(mover)
        self._grace_seconds = credentials.stall_seconds
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._changed = threading.Condition()
        self._somebody_receives = False
        self._lost: Lost | None = None
        self._waste = DiscardBuffer()

    def use_mover(self, mover: Mover) -> None:
        """Receive payloads with this mover from now on."""
        self._mover = mover

    def refill(
        self,
        wanted: Sequence[Wanted],
        into: Sequence[memoryview],
        after: int,
        wait_seconds: float,
        *,
        withdrawal: Withdrawal | None = None,
    ) -> Found:
        """`withdrawal`: takes `into` back from another thread."""
        columns = [one.column for one in wanted]
        pending = Pending(wire.Refilled, columns, into, withdrawal=withdrawal)
        slots = tuple(one.slot for one in wanted)
        answer = self._ask(
            pending,
            lambda number: wire.Refill(number, after, _milliseconds(wait_seconds), slots),
            wait_seconds,
        )
        return _found(pending, answer)

    def fill(
        self, sources: Sequence[int], columns: Sequence[Column], slots: Sequence[memoryview]
    ) -> Found:
        """Refill slots that are open for these columns, whichever evict wrote them to their sources, and
        seal each there. An empty slot gets nothing."""
        pending = Pending(wire.Refilled, columns, slots, are_slots=True)
        return _found(pending, self._ask(pending, _fill_from(sources), 0.0))

    def begin_fill(self, sources: Sequence[int]) -> Pending | None:
        """Ask for what is in these slots, unless the agent would have to be waited for: it may not read.
        `finish_fill` receives it. Nobody else may use this connection in between: who waits here
        receives for all."""
        pending, is_sent = Pending(wire.Refilled, are_slots=True), False
        self._expect(pending, 0.0)
        try:
            is_sent = self.connection.send_at_once(_fill_from(sources)(pending.number))
        finally:
            if not is_sent:
                del self._pending[pending.number]
        return pending if is_sent else None

    def finish_fill(
        self, begun: Pending, columns: Sequence[Column], slots: Sequence[memoryview]
    ) -> Found:
        """As `fill`."""
        begun.columns, begun.into = columns, slots
        try:
            return _found(begun, self._wait(begun))
        finally:
            self._pending.pop(begun.number, None)

    def delete(
        self, slots: Sequence[int], after: int, wait_seconds: float, *, scrub: bool
    ) -> Miss | None:
        answer = self._ask(
            Pending(wire.Deleted),
            lambda number: wire.Delete(
                number, after, _milliseconds(wait_seconds), tuple(slots), scrub=scrub
            ),
            wait_seconds,
        )
        return answer.reason if isinstance(answer, wire.Rejected) else None

    def tier(
        self,
        verb: wire.TierVerb,
        columns: Sequence[wire.TierColumn],
        after: int,
        wait_seconds: float,
        seconds: float,
        data_key: bytes = b"",
        lender: wire.Lender | None = None,
    ) -> list[tuple[wire.TierAnswer | Miss, int]]:
        """Answers, each with its note, 0 where there is none. `seconds` is for what comes after the
        wait: a disk takes its time."""
        needed = _NEEDED.get(verb, wire.Feature.TIER)
        if data_key:
            needed |= wire.Feature.ENCRYPT
        if needed & ~self.connection.features or (data_key and not self.connection.is_private):
            return [(Miss.REFUSED, 0) for _ in columns]
        answer = self._ask(
            Pending(wire.Tiered),
            lambda number: wire.Tier(
                number, verb, after, _milliseconds(wait_seconds), tuple(columns), data_key, lender
            ),
            wait_seconds + seconds,
        )
        if isinstance(answer, wire.Tiered):
            # A purge has two answers, and may be refused with one.
            expected = (1, 2) if verb is wire.TierVerb.PURGE else (len(columns),)
            if len(answer.answers) not in expected:
                raise Lost(f"{self.connection.address} answered for another number of columns")
            return list(zip(answer.answers, answer.notes or repeat(0), strict=False))
        return [(answer.reason if isinstance(answer, wire.Rejected) else Miss.LOST, 0) for _ in columns]

    def list(self, after: wire.TierColumn, seconds: float) -> wire.Listed | None:
        """The columns of the shard in tier 2 that follow this one; None where that is refused."""
        if not self.connection.features & wire.Feature.REDUNDANCY:
            return None
        answer = self._ask(
            Pending(wire.Listed),
            lambda number: wire.Tier(number, wire.TierVerb.LIST, 0, 0, (after,)),
            seconds,
        )
        return answer if isinstance(answer, wire.Listed) else None

    def close(self) -> None:
        with self._changed:
            self._lost = self._lost or Lost("this client was closed")
            self._changed.notify_all()
        self.connection.close()

    def _ask(self, pending: Pending, make: Callable[[int], wire.Frame], wait_seconds: float) -> Answer:
        self._expect(pending, wait_seconds)
        try:
            with contextlib.suppress(Lost):  # who receives will find the agent's reason
                self.connection.send(make(pending.number))
            return self._wait(pending)
        finally:
            self._pending.pop(pending.number, None)

    def _expect(self, pending: Pending, wait_seconds: float) -> None:
        pending.number = next(self._numbers)
        pending.deadline = time.monotonic() + wait_seconds + self._grace_seconds
        with self._changed:
            if self._lost:
                raise self._lost
            self._pending[pending.number] = pending

    def _wait(self, pending: Pending) -> Answer:
        while True:
            with self._changed:
                try:
                    while pending.answer is None and self._somebody_receives and not self._lost:
                        self._changed.wait()
                except BaseException:  # an interrupt: the answer would go to memory that is not ours
                    self._lost = self._lost or Lost("whoever asked was interrupted")
                    self.connection.close()
                    raise
                if pending.answer:
                    return pending.answer
                if self._lost:
                    raise self._lost
                self._somebody_receives = True
            try:
                while pending.answer is None:
                    self._receive()
            except BaseException as error:
                self._end(error if isinstance(error, Lost) else Lost(f"interrupted by {error!r}"))
                raise
            finally:
                with self._changed:
                    self._somebody_receives = False
                    self._changed.notify_all()

    def _earliest(self) -> float:
        """When the agent is lost if it goes on saying nothing: whoever is in a hurry counts."""
        return min(pending.deadline for pending in list(self._pending.values()))

    def _receive(self) -> None:
        """One answer, for whoever asked."""
        frame = self.connection.receive(self._earliest)
        if isinstance(frame, wire.Goodbye):
            if time.monotonic() > self._earliest():
                raise Lost(f"{self.connection.address} says nothing else")
            return
        if not isinstance(frame, Answer):
            raise self._not_allowed(frame)
        pending = self._pending.get(frame.request)
        if pending is None or pending.answer:  # the second answer would go to memory that is in use
            raise Lost(f"{self.connection.address} answered {frame.request}, which nobody asked")
        if not isinstance(frame, pending.kind | wire.Rejected):
            raise self._not_allowed(frame)
        if isinstance(frame, wire.Refilled):
            if len(frame.headers) != len(pending.columns):
                raise Lost(f"{self.connection.address} answered with another number of columns")
            if pending.are_slots:
                self._receive_columns(frame, pending)
            elif pending.withdrawal is None:
                self._receive_payloads(frame, pending, pending.into)
            else:
                with pending.withdrawal.receiving(self._end_withdrawn) as may_write:
                    self._receive_payloads(frame, pending, pending.into, may_write=may_write)
        with self._changed:
            pending.answer = frame
            self._changed.notify_all()

    def _not_allowed(self, frame: wire.Frame) -> Lost:
        return Lost(f"{self.connection.address} sent {type(frame).__name__}, which is not allowed here")

    def _receive_columns(self, frame: wire.Refilled, pending: Pending) -> None:
        """Each column into its slot, and sealed there as soon as it is whole. A compiled mover asks for
        the interpreter once, where there is nothing to decrypt."""
        slots, connection = pending.into, self.connection
        if found := connection.receive_columns(frame.headers, slots, pending.columns, self._mover):
            pending.found = found
            return
        self._receive_payloads(frame, pending, [slot[seal.HEADER_BYTES :] for slot in slots])
        arrived = zip(slots, pending.columns, pending.found, strict=True)
        pending.found = [seal.close_slot(*one) for one in arrived]

    def _receive_payloads(
        self,
        frame: wire.Refilled,
        pending: Pending,
        into: Sequence[memoryview],
        *,
        may_write: bool = True,
    ) -> None:
        """Each payload goes where it is wanted, and is checked when it is there. Unless it `may_write`,
        it is wanted nowhere any more."""
        places: list[memoryview] = []
        checks: list[tuple[int, int] | None] = []  # for each place: which column, which checksum
        columns = zip(frame.headers, pending.columns, into, strict=True)
        for index, (raw, (key, tag, sequence), place) in enumerate(columns):
            found, length = seal.read(raw), 0
            if isinstance(found, Header):
                length = found.length
                expected = found.sequence if pending.are_slots else sequence
                found = seal.compare(found, key, tag, expected)
            if length > self.connection.payload_bytes_max:
                raise self.connection.too_large()
            if not may_write or length > len(place):  # larger than what was wanted: not that column
                place = self._waste.of(length)
                found = found if isinstance(found, Miss) else Miss.CORRUPT
            pending.found.append(found)
            if length:
                places.append(place[:length])
                checks.append((index, found.checksum) if isinstance(found, Header) else None)
        sums = self.connection.receive_sums(places, self._mover)
        for check, sum_ in zip(checks, sums, strict=True):
            if check and sum_ != check[1]:
                pending.found[check[0]] = Miss.TORN  # overwritten on the way, or damaged

    def _end_withdrawn(self) -> None:
        self._end(Lost(f"{self.connection.address} stalls in the middle of a payload"))

    def _end(self, error: Lost) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()
        self.connection.close()


def _found(pending: Pending, answer: Answer) -> Found:
    if isinstance(answer, wire.Rejected):
        return [answer.reason for _ in pending.columns]
    return pending.found


def _fill_from(sources: Sequence[int]) -> Callable[[int], wire.Refill]:
    return lambda number: wire.Refill(number, 0, 0, tuple(sources))


def _milliseconds(seconds: float) -> int:
    return max(0, min(int(seconds * 1000), 2**32 - 1))
