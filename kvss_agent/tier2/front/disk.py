"""The directories of a front: files come, make room for others, and are removed."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from kvss_agent.limits.background import Background
from kvss_agent.mover import Mover
from kvss_agent.tier2.address import Address, address_of
from kvss_agent.tier2.backend import Backend, Failed, Fault, Outgoing
from kvss_agent.tier2.claims import Claims
from kvss_agent.tier2.front.contents import Contents
from kvss_agent.tier2.front.faults import BEHIND, FRONT, Faults
from kvss_agent.tier2.front.transfers import copy
from kvss_agent.tier2.index import Ticket
from kvss_agent.tier2.posix import Posix, translated

# Its directories.
COPIES: Final = "copies"
WAITING: Final = "waiting"

BOOKED_SECONDS_MAX: Final = 0.1  # of others' bytes, beside which a spill is written behind at once


class FrontDisk:
    """`lock` is that of the claims, and of `contents` and `counts`."""

    def __init__(
        self,
        front: Path,
        behind: Backend,
        contents: Contents,
        *,
        durable: bool,
        mover: Mover,
        clock: Callable[[], float],
        background: Background,
    ) -> None:
        self.copies = Posix(front / COPIES, mover=mover)
        self.waiting = Posix(front / WAITING, durable=durable, mover=mover)
        self.contents = contents
        self.background = background
        self.claims = Claims()
        self.lock = self.claims.changed
        self.faults = Faults(self.lock)
        self.counts: Counter[str] = Counter()
        self._behind = behind
        self._clock = clock
        self._has_strays = False  # copies that could not be listed when it was opened

    def use_mover(self, mover: Mover) -> None:
        """See `Posix`."""
        self.copies.use_mover(mover)
        self.waiting.use_mover(mover)

    def open(self) -> None:
        """What waits has to be listed. Raises Failed. Nothing else has to be there."""
        try:
            self.waiting.open()
        except Failed as failed:
            if failed.fault is not Fault.NO_SPACE:
                raise
            self.faults.note(failed)  # there is no such directory, so nothing waits in it
        self._adopt(self.waiting)
        try:
            self.copies.open()
            self._adopt(self.copies)
        except Failed as failed:
            self.faults.note(failed)
            self._has_strays = True

    def _adopt(self, root: Posix) -> None:
        for found in sorted(root.files(), key=lambda one: one.modified):
            with self.lock:
                self.contents.adopt(found, waits=root is self.waiting)

    def mend(self) -> None:
        """Do what the front's disk did not when this was opened. Copies that were not listed then go:
        nobody knows what has become of their originals since. Raises Failed."""
        self.waiting.tidy()
        self.copies.tidy()
        if self._has_strays:
            for found in self.copies.files():
                if self.claims.take([found.address]):
                    try:
                        if not self.contents.index.knows(found.address):
                            self.copies.delete([found.address.name])
                    finally:
                        self.claims.release([found.address])
            self._has_strays = False

    # Coming

    def put(self, files: Sequence[Outgoing], *, waits: bool) -> dict[int, bool | Failed]:
        """Write these in front, whose claims the caller holds: by place whether it was intact. Those are
        left out for which there is no room, or which the disk did not take."""
        root = self.waiting if waits else self.copies
        answers: dict[int, bool | Failed] = {}
        tickets: dict[int, Ticket] = {}
        try:
            for place, file in enumerate(files):
                if ticket := self._room(file, waits=waits):
                    tickets[place] = ticket
            written = root.write([files[place] for place in tickets]) if tickets else []
            for place, answer in zip([*tickets], written, strict=True):
                if isinstance(answer, Failed):
                    self.faults.note(answer)
                    continue
                answers[place] = answer
                if answer:
                    with self.lock:
                        self.contents.commit(tickets.pop(place), self._clock(), waits=waits)
        finally:
            with self.lock:
                for ticket in tickets.values():
                    self.contents.cancel(ticket, waits=waits)
        return answers

    def _room(self, file: Outgoing, *, waits: bool) -> Ticket | None:
        """For this file in front, where it is not."""
        address, size = address_of(file.name), sum(len(part) for part in file.parts)
        with self.lock:
            ticket = self.contents.reserve(address, size, waits=waits)
            if ticket is None:
                return None
            if not self.claims.take(ticket.victims):  # one is being deleted, purged or looked for
                self.contents.cancel(ticket, waits=waits)
                return None
        victims = [*ticket.victims]
        left: set[Address] = set()
        is_free = False
        try:
            left.update(address for address in victims if self._has_left(address))
        finally:
            with self.lock:
                self._conclude(victims, left)
                ticket.victims.clear()
                is_free = len(left) == len(victims) and self.contents.index.start(ticket)
                if not is_free:
                    self.contents.cancel(ticket, waits=waits)
        return ticket if is_free else None

    def has_budget(self, size: int) -> bool:
        """Without resting. If so, others rest for these bytes."""
        return self.background.book(size, time.monotonic(), BOOKED_SECONDS_MAX) is not None

    def copy_behind(self, address: Address, since: float) -> bool:
        """False: there is nothing that could be copied. Raises Failed."""
        is_there = copy(self.waiting, self._behind, address, since)
        with self.lock:
            self.counts["copied behind"] += is_there
        return is_there

    # Leaving

    def trim(self) -> None:
        """A cap was lowered, or what waited lies in front beyond it."""
        with self.lock:
            victims = [*self.contents.index.trim()]
            free = [address for address in victims if self.claims.take([address])]
            for address in victims:
                if address not in free:
                    self.contents.index.cancel_removal(address)
        left: set[Address] = set()
        try:
            left.update(address for address in free if self._has_left(address))
        finally:
            with self.lock:
                self._conclude(free, left)

    def _has_left(self, address: Address) -> bool:
        """Remove from the front what we have claimed; what is nowhere else is copied behind first."""
        lone = self.contents.lone.get(address)
        try:
            if lone is not None:
                if not self.has_budget(lone.bytes):
                    return False
                self.copy_behind(address, lone.since)
                self.waiting.delete([address.name])
            self.copies.delete([address.name])
        except Failed as failed:
            self.faults.note(failed, BEHIND if lone is not None else FRONT)
            return False
        return True

    def _conclude(self, victims: Collection[Address], left: set[Address]) -> None:
        """With the lock held: their removal was begun, and these have left."""
        for address in victims:
            self.contents.conclude(address, has_left=address in left)
        self.claims.release(victims)

    def forget(self, addresses: Sequence[Address]) -> None:
        """Remove what is here of these, whose claims the caller holds. Raises Failed."""
        with self.lock:
            for address in addresses:
                self.contents.drop_promotion(address)
            known = [address for address in addresses if self.contents.index.knows(address)]
        if not known:
            return
        self.waiting.delete([address.name for address in known if address in self.contents.lone])
        self.copies.delete([address.name for address in known])
        with self.lock:
            for address in known:
                self.contents.lose(address)

    def drop(self, address: Address) -> bool:
        """Remove it from the front. Whether it is gone."""
        if not self.claims.take([address]):
            return False
        try:
            self.forget([address])
        except Failed as failed:
            self.faults.note(failed)
            return False
        finally:
            self.claims.release([address])
        return True


def give_up(front: Path, behind: Backend, background: Background) -> None:
    """A directory that is no front any more: what waits there is copied behind, and then all of it goes.
    Raises Failed, and then nothing of what waits is lost."""
    waiting = Posix(front / WAITING)
    for found in waiting.files():
        time.sleep(background.book(found.bytes, time.monotonic()) or 0.0)
        copy(waiting, behind, found.address, found.modified)
    with translated():
        for name in (WAITING, COPIES):
            if (front / name).exists():
                shutil.rmtree(front / name)
