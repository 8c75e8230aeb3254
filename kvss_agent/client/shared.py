"""A shard whose arena is mapped here too: an evict is a copy and a store, a refill reads in place.

The agent is not asked for any of it. It sees evicts by the count, a number in memory that both map, and
nothing else; so leases on slots that are being read are kept here, where the only writer is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from kvss_agent.client.connection import AgentConnection, Credentials, Lost
from kvss_agent.client.interface import (
    WAIT_SECONDS,
    Evict,
    NotApplied,
    ShardClient,
    Views,
)
from kvss_agent.client.requests import Requests, Wanted
from kvss_agent.client.window import window
from kvss_agent.data_plane import wire
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.wire import Feature, Role
from kvss_agent.mover import Mover
from kvss_agent.shard import seal
from kvss_agent.shard.arena import Arena, CountPage
from kvss_agent.shard.core import LEASE_SECONDS_MAX, batches
from kvss_agent.shard.hosted import reopen
from kvss_agent.shard.leases import FOREVER, Leases
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss


class SharedClient(ShardClient):
    def __init__(self, address: Address, shard: str, credentials: Credentials, mover: Mover) -> None:
        self.transport = "shm"
        self._open_requests: Callable[[], Requests] = lambda: Requests(address, shard, credentials)
        self._requests: Requests | None = None
        self._opening = threading.Lock()
        self._mover = mover
        self._verify = seal.verifier(mover)
        self._connection = AgentConnection(address, shard, credentials, Role.SHARED)
        welcome = self._connection.welcome
        try:
            self._map(welcome, self._connection.take_descriptors())
        except BaseException as error:
            self._connection.close()
            if isinstance(error, OSError | ValueError):
                raise Lost(f"the memory of {address} cannot be mapped: {error}") from error
            raise
        self.slot_bytes = welcome.slot_bytes
        self.payload_bytes_max = welcome.slot_bytes - HEADER_BYTES
        self.incarnation = welcome.incarnation
        self._leases = Leases()
        self._leased = self._leases.uses
        self._lock = threading.Lock()
        self._window = window(self._lock, self._leased, self._words, welcome.applied, mover)
        self._window.follow(self._arena)
        self._freed = threading.Condition(self._lock)
        self._waiting = 0  # threads that want to be told when a lease ends
        self._lost: Lost | None = None
        self._closed = False
        self._listener = threading.Thread(
            target=self._listen, name=f"slot limit of {shard}", daemon=True
        )
        self._listener.start()

    def _map(self, welcome: wire.Welcome, descriptors: list[int]) -> None:
        if not descriptors:
            raise ValueError("it was not sent")
        count, *extents = descriptors
        self._arena = Arena(welcome.slot_bytes, [])
        try:
            reopen(welcome.extents, extents, welcome.slot_bytes, welcome.slots, self._arena)
        except BaseException:
            os.close(count)
            raise
        try:
            self._count = CountPage(count)
        except BaseException:
            self._arena.close()
            raise
        self._words = self._count.words

    def use_mover(self, mover: Mover) -> None:
        """Move bytes with this mover from now on. What is running ends with the other one."""
        with self._lock:
            if mover is self._mover or self._lost:
                return
            before, self._mover = self._window, mover
            self._verify = seal.verifier(mover)
            self._window = window(self._lock, self._leased, self._words, before.number, mover)
            self._window.follow(self._arena)
            before.shut()

    @property
    def requests(self) -> Requests:
        with self._opening:  # not under the lock: an agent that hangs does not hold up evicts
            with self._lock:
                self._must_be_here()
            if self._requests is None:
                self._requests = self._open_requests()
            return self._requests

    @property
    def may_wait_in_front(self) -> bool:
        return bool(self._connection.features & Feature.FRONT)

    @property
    def number(self) -> int:
        return self._window.number

    @property
    def slots(self) -> int:
        return self._arena.slots

    @property
    def applied(self) -> int:
        return self._window.number

    # Evicts

    def evict(self, slot: int, key: bytes, tag: bytes, tokens: int, payload: memoryview) -> int:
        while (number := self._window.evict(slot, key, tag, tokens, payload)) is None:
            self._make_sure_of(slot)
        return number

    def evict_batch(self, columns: Sequence[Evict]) -> int:
        number = self._window.evict_batch(columns)
        if number is None:  # then one by one, each when its slot is free
            self._must_be_here()
            number = self.number
            for column in columns:
                number = self.evict(*column)
        return number

    def _make_sure_of(self, slot: int) -> None:
        """Return when nobody reads this slot any more. Raises Lost if we are."""
        with self._lock:
            while slot in self._leased and not self._lost:
                self._wait_for_lease()
            self._must_be_here()

    def _wait_for_lease(self) -> None:
        """Until a lease ends, or its deadline passes."""
        now = time.monotonic()
        if not self._leases.expire(now):
            self._wait_until(self._leases.next_deadline())

    def _wait_until(self, moment: float) -> None:
        """Until something is free, or the moment has come."""
        self._waiting += 1
        try:
            seconds = max(0.0, moment - time.monotonic())
            self._freed.wait(None if seconds == FOREVER else seconds)
        finally:
            self._waiting -= 1

    def wait_applied(self, number: int, seconds: float = WAIT_SECONDS) -> None:  # noqa: ARG002 - it has been
        """An evict is applied when it returns."""
        if number > self.number:
            raise NotApplied(f"there was no evict {number} yet, the last is {self.number}")

    # Refills

    def refill(self, wanted: Sequence[Wanted], into: Sequence[memoryview]) -> list[Header | Miss]:
        """Without a lease: what is evicted to a slot meanwhile makes the copy torn, and the copy is
        checked."""
        while (found := self._window.refill(wanted, into)) is None:
            with self._lock:  # it was shut: there is another window, or none any more
                self._must_be_here()
        return found

    def view(self, wanted: Sequence[Wanted]) -> Views:
        views = self.lease([one.slot for one in wanted])
        views.columns = [
            slot if isinstance(slot, Miss) else self._checked(slot, one.column)
            for slot, one in zip(views.columns, wanted, strict=True)
        ]
        return views

    def _checked(self, slot: memoryview, column: Column) -> memoryview | Miss:
        found = self._verify(slot, column)
        if isinstance(found, Miss):
            return found
        return slot[HEADER_BYTES : HEADER_BYTES + found.length].toreadonly()

    def lease(self, slots: Sequence[int]) -> Views:
        """Whole slots, header first, not looked at. Nothing is evicted to them until released."""
        with self._lock:
            self._must_be_here()
            arena = self._arena
            limit = arena.slots
            lease = self._leases.take(slots, time.monotonic() + LEASE_SECONDS_MAX)
            columns: list[memoryview | Miss] = [
                arena.slot(slot) if slot < limit else Miss.ABSENT for slot in slots
            ]
        return _Leased(columns, lease, self._release)

    def _release(self, lease: int) -> None:
        with self._lock:
            if self._leases.end(lease) and self._waiting:
                self._freed.notify_all()

    def delete(self, slots: Sequence[int], *, scrub: bool = False) -> Miss | None:
        deadline = time.monotonic() + WAIT_SECONDS
        for batch in batches(slots):  # between two of them evicts have their turn
            with self._lock:
                self._must_be_here()
                while any(self._leases.holds(slot) for slot in batch):
                    if time.monotonic() >= deadline:
                        return Miss.LATE
                    self._wait_until(min(deadline, self._leases.next_deadline()))
                    self._leases.expire(time.monotonic())
                for slot in batch:
                    if slot < self._arena.slots:
                        seal.clear(self._arena.slot(slot), self.number, self.number, scrub=scrub)
        return None

    # What the agent says

    def _listen(self) -> None:
        try:
            while True:
                frame = self._connection.receive(FOREVER)  # silent for as long as nothing changes
                if isinstance(frame, wire.Resized):
                    self._follow(frame)
        except Lost as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - mapping has failed, or a callback failed
            self._end(Lost(f"cannot follow the slot limit of {self._connection.address}: {error!r}"))
            self._connection.close()

    def _end(self, error: Lost) -> None:
        with self._lock:
            self._lost = self._lost or error
            self._window.shut()
            self._freed.notify_all()
        if self.on_lost and not self._closed:
            self.on_lost()

    @property
    def lost(self) -> Lost | None:
        return self._lost

    def _follow(self, resized: wire.Resized) -> None:
        """Apply a new slot limit, or new memory."""
        descriptors = self._connection.take_descriptors()
        with self._lock:
            shrinks = resized.slots < self._arena.slots
            self._arena.slots = min(self._arena.slots, resized.slots)
            self._window.follow(self._arena)
            while self._leases.any_from(resized.slots):
                self._wait_for_lease()
        reopen(resized.extents, descriptors, self.slot_bytes, resized.slots, self._arena)
        with self._lock:
            self._window.follow(self._arena)
        if shrinks:
            self._connection.send(wire.Shrunk(resized.slots))
        if self.on_slot_limit:
            self.on_slot_limit(resized.slots)

    def _must_be_here(self) -> None:
        if self._lost:
            raise self._lost

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end(Lost("this client was closed"))
        self._connection.close()
        with self._opening:
            if self._requests:
                self._requests.close()
        self._listener.join()
        with self._lock:
            self._arena.close()
            self._count.close()


class _Leased(Views):
    def __init__(
        self, columns: list[memoryview | Miss], lease: int, release: Callable[[int], None]
    ) -> None:
        self.columns = columns
        self._lease = lease
        self._release = release

    def release(self) -> None:
        """The memory may be written again; whoever still looks is on their own."""
        self._release(self._lease)
