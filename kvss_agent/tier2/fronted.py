"""A directory of the agent's own disk in front of a store that others share, or that is far away.

The store behind is the one that counts: what the index of tier 2 knows, its caps and its expiry are
about it. In front lie *copies* of what was written or read last, which are read from there, and what is
*waiting* to be copied behind; each kind has a directory. So a front that is lost costs what was waiting,
and time.

Three ways to write: `through` is done when both have the file; `back` when the front has it, and copies
it behind in the background; `displaced` copies behind what has to make room. What finds no room in
front, or a front that fails, is written behind at once.

What is written behind keeps to a budget. What is copied there in the background rests for it. A spill
that finds no room in front does not, and is refused while others wait for the links. Those that are
written through rest before they come here.

Orgs share the front as they share the store: none has more in front than it may have in the store, and
the one that fills most of that makes room. What waits with `back` cannot make room, so an org may not
have more of it than nobody's waiting columns leave: always some of the front is left for others.

Whoever changes files of a column, here or behind, holds its claim (`claims`). A purge closes its scope
to claims, and drops what was on its way to the front: nothing comes back after it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvss_agent.limits.background import Background
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.tier2.address import Address, Scope, address_of
from kvss_agent.tier2.backend import (
    Backend,
    Failed,
    Fault,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
    look_at,
)
from kvss_agent.tier2.claims import Claims
from kvss_agent.tier2.column_file import plausible
from kvss_agent.tier2.index import Caps, Index, Ticket
from kvss_agent.tier2.posix import Posix, translated

log = logging.getLogger(__name__)

COPIES: Final = "copies"
WAITING: Final = "waiting"
THREADS: Final = 4  # that copy
PROMOTED_BYTES_MAX: Final = 64 << 20  # in memory, on their way to the front; no more is copied then
FLUSHES: Final = 256  # that are begun by one `tidy`; one, as long as the store behind fails
CLEARED: Final = 1000  # copies of a shard that has left that are removed at once
LOOKS: Final = 8  # by one `tidy`: whether a copy's original is still there
# Whose faults they are, in the log.
FRONT: Final = "The front of tier 2"
BEHIND: Final = "Copying behind the front of tier 2"
LOOKING: Final = "Looking behind the front of tier 2"
SAID_SECONDS: Final = 600.0  # in which the log has a fault once
GIVE_UP_SECONDS: Final = 600.0  # without progress; then what waits of a shard that left is dropped
ASKED_SECONDS: Final = 60.0  # whoever asks for that does so at least as often
BOOKED_SECONDS_MAX: Final = 0.1  # of others' bytes, beside which a spill is written behind at once


Part = tuple[bytes, str]  # namespace and part of the columns of a shard


class Writes(StrEnum):
    THROUGH = "through"
    BACK = "back"
    DISPLACED = "displaced"


@dataclass(frozen=True, slots=True)
class Lone:
    """A column that is in front alone."""

    since: float  # it was written
    bytes: int


@dataclass(slots=True)
class Leaving:
    """What waits of a shard that leaves. Times are of the monotonic clock."""

    addresses: set[Address]
    since: float  # none of it was copied behind
    asked_at: float


class Fronted:
    """See `Backend`: one of two levels."""

    def __init__(
        self,
        front: Path,
        behind: Backend,
        cap_bytes: int,
        writes: Writes,
        *,
        shared: bool = True,
        durable: bool = False,
        mover: Mover = PYTHON,
        clock: Callable[[], float] = time.time,
        background: Background | None = None,
    ) -> None:
        """`background`: what the bytes that are written behind keep to."""
        self.kind, self.looks_together = behind.kind, behind.looks_together
        self._behind = behind
        self._copies = Posix(front / COPIES, mover=mover)
        self._waiting = Posix(front / WAITING, durable=durable, mover=mover)
        self._writes = writes
        self._is_shared = shared  # others remove files behind
        self._clock = clock
        self._background = background or Background()
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(THREADS, "tier2-front")
        self._flushers = ThreadPoolExecutor(THREADS, "tier2-flush")  # which rest for their budget
        self._claims = Claims()
        self._lock = self._claims.changed  # of all below
        self._index = Index(Caps(cap_bytes, cap_bytes))  # what lies in front
        self._lone: dict[Address, Lone] = {}  # what is waiting, the oldest first
        self._leaving: dict[Part, Leaving] = {}
        self._attended: frozenset[Part] | None = None  # None: nobody has said which shards there are
        self._left: set[Part] = set()  # those with columns here that the agent does not have
        self._lone_bytes: Counter[bytes] = Counter()  # of each org, those being written included
        self._promoting: dict[Address, memoryview] = {}
        self._promoting_bytes = 0
        self._flushing: set[Address] = set()  # queued, or at it
        self._is_failing = False  # what was copied behind last,
        self._are_looks_failing = False  # and what was looked for there
        self._said: dict[tuple[str, str], float] = {}  # when the log had a fault last
        self._has_strays = False  # copies that could not be listed when it was opened
        self._originals: Iterator[Address] = iter(())  # still to be looked for in this round
        self._looking: set[Address] = set()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def use_mover(self, mover: Mover) -> None:
        """See `Posix`."""
        self._copies.use_mover(mover)
        self._waiting.use_mover(mover)

    def open(self) -> None:
        """What waits is copied behind once it has been listed what lies there. Nothing else in front has
        to be there."""
        self._behind.open()
        try:
            self._waiting.open()
        except Failed as failed:
            if failed.fault is not Fault.NO_SPACE:
                raise
            self._count_fault(failed)  # there is no such directory, so nothing waits in it
        self._adopt(self._waiting)
        try:
            self._copies.open()
            self._adopt(self._copies)
        except Failed as failed:
            self._count_fault(failed)
            self._has_strays = True
        with self._lock:
            self._find_left()
        self._trim()

    def _adopt(self, root: Posix) -> None:
        for found in sorted(root.files(), key=lambda one: one.modified):
            with self._lock:
                is_new = self._index.adopt(
                    found.address, found.bytes, written=found.modified, beyond_caps=True
                )
                if is_new and root is self._waiting:
                    self._lone_bytes[found.address.tag] += found.bytes
                    self._wait(found.address, Lone(found.modified, found.bytes))

    def set_caps(self, caps: Caps) -> None:
        with self._lock:
            total = self._index.caps.total
            orgs = {tag: min(total, cap) for tag, cap in caps.orgs.items()}
            self._index.set_caps(Caps(total, min(total, caps.org), orgs))

    def properties(self) -> Mapping[str, bool | int]:
        with self._lock:
            since = next((lone.since for lone in self._lone.values()), self._clock())
            return {
                **self._behind.properties(),
                "front_columns": self._index.columns,
                "front_bytes": self._index.held,
                "front_cap_bytes": self._index.caps.total,
                "front_waiting": len(self._lone),
                "front_waiting_bytes": self._lone_bytes.total(),
                "front_waiting_seconds": max(0, int(self._clock() - since)),
                "front_copies_at_once": self._writes is not Writes.DISPLACED,
                "front_direct_io": bool(self._copies.properties()["direct_io"]),
                "read_front": self._counts["read in front"],
                "read_behind": self._counts["read behind"],
                "copied_behind": self._counts["copied behind"],
                "promoted": self._counts["promoted"],
                "given_up": self._counts["given up"],
            }

    def own_faults(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._faults)

    def close(self) -> None:
        self._ended.set()
        for pool in (self._flushers, self._threads):
            pool.shutdown(cancel_futures=True)
        for one in (self._waiting, self._copies, self._behind):
            one.close()

    # Writing

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        with self._claims.of([address_of(file.name) for file in files]):
            try:
                self._forget([address_of(file.name) for file in files])  # a copy of what was here before
            except Failed as failed:
                self._count_fault(failed)
            if self._writes is Writes.THROUGH:
                answers = self._behind.write(files)
                both = zip(files, answers, strict=True)
                self._put(self._copies, [file for file, answer in both if answer is True])
                return answers
            found = self._put(self._waiting, files)
            left = [place for place in range(len(files)) if place not in found]
            if left:
                behind = self._write_behind([files[place] for place in left])
                found |= zip(left, behind, strict=True)
        if self._writes is Writes.BACK and not self._is_failing:
            self._begin_flushes(address_of(file.name) for file in files)
        return [found[place] for place in range(len(files))]

    def _write_behind(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        """At once, as far as the links have room."""
        may = [self._has_budget(sum(map(len, file.parts))) for file in files]
        now = [file for file, its in zip(files, may, strict=True) if its]
        written = iter(self._behind.write(now) if now else [])
        late = Failed(Fault.OVER_BUDGET, "the front is full, and the links to the store are in use")
        return [next(written) if its else late for its in may]

    def _has_budget(self, size: int) -> bool:
        """Without resting. If so, others rest for these bytes."""
        return self._background.book(size, time.monotonic(), BOOKED_SECONDS_MAX) is not None

    def _put(self, root: Posix, files: Sequence[Outgoing]) -> dict[int, bool | Failed]:
        """Write these in front, whose claims we hold: by place whether it was intact. Those are left out
        for which there is no room, or which the disk did not take."""
        answers: dict[int, bool | Failed] = {}
        tickets: dict[int, Ticket] = {}
        try:
            for place, file in enumerate(files):
                if ticket := self._room(file, is_waiting=root is self._waiting):
                    tickets[place] = ticket
            written = root.write([files[place] for place in tickets]) if tickets else []
            for place, answer in zip([*tickets], written, strict=True):
                if isinstance(answer, Failed):
                    self._count_fault(answer)
                    continue
                answers[place] = answer
                if answer:
                    self._has_come(tickets.pop(place), is_waiting=root is self._waiting)
        finally:
            with self._lock:
                for ticket in tickets.values():
                    self._cancel(ticket, is_waiting=root is self._waiting)
        return answers

    def _has_come(self, ticket: Ticket, *, is_waiting: bool) -> None:
        now = self._clock()
        with self._lock:
            self._index.commit(ticket, now)
            if is_waiting:
                self._wait(ticket.address, Lone(now, ticket.bytes))

    def _room(self, file: Outgoing, *, is_waiting: bool) -> Ticket | None:
        """For this file in front, where it is not."""
        address, size = address_of(file.name), sum(len(part) for part in file.parts)
        with self._lock:
            if self._index.knows(address) or self._index.is_busy(address):
                return None
            if is_waiting and not self._may_wait(address.tag, size):
                return None
            ticket = self._index.reserve(address, size)
            if ticket is None:
                return None
            if is_waiting:
                self._lone_bytes[address.tag] += size
            if not self._claims.take(ticket.victims):  # one is being deleted, purged or looked for
                self._cancel(ticket, is_waiting=is_waiting)
                return None
        victims = [*ticket.victims]
        left: set[Address] = set()
        is_free = False
        try:
            left.update(address for address in victims if self._has_left(address))
        finally:
            with self._lock:
                self._conclude(victims, left)
                ticket.victims.clear()
                is_free = len(left) == len(victims) and self._index.start(ticket)
                if not is_free:
                    self._cancel(ticket, is_waiting=is_waiting)
        return ticket if is_free else None

    def _has_left(self, address: Address) -> bool:
        """Remove from the front what we have claimed; what is nowhere else is copied behind first."""
        lone = self._lone.get(address)
        try:
            if lone is not None:
                if not self._has_budget(lone.bytes):
                    return False
                self._copy_behind(address, lone.since)
                self._waiting.delete([address.name])
            self._copies.delete([address.name])
        except Failed as failed:
            self._count_fault(failed, BEHIND if lone is not None else FRONT)
            return False
        return True

    def _conclude(self, victims: Iterable[Address], left: set[Address]) -> None:
        """With the lock held: their removal was begun, and these have left."""
        for address in victims:
            if address in left:
                self._waits_no_more(address)
                self._index.finish_removal(address)
            else:
                self._index.cancel_removal(address)
        self._claims.release([*victims])

    def _trim(self) -> None:
        """A cap was lowered, or what waited lies in front beyond it."""
        with self._lock:
            victims = [*self._index.trim()]
            free = [address for address in victims if self._claims.take([address])]
            for address in victims:
                if address not in free:
                    self._index.cancel_removal(address)
        left: set[Address] = set()
        try:
            left.update(address for address in free if self._has_left(address))
        finally:
            with self._lock:
                self._conclude(free, left)

    # Reading

    def is_in_front(self, address: Address) -> bool:
        """Whether it is read without the store behind, as far as one knows now. Waits for nobody."""
        return self._index.knows(address) or address in self._lone

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        answers: list[int | Failed | None] = [None] * len(files)
        there: dict[int, bool] = {}  # by place: whether it is waiting
        with self._lock:
            for place, (name, _) in enumerate(files):
                address = address_of(name)
                if self._index.knows(address) or address in self._lone:
                    self._index.touch(address)
                    there[place] = address in self._lone
        for root, kind in ((self._waiting, True), (self._copies, False)):
            places = [place for place, is_waiting in there.items() if is_waiting is kind]
            if places:
                for place, answer in zip(places, root.read([files[p] for p in places]), strict=True):
                    answers[place] = answer
                    if isinstance(answer, Failed):
                        self._count_fault(answer)
        left = [place for place, answer in enumerate(answers) if not isinstance(answer, int)]
        with self._lock:
            self._counts["read in front"] += len(files) - len(left)
        if left:
            self._read_behind(files, left, answers)
        return answers

    def _read_behind(
        self, files: Sequence[Incoming], places: Sequence[int], answers: list[int | Failed | None]
    ) -> None:
        for place, answer in zip(places, self._behind.read([files[p] for p in places]), strict=True):
            if answer is None and isinstance(answers[place], Failed):
                continue  # it is in front alone, where it cannot be read now
            answers[place] = answer
            if isinstance(answer, int):
                self._promote(*files[place], answer)

    def _promote(self, name: str, parts: Sequence[memoryview], size: int) -> None:
        """Copy to the front what has been read from behind, as long as it lies here as it was read."""
        address = address_of(name)
        with self._lock:
            self._counts["read behind"] += 1
            if (
                self._promoting_bytes + size > PROMOTED_BYTES_MAX
                or not plausible(size)
                or size > self._index.caps.total
                or address in self._promoting
                or self._index.knows(address)
                or not self._claims.is_free(address)
                or (self._attended is not None and _part_of(address) not in self._attended)
            ):
                return
            self._promoting_bytes += size
            self._promoting[address] = _first(parts, size)
        self._submit(self._put_promoted, address, self._threads)

    def _put_promoted(self, address: Address) -> None:
        is_there = False
        with self._lock:
            content = self._promoting.get(address)
            if content is None:
                return  # it was purged or deleted meanwhile
            if not self._claims.take([address]):
                self._drop_promotion(address)
                return
        try:
            file = Outgoing(address.name, [content], lambda: True)
            is_there = self._put(self._copies, [file]).get(0) is True
        finally:
            with self._lock:
                self._counts["promoted"] += is_there
                self._drop_promotion(address)
                self._claims.release([address])

    # Copying behind

    def tidy(self) -> None:
        """Copy behind what is left waiting; hold the cap; look whether originals are still there."""
        self._trim()
        try:
            self._mend()
        except Failed as failed:
            self._count_fault(failed)
        with self._lock:
            orphaned = sorted(self._orphaned())
        for part in orphaned:
            self.flush(part)
        if self._writes is not Writes.DISPLACED:
            with self._lock:
                left = [one for one in self._lone if one not in self._flushing]
            self._begin_flushes(itertools.islice(left, 1 if self._is_failing else FLUSHES))
        if self._is_shared and not self._looking:
            self._begin_looks(1 if self._are_looks_failing else LOOKS)
        self._behind.tidy()

    def _mend(self) -> None:
        """Do what the front's disk did not when this was opened. Copies that were not listed then go:
        nobody knows what has become of their originals since. Raises Failed."""
        self._waiting.tidy()
        self._copies.tidy()
        if self._has_strays:
            for found in self._copies.files():
                if self._claims.take([found.address]):
                    try:
                        if not self._index.knows(found.address):
                            self._copies.delete([found.address.name])
                    finally:
                        self._claims.release([found.address])
            self._has_strays = False

    def _begin_flushes(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            with self._lock:
                if address not in self._lone or address in self._flushing:
                    continue
                self._flushing.add(address)
            self._submit(self._flush, address, self._flushers)

    def _flush(self, address: Address) -> None:
        with self._lock:
            lone = self._lone.get(address)
            if lone is None:
                self._flushing.discard(address)
                return
        rest = self._background.book(lone.bytes, time.monotonic())
        if self._ended.wait(rest):
            return  # it waits in front for the next life
        with self._lock:
            lone = self._lone.get(address)
            if lone is None or not self._claims.take([address]):
                self._flushing.discard(address)
                return  # it is gone, or its turn comes with the next `tidy`
        is_behind = is_lost = False
        try:
            if self._copy_behind(address, lone.since):
                self._waiting.hand_over(address.name, self._copies)
                is_behind = True
            else:
                self._waiting.delete([address.name])
                is_lost = True
            self._is_failing = False
        except Failed as failed:
            self._is_failing = True
            self._count_fault(failed, BEHIND)
        finally:
            with self._lock:
                self._flushing.discard(address)
                if is_behind:
                    self._waits_no_more(address)
                elif is_lost:
                    self._lose(address)
                self._claims.release([address])

    def _copy_behind(self, address: Address, since: float) -> bool:
        """False: there is nothing that could be copied. Raises Failed."""
        is_there = _copy(self._waiting, self._behind, address, since)
        with self._lock:
            self._counts["copied behind"] += is_there
        return is_there

    # Shards that leave

    def attend(self, parts: Collection[Part]) -> None:
        """The agent has these shards. What waits of others is copied behind by `tidy`, and their copies
        go."""
        with self._lock:
            self._attended = frozenset(parts)
            self._find_left()

    @property
    def orphans(self) -> int:
        """How many columns are here of shards that the agent does not have."""
        with self._lock:
            left = self._orphaned()
            return sum(_part_of(one) in left for one, _ in self._index.sizes()) if left else 0

    def flush(self, part: Part) -> int:
        """The shard leaves this agent: copy behind what waits of it, in the background, and then remove
        its copies, which nobody would look for here. How many columns are still to be done, of those
        that waited when this was first called: call it again until none is.

        If none could be copied for GIVE_UP_SECONDS all are dropped. Else a column could come back,
        however late, that has been deleted where the shard is by then.
        """
        now = time.monotonic()
        with self._lock:
            waiting = {one for one in self._lone if _part_of(one) == part}
            leaving = self._leaving.get(part)
            if leaving is None or now > leaving.asked_at + ASKED_SECONDS:  # it left at another time
                leaving = self._leaving[part] = Leaving(waiting, now, now)
            leaving.asked_at = now
            left = leaving.addresses & waiting
            if len(left) < len(leaving.addresses):
                leaving.addresses, leaving.since = left, now
            is_over = now > leaving.since + GIVE_UP_SECONDS
            ordered = [one for one in self._lone if one in left]
        if not left:
            return self._clear_copies(part)
        if is_over:
            dropped = sum(map(self._drop, ordered))
            with self._lock:
                self._counts["given up"] += dropped
            log.warning(
                "%s: %d columns of %s were dropped, since its shard has left and none could be copied",
                *(BEHIND, dropped, part[1]),
            )
            return len(left) - dropped
        self._begin_flushes(itertools.islice(ordered, 1 if self._is_failing else FLUSHES))
        return len(left)

    def _clear_copies(self, part: Part) -> int:
        """Remove the copies of a shard that leaves, some at a time. How many are left."""
        with self._lock:
            promoted = [one for one in self._promoting if _part_of(one) == part]
            free = [one for one in promoted if self._claims.is_free(one)]
            for address in free:
                self._drop_promotion(address)
            copies = [
                one for one, _ in self._index.sizes() if _part_of(one) == part and one not in self._lone
            ]
        left = len(promoted) - len(free) + len(copies) - sum(map(self._drop, copies[:CLEARED]))
        if not left:
            with self._lock:
                self._leaving.pop(part, None)
                self._left.discard(part)
        return left

    def _find_left(self) -> None:
        """With the lock held: which shards the agent does not have, of those with columns here."""
        if self._attended is not None:
            here = {_part_of(one) for one, _ in self._index.sizes()}
            self._left = here - self._attended

    def _orphaned(self) -> set[Part]:
        """With the lock held. What was on its way here when its shard left is found while it waits."""
        if self._attended is not None:
            self._left |= {_part_of(one) for one in self._lone} - self._attended
        return self._left

    def _drop(self, address: Address) -> bool:
        """Remove it from the front. Whether it is gone."""
        if not self._claims.take([address]):
            return False
        try:
            self._forget([address])
        except Failed as failed:
            self._count_fault(failed)
            return False
        finally:
            self._claims.release([address])
        return True

    def _begin_looks(self, count: int) -> None:
        """Some copies in turn: those go whose originals others have removed."""
        with self._lock:
            looking = [*itertools.islice(self._originals, count)]
            if not looking:
                self._originals = iter([one for one, _ in self._index.sizes()])
            self._looking.update(looking)
        for address in looking:
            self._submit(self._look_for_original, address, self._threads)

    def _look_for_original(self, address: Address) -> None:
        is_claimed = self._claims.take([address])
        try:
            if is_claimed and address not in self._lone:
                if look_at(self._behind, address.name) is None:
                    self._forget([address])
                self._are_looks_failing = False
        except Failed as failed:
            self._are_looks_failing = True
            self._count_fault(failed, LOOKING)
        finally:
            with self._lock:
                self._looking.discard(address)
                if is_claimed:
                    self._claims.release([address])

    # Removing

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        waiting = [name for name in names if address_of(name) in self._lone]
        found = dict(zip(waiting, self._waiting.look(waiting), strict=True))
        left = [name for name in names if not found.get(name)]
        found.update(zip(left, self._behind.look(left), strict=True))
        return [found[name] for name in names]

    def delete(self, names: Sequence[str]) -> None:
        addresses = [address_of(name) for name in names]
        with self._claims.of(addresses):
            self._behind.delete(names)  # first: if that fails, what is only in front is not lost
            self._forget(addresses)

    def damaged(self, names: Sequence[str]) -> list[bool]:
        """What was read in front says nothing of a file behind, unless that is the same."""
        with self._claims.of([address_of(name) for name in names]):
            return [self._is_left(name) for name in names]

    def _is_left(self, name: str) -> bool:
        address = address_of(name)
        if not self._index.knows(address):
            self._forget([address])
            return self._behind.damaged([name])[0]
        root = self._waiting if address in self._lone else self._copies
        try:
            there, ours = look_at(self._behind, name), look_at(root, name)
            # One that others have put there may be of any size: only if it is like ours it is read.
            is_alike = there is not None and ours is not None and there.bytes == ours.bytes
            is_same = is_alike and _content(root, name) == _content(self._behind, name)
        except Failed as failed:
            self._count_fault(failed)  # nobody can tell: the one behind stays
            self._forget([address])
            return True
        self._forget([address])
        if there is None:
            return False
        return not is_same or self._behind.damaged([name])[0]

    def _forget(self, addresses: Sequence[Address]) -> None:
        """Remove from the front what is there of these, whose claims we hold. Raises Failed."""
        with self._lock:
            for address in addresses:
                self._drop_promotion(address)
            known = [address for address in addresses if self._index.knows(address)]
        if not known:
            return
        self._waiting.delete([address.name for address in known if address in self._lone])
        self._copies.delete([address.name for address in known])
        with self._lock:
            for address in known:
                self._lose(address)

    def purge(self, scope: Scope) -> Removed:
        with self._claims.closed_to(scope):
            with self._lock:
                for address in [one for one in self._promoting if scope.covers(one)]:
                    self._drop_promotion(address)
            lone = self._waiting.purge(scope)
            self._copies.purge(scope)
            with self._lock:
                for address in [one for one, _ in self._index.sizes() if scope.covers(one)]:
                    self._lose(address)
            behind = self._behind.purge(scope)
        return Removed(lone.columns + behind.columns, lone.bytes + behind.bytes)

    # Listing

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        with self._lock:
            before = {address for address, _ in self._index.sizes()}
        for found in self._behind.files(progress):
            before.discard(found.address)
            yield found
        for address in before:  # not there, or not yet when that folder was listed
            if (there := look_at(self, address.name)) or (there := self._forgotten(address)):
                yield Found(address, *there)

    def _forgotten(self, address: Address) -> Seen | None:
        """Others have removed it behind. What can be seen of it if it has come again meanwhile."""
        if self._claims.take([address]):
            try:
                if there := look_at(self, address.name):
                    return there
                self._forget([address])
            finally:
                self._claims.release([address])
        return None

    # Inside. With the lock held:

    def _may_wait(self, tag: bytes, size: int) -> bool:
        """Whether an org would have no more waiting then than nobody's waiting columns leave."""
        if self._writes is Writes.DISPLACED:
            return True  # they make room
        left = self._index.caps.total - self._lone_bytes.total()
        return self._lone_bytes[tag] + size <= left - size

    def _wait(self, address: Address, lone: Lone) -> None:
        """What is to be copied behind makes no room before."""
        self._lone[address] = lone
        if self._writes is not Writes.DISPLACED:
            self._index.begin_read(address)

    def _waits_no_more(self, address: Address) -> None:
        if lone := self._lone.pop(address, None):
            self._free_lone(address.tag, lone.bytes)
            if self._writes is not Writes.DISPLACED:
                self._index.end_read(address)

    def _cancel(self, ticket: Ticket, *, is_waiting: bool) -> None:
        """It has not come."""
        self._index.cancel(ticket)
        if is_waiting:
            self._free_lone(ticket.address.tag, ticket.bytes)

    def _free_lone(self, tag: bytes, size: int) -> None:
        self._lone_bytes[tag] -= size
        if not self._lone_bytes[tag]:
            del self._lone_bytes[tag]

    def _lose(self, address: Address) -> None:
        """Its file is gone from the front."""
        self._index.remove(address)
        self._waits_no_more(address)

    def _drop_promotion(self, address: Address) -> None:
        if (content := self._promoting.pop(address, None)) is not None:
            self._promoting_bytes -= len(content)

    # Without

    def _count_fault(self, failed: Failed, where: str = FRONT) -> None:
        """The log has one of a kind in ten minutes: a store that is full is so for each column."""
        now, kind = time.monotonic(), (where, failed.fault)
        with self._lock:
            self._faults[failed.fault] += 1
            is_new = now - self._said.get(kind, -math.inf) >= SAID_SECONDS
            if is_new:
                self._said[kind] = now
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", where, failed)

    def _submit(
        self, work: Callable[[Address], None], address: Address, pool: ThreadPoolExecutor
    ) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            pool.submit(_logged, work, address)


def _part_of(address: Address) -> Part:
    return address.namespace, address.shard


def give_up(front: Path, behind: Backend, background: Background) -> None:
    """A directory that is no front any more: what waits there is copied behind, and then all of it goes.
    Raises Failed, and then nothing of what waits is lost."""
    waiting = Posix(front / WAITING)
    for found in waiting.files():
        time.sleep(background.book(found.bytes, time.monotonic()) or 0.0)
        _copy(waiting, behind, found.address, found.modified)
    with translated():
        for name in (WAITING, COPIES):
            if (front / name).exists():
                shutil.rmtree(front / name)


def _copy(one: Backend, other: Backend, address: Address, since: float) -> bool:
    """False: there is no such file, or it is half of one. Raises Failed.

    A file of this name and size that is there already stays: it is the same column, and it may be of
    others, while nobody has looked at the content of ours.
    """
    content = _content(one, address.name)
    if content is None or not plausible(len(content)):
        return False
    there = look_at(other, address.name)
    if there is not None and there.bytes == len(content):
        return True
    (stored,) = other.write([Outgoing(address.name, [content], lambda: True, since)])
    if isinstance(stored, Failed):
        raise stored
    return True


def _content(backend: Backend, name: str) -> memoryview | None:
    """Of a whole file; empty if it has no size that a column's file has. Raises Failed."""
    seen = look_at(backend, name)
    if seen is None:
        return None
    if not plausible(seen.bytes):
        return memoryview(b"")
    try:
        content = memoryview(mmap.mmap(-1, seen.bytes))
    except (OSError, OverflowError) as error:
        raise Failed(Fault.OTHER, f"no memory for {seen.bytes} bytes: {error}") from error
    (size,) = backend.read([(name, [content])])
    if isinstance(size, Failed):
        raise size
    return None if size is None else content[:size]


def _first(parts: Sequence[memoryview], size: int) -> memoryview:
    """So many bytes of these, in memory of their own."""
    found = bytearray(size)
    filled = 0
    for part in parts:
        piece = part[: size - filled]
        found[filled : filled + len(piece)] = piece
        filled += len(piece)
    return memoryview(found)


def _logged(work: Callable[[Address], None], address: Address) -> None:
    try:
        work(address)
    except Exception:
        log.exception("The front of tier 2 could not copy %s", address.name)
