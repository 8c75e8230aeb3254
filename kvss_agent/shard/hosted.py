"""A shard of this agent: its core, its memory, and its connections.

The core decides under a lock that is held for microseconds; bytes move outside of it, in the threads of
the connections, in slots that the core has leased or claimed for them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from kvss_agent.data_plane import wire
from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.mover import zero
from kvss_agent.shard import seal
from kvss_agent.shard.arena import Arena, CountPage, Extent, Progress, ignore_progress
from kvss_agent.shard.core import (
    LEASE_SECONDS_MAX,
    Clear,
    Effect,
    Fill,
    Publish,
    Receive,
    Reject,
    Serve,
    Shard,
    Truncate,
)
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.shard.leases import FOREVER
from kvss_agent.shard.seal import Miss

MEMBERS_MAX: Final = 64
OTHERS_MAX: Final = 48  # connections of others than the driver, who is never locked out by them
LEAVE_SECONDS: Final = 5.0  # for a driver to let go of what it no longer may use
PURGE_SLOTS: Final = 1024  # whose headers are looked at under the lock at a time
PURGE_BYTES: Final = 16 << 20  # that are overwritten under the lock at a time
WRITE_SECONDS: Final = 5.0  # after which a slot that is being written is taken for broken off
WRITE_LOOK_SECONDS: Final = 0.01
SHARED_LOOK_SECONDS: Final = 0.002  # how often a shared count is looked at while somebody waits for it


Mine = Receive | Serve | Clear | Fill | Reject


class Member(Protocol):
    """A connection, as the shard sees it."""

    number: int
    driver: str
    left: threading.Event  # it touches no memory of the shard any more

    def post(self, what: Mine | SlotLimit) -> None:
        """Have this done by a thread of the connection's own. Does not block."""

    def close(self, cause: Cause, sentence: str) -> None:
        """End the connection and tell its peer why."""


@dataclass(frozen=True, slots=True)
class SlotLimit:
    """The shard has a new slot limit or new memory."""

    slots: int


class HostedShard:
    """All methods may be called from any thread."""

    def __init__(
        self,
        identity: ShardIdentity,
        arena: Arena,
        applied: int = 0,
        *,
        readers: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        wake_me: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`readers`: other drivers that may refill from it. `wake_me(moment)` is told when `tick` has to
        be called, whenever that may have changed."""
        self.identity = identity
        self.readers = frozenset(readers)
        self.arena = arena
        self.core = Shard(arena.slots, applied)
        self.count = CountPage()
        self.count.publish(applied)
        self.incarnation = secrets.token_bytes(wire.INCARNATION_BYTES)
        self.purges = 0  # that have begun
        self._clock = clock
        self._wake_me = wake_me
        self._members: dict[int, Member] = {}
        self._writer: Member | None = None
        self._shared = False  # the writer shares the arena, and counts by itself
        self._was_shared = False  # somebody may still map the arena
        self._gone = False
        self._lock = threading.Lock()
        self._resizing = threading.Lock()
        self._agreed = FOREVER  # the slot limit that a sharing writer has been asked to keep
        self._shrunk = threading.Event()

    # Who is connected

    def attach(self, member: Member, role: wire.Role) -> None:
        """Let a connection in. A writer's own earlier connection is closed for it; another's is not."""
        if role is wire.Role.REFILL:
            with self._lock:
                self._must_be_here()
                others = sum(one.driver != self.identity.driver for one in self._members.values())
                is_other = member.driver != self.identity.driver
                if is_other and member.driver not in self.readers:
                    raise Breach(Cause.AUTHENTICATION, f"{member.driver} may not read this shard")
                if len(self._members) >= MEMBERS_MAX or (is_other and others >= OTHERS_MAX):
                    raise Breach(Cause.BUSY, f"the shard has {len(self._members)} connections already")
                self._members[member.number] = member
            return
        deadline = self._clock() + LEAVE_SECONDS
        while True:
            with self._lock:
                self._must_be_here()
                earlier = self._writer
                if earlier is None:
                    self._members[member.number] = self._writer = member
                    self._shared = role is wire.Role.SHARED
                    self._was_shared |= self._shared
                    return
            # It may be in the middle of writing into a slot: it has to leave before another writes.
            if earlier.driver == member.driver:
                earlier.close(Cause.SUPERSEDED, "the driver has connected anew")
            if not earlier.left.wait(max(0.0, deadline - self._clock())):
                raise Breach(Cause.BUSY, f"{earlier.driver} is writing to this shard")

    def detach(self, member: Member, received: int = 0) -> None:
        """A connection is over. `received` columns of the run that it was sending are in their slots."""
        with self._lock:
            if self._members.pop(member.number, None) is None:
                return
            if self._writer is member:
                self._look_at_count()
                self._writer, self._shared = None, False
                self._shrunk.set()
            if not self._gone:
                self._carry_out(self.core.abandon(member.number, received, self._clock()), None)
        member.left.set()

    def set_readers(self, readers: Collection[str]) -> None:
        """Whoever may not read any more is disconnected."""
        allowed = frozenset(readers) | {self.identity.driver}
        with self._lock:
            self.readers = frozenset(readers)
            gone = [one for one in self._members.values() if one.driver not in allowed]
        for one in gone:
            one.close(Cause.AUTHENTICATION, f"{one.driver} may not read this shard any more")

    def welcome(self, role: wire.Role) -> tuple[wire.Welcome, list[int]]:
        """How the shard stands; for who shares the arena also descriptors, which the caller closes."""
        with self._lock:
            self._must_be_here()
            extents: tuple[int, ...] = ()
            descriptors: list[int] = []
            if role is wire.Role.SHARED:
                extents, descriptors = self._extents(self.count.fd)
            found = wire.Welcome(
                self.incarnation, self.core.applied, self.core.slots, self.arena.slot_bytes, extents
            )
            return found, descriptors

    def memory(self) -> tuple[tuple[int, ...], list[int]]:
        """The slots of each extent, and descriptors, which the caller closes."""
        with self._lock:
            return self._extents()

    # Events

    def act(self, event: Callable[[Shard, float], list[Effect]], member: Member | None) -> list[Mine]:
        """Let something happen to the core. This member's part of the effects is returned, to be done
        now; that of the others is posted to them."""
        with self._lock:
            self._must_be_here()
            self._look_at_count()
            mine = self._carry_out(event(self.core, self._clock()), member)
            moment = self._next_moment()
        self._wake_me(moment)
        return mine

    def done(self, lease: int, member: Member | None) -> list[Mine]:
        """What a lease was for is done. Also when the shard is gone."""
        with self._lock:
            if self._gone:
                return []
            return self._carry_out(self.core.done(lease, self._clock()), member)

    def empty(self, slots: Iterable[int | Miss], up_to: int) -> None:
        """Zeros, in slots that a fill after this evict has written: whoever asked for it has left. What
        was evicted there meanwhile stays."""
        with self._lock:
            if self._gone:
                return
            for slot in slots:
                if isinstance(slot, int) and slot < self.arena.slots:
                    seal.clear(self.arena.slot(slot), up_to, scrub=True)

    def tick(self) -> float:
        """Time has passed; when to come again."""
        with self._lock:
            if self._gone:
                return FOREVER
            self._look_at_count()
            self._carry_out(self.core.tick(self._clock()), None)
            return self._next_moment()

    def state(self) -> dict[str, Any]:
        """How the shard stands, as plain numbers."""
        with self._lock:
            self._look_at_count()
            core = self.core
            return {
                "applied": core.applied,
                "queued_evicts": core.accepted - core.applied,
                "waiting_requests": core.waiting,
                "leases": len(core.leases),
                "expired_leases": core.leases.expired,
                "connections": len(self._members),
                "writer": None if self._writer is None else "shm" if self._shared else "stream",
                "counts": asdict(core.counts),
            }

    @property
    def evicts(self) -> int:
        """Columns that were evicted so far, over a connection or by a driver that shares the arena."""
        with self._lock:
            self._look_at_count()
            return self.core.counts.evicts

    def occupied(self) -> int:
        """How many slots hold a column. Looks into each of them: for people, not for every second."""
        return sum(
            bytes(self.arena.slot(number)[:4]) == seal.MAGIC for number in range(self.arena.slots)
        )

    def purge(self, tags: Collection[bytes]) -> tuple[int, int]:
        """Empty every slot whose header has one of these tags, whoever wrote it and whether or not
        anybody knows of it; how many, and of how many slots. Readers find out by the seal.

        A slot that is being written is looked at again when that is over, or after a while. Nobody can
        hold up who writes into shared memory: a column that comes between the look and the emptying is
        emptied too, or damaged, and its reader gets a miss.
        """
        with self._lock:
            self.purges += 1  # several threads may purge
        count, until = 0, self._clock() + WRITE_SECONDS
        slots = self.arena.slots
        left: Sequence[int] = range(slots)
        while tags and left:
            busy: list[int] = []
            at = 0
            while at < len(left):
                with self._lock:
                    if self._gone:
                        return count, slots
                    at, emptied = self._purge_some(tags, left, at, busy)
                    count += emptied
            if self._clock() >= until:
                for number in busy:
                    with self._lock:
                        count += self._purge_one(tags, number)
                break
            left = busy
            if left:
                time.sleep(WRITE_LOOK_SECONDS)
        return count, slots

    def _purge_some(
        self, tags: Collection[bytes], numbers: Sequence[int], at: int, busy: list[int]
    ) -> tuple[int, int]:
        """Under the lock: empty some of these slots, from this place on; up to which place, and how many
        that were. `busy`: gets those that somebody writes."""
        count, end = 0, min(at + PURGE_SLOTS, len(numbers))
        for place in range(at, end):
            number = numbers[place]
            if self._may_come(tags, number):
                busy.append(number)
            elif self._purge_one(tags, number):
                count += 1
                if count * self.arena.slot_bytes >= PURGE_BYTES:
                    return place + 1, count
        return end, count

    def _purge_one(self, tags: Collection[bytes], number: int) -> bool:
        """Under the lock: empty this slot if it has one of these tags; whether it had."""
        if number >= self.arena.slots or seal.tag_of(self.arena.slot(number)) not in tags:
            return False
        seal.clear(self.arena.slot(number), seal.SEQUENCE_MAX, scrub=True)
        return True

    def _may_come(self, tags: Collection[bytes], number: int) -> bool:
        """Under the lock: whether a column with one of these tags is being written to this slot, or may
        be waiting for those who read there."""
        if number >= self.arena.slots:
            return False
        slot = self.arena.slot(number)
        if seal.tag_of(slot) in tags:
            return self._is_written(number, slot)
        return self.core.is_claimed(number) and seal.read(slot[:64]) is not Miss.TORN

    def _is_written(self, number: int, slot: memoryview) -> bool:
        """Under the lock: whether somebody is writing there, as far as can be known."""
        return self.core.is_claimed(number) or (self._shared and seal.read(slot[:64]) is Miss.TORN)

    # Size and end

    def resize(self, slots: int, progress: Progress = ignore_progress) -> None:
        """Change the slot limit. Raises NoMemory and changes nothing if there is not enough.

        Growing takes as long as its memory takes to be made present; the shard goes on meanwhile.
        Shrinking returns when the limit is lower; memory is given back as soon as nobody reads there.
        """
        with self._resizing:
            before = self.core.slots
            if slots > before:
                # Memory that was going to be given back, and is there still, is kept from here on: the
                # arena must not be cut while it grows. What comes back is empty, as if it were new.
                self._empty(before, slots)
                with self._lock:
                    self._must_be_here()
                    kept = min(slots, self.core.capacity)
                    self._carry_out(self.core.resize(kept, self._clock()), None)
                self.arena.grow(slots, progress, huge_pages=self.identity.huge_pages)
            elif slots < before:
                self._agree_to_shrink(slots)
            with self._lock:
                self._must_be_here()
                self._carry_out(self.core.resize(slots, self._clock()), None)
                if self._shared and self._writer and slots > before:
                    self._writer.post(SlotLimit(slots))

    def shrunk(self, slots: int) -> None:
        """The driver that shares the arena no longer uses slots above this limit."""
        if slots <= self._agreed:
            self._shrunk.set()

    def _empty(self, first: int, end: int) -> None:
        """Zeros, for slots above the limit as far as there is memory. Who still reads or writes there
        finds out by their seals."""
        for number in range(first, end):
            with self._lock:
                if number >= self.arena.slots:
                    return
                slot = self.arena.slot(number)
            zero(slot)

    def _agree_to_shrink(self, slots: int) -> None:
        with self._lock:
            writer = self._writer if self._shared else None
            if writer:
                self._agreed = slots
                self._shrunk.clear()
                writer.post(SlotLimit(slots))
        # A reader there may look for as long as a lease lasts.
        if writer and not self._shrunk.wait(LEASE_SECONDS_MAX + LEAVE_SECONDS):
            writer.close(Cause.STALLED, "the driver does not let go of slots that are taken away")
            writer.left.wait(LEAVE_SECONDS)

    def end(self, cause: Cause, sentence: str) -> None:
        """Close all connections and let go of the memory: it is free once the last reader is through."""
        with self._lock:
            self._gone = True
            members = list(self._members.values())
        for member in members:
            member.close(cause, sentence)
        for member in members:
            member.left.wait(LEAVE_SECONDS)
        with self._resizing:
            if not self._was_shared:  # whoever maps it may still be reading
                self.arena.free(0)
            with self._lock:
                self.arena.close()
                self.count.close()

    def _give_back(self) -> None:
        """Free what is above the limit of the arena. It may take seconds, so it is nobody's own work."""
        with self._resizing:
            with self._lock:
                if self._gone:
                    return
                dropped = self.arena.drop()
            for extent in dropped:
                extent.free(0)
                extent.close()
            self.arena.free(self.arena.slots)
            with self._lock:
                if self._shared and self._writer:
                    self._writer.post(SlotLimit(self.core.slots))

    # Inside, under the lock

    def _must_be_here(self) -> None:
        if self._gone:
            raise Breach(Cause.GONE, "the shard was removed")

    def _look_at_count(self) -> None:
        """A driver that shares the arena counts by itself; see how far it is."""
        if not self._shared or self._gone or not self._writer:
            return
        if self.count.applied == self.core.applied:
            return
        try:
            effects = self.core.observe(self.count.applied, self._clock())
        except Breach as breach:
            self.count.publish(self.core.applied)
            self._writer.close(breach.cause, str(breach))
        else:
            self._carry_out(effects, None)

    def _next_moment(self) -> float:
        moment = self.core.next_deadline()
        if self._shared and self.core.waiting:
            moment = min(moment, self._clock() + SHARED_LOOK_SECONDS)
        return moment

    def _extents(self, *before: int) -> tuple[tuple[int, ...], list[int]]:
        """Their slots; and descriptors, behind such as these. Raises OSError if there are no more."""
        extents = self.arena.extents
        with contextlib.ExitStack() as made:
            descriptors = []
            for fd in [*before, *(extent.fd for extent in extents)]:
                descriptors.append(os.dup(fd))
                made.callback(os.close, descriptors[-1])
            made.pop_all()
        return tuple(extent.slots for extent in extents), descriptors

    def _carry_out(self, effects: list[Effect], member: Member | None) -> list[Mine]:
        mine: list[Mine] = []
        for effect in effects:
            match effect:
                case Publish(count):
                    self.count.publish(count)
                case Truncate(slots):
                    self.arena.truncate(slots)
                    threading.Thread(target=self._give_back, name="give back", daemon=True).start()
                case _ if member is not None and effect.owner == member.number:
                    mine.append(effect)
                case _ if effect.owner in self._members:
                    self._members[effect.owner].post(effect)
                case Serve() | Clear() | Fill():  # for somebody who has left
                    mine += self._carry_out(self.core.done(effect.lease, self._clock()), member)
                case _:
                    pass
        return mine


def reopen(
    extent_slots: tuple[int, ...], descriptors: list[int], slot_bytes: int, slots: int, known: Arena
) -> None:
    """Bring an arena that maps the memory of another process up to date with what that process says.

    The descriptors are the arena's, or closed, when this returns or raises.
    """
    kept = {os.fstat(extent.fd).st_ino: extent for extent in known.extents}
    extents: list[Extent] = []
    rest = list(descriptors)
    try:
        for size in extent_slots:
            known_one = kept.pop(os.fstat(rest[0]).st_ino, None)
            extents.append(known_one or Extent.attach(rest[0], slot_bytes, size))
            fd = rest.pop(0)
            if known_one:
                os.close(fd)
    finally:
        for fd in rest:
            os.close(fd)
    known.extents = extents
    known.populate(slots)
    known.slots = slots
    for extent in kept.values():
        extent.close()
