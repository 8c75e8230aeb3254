"""A directory of the agent's own disk in front of a store that others share, or that is far away.

The store behind is the one that counts: what the index of tier 2 knows, its caps and its expiry are
about it. In front lie *copies* of what was written or read last, which are read from there, and what is
*waiting* to be copied behind; each kind has a directory. So a front that is lost costs what was waiting,
and time.

Three ways to write: `through` is done when both have the file; `back` when the front has it, and copies
it behind in the background; `displaced` copies behind what has to make room. What finds no room in
front, or a front that fails, is written behind at once.

A purge waits for what is being copied, and takes away what was about to be: nothing comes back after it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvss_agent.mover import PYTHON, Mover
from kvss_agent.tier2.address import Address, Scope, parse
from kvss_agent.tier2.backend import (
    Backend,
    Failed,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.column_file import PAGE
from kvss_agent.tier2.index import Caps, Index, Ticket
from kvss_agent.tier2.posix import Posix, translated

log = logging.getLogger(__name__)

COPIES: Final = "copies"
WAITING: Final = "waiting"
THREADS: Final = 4  # that copy
PROMOTED_BYTES_MAX: Final = (
    64 << 20
)  # in memory, on their way to the front; what is beyond is not copied
_FRONT, _BEHIND = "front", "behind"


class Writes(StrEnum):
    THROUGH = "through"
    BACK = "back"
    DISPLACED = "displaced"


class Fronted:
    """See `Backend`: one of two levels."""

    def __init__(
        self,
        front: Path,
        behind: Backend,
        cap_bytes: int,
        writes: Writes,
        *,
        durable: bool = False,
        mover: Mover = PYTHON,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.kind = behind.kind
        self._behind = behind
        self._copies = Posix(front / COPIES, mover=mover)
        self._waiting = Posix(front / WAITING, durable=durable, mover=mover)
        self._writes = writes
        self._clock = clock
        self._index = Index(Caps(cap_bytes, cap_bytes))  # what lies in front
        self._since: dict[Address, float] = {}  # what is waiting, and when it was written
        self._copying: set[Address] = set()
        self._promoting: dict[Address, memoryview] = {}
        self._promoting_bytes = 0
        self._purging: list[Scope] = []
        self._changed = threading.Condition()  # and the lock of all that is above
        self._threads = ThreadPoolExecutor(THREADS, "tier2-front")
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def use_mover(self, mover: Mover) -> None:
        """See `Posix`."""
        self._copies.use_mover(mover)
        self._waiting.use_mover(mover)

    def open(self) -> None:
        self._behind.open()
        for root in (self._waiting, self._copies):
            root.open()
        for found in self._waiting.files():
            if self._index.adopt(found.address, found.bytes, written=found.modified, beyond_caps=True):
                self._since[found.address] = found.modified
                self._keep(found.address)
        for found in self._copies.files():
            self._index.adopt(found.address, found.bytes, written=found.modified, beyond_caps=True)
        with self._changed:
            excess = self._leaving(self._index.trim())
        for address in excess:
            is_gone = self._displace([address])
            (self._index.finish_removal if is_gone else self._index.cancel_removal)(address)
        self.tidy()

    def properties(self) -> Mapping[str, bool | int]:
        with self._changed:
            return {
                **self._behind.properties(),
                "front_columns": self._index.columns,
                "front_bytes": self._index.held,
                "front_cap_bytes": self._index.caps.total,
                "front_waiting": len(self._since),
                "front_direct_io": bool(self._copies.properties()["direct_io"]),
                "read_front": self._counts[f"read {_FRONT}"],
                "read_behind": self._counts[f"read {_BEHIND}"],
                "copied_behind": self._counts["copied behind"],
                "promoted": self._counts["promoted"],
            }

    def own_faults(self) -> Mapping[str, int]:
        with self._changed:
            return dict(self._faults)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for one in (self._waiting, self._copies, self._behind):
            one.close()

    # Writing

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        try:
            self._forget([_address(file.name) for file in files])  # an earlier copy, if there is one
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
            found |= zip(left, self._behind.write([files[place] for place in left]), strict=True)
        return [found[place] for place in range(len(files))]

    def _put(self, root: Posix, files: Sequence[Outgoing]) -> dict[int, bool | Failed]:
        """Write these in front: by place whether it was intact. Those are left out for which there is
        no room, or which the disk did not take."""
        tickets = {place: one for place, file in enumerate(files) if (one := self._room(file))}
        written = root.write([files[place] for place in tickets]) if tickets else []
        answers: dict[int, bool | Failed] = {}
        now = self._clock()
        for (place, ticket), answer in zip(tickets.items(), written, strict=True):
            if isinstance(answer, Failed):
                self._count_fault(answer)
            else:
                answers[place] = answer
            with self._changed:
                if answer is not True:
                    self._index.cancel(ticket)
                    continue
                self._index.commit(ticket, now)
                if root is self._waiting:
                    self._since[ticket.address] = now
                    self._keep(ticket.address)
            if root is self._waiting and self._writes is Writes.BACK:
                self._submit(self._flush, ticket.address)
        return answers

    def _room(self, file: Outgoing) -> Ticket | None:
        """For this file in front, where it is not yet."""
        address = _address(file.name)
        with self._changed:
            if self._is_purging(address) or self._index.knows(address) or self._index.is_busy(address):
                return None
            ticket = self._index.reserve(address, sum(len(part) for part in file.parts))
            victims = self._leaving(ticket.victims) if ticket else []
        if ticket is None:
            return None
        is_free = self._displace(victims)
        with self._changed:
            if is_free and self._index.start(ticket):
                return ticket
            self._index.cancel(ticket)
            return None

    def _leaving(self, victims: Iterable[Address]) -> list[Address]:
        """With the lock held: who deletes or purges these waits from now on until they have left."""
        leaving = list(victims)
        self._copying.update(leaving)
        return leaving

    def _displace(self, victims: Sequence[Address]) -> bool:
        """Remove from the front what is `_leaving`; what is nowhere else is copied behind first. Whether
        all have left."""
        have_left = [self._has_left(address) for address in victims]  # of each, whatever the others do
        return all(have_left)

    def _has_left(self, address: Address) -> bool:
        since = self._since.get(address)
        try:
            if since is not None:
                self._copy_behind(address, since)
                self._waiting.delete([address.name])
            self._copies.delete([address.name])
            with self._changed:
                self._since.pop(address, None)
        except Failed as failed:
            self._count_fault(failed)
            return False
        finally:
            with self._changed:
                self._copying.discard(address)
                self._changed.notify_all()
        return True

    # Reading

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        answers: list[int | Failed | None] = [None] * len(files)
        there: dict[int, bool] = {}  # by place: whether it is waiting
        with self._changed:
            for place, (name, _) in enumerate(files):
                address = _address(name)
                if self._index.knows(address) or address in self._since:
                    self._index.touch(address)
                    there[place] = address in self._since
        for root, kind in ((self._waiting, True), (self._copies, False)):
            places = [place for place, is_waiting in there.items() if is_waiting is kind]
            if places:
                for place, answer in zip(places, root.read([files[p] for p in places]), strict=True):
                    answers[place] = answer
                    if isinstance(answer, Failed):
                        self._count_fault(answer)
        left = [place for place, answer in enumerate(answers) if not isinstance(answer, int)]
        with self._changed:
            self._counts[f"read {_FRONT}"] += len(files) - len(left)
        if left:
            self._read_behind(files, left, answers)
        return answers

    def _read_behind(
        self, files: Sequence[Incoming], places: Sequence[int], answers: list[int | Failed | None]
    ) -> None:
        for place, answer in zip(places, self._behind.read([files[p] for p in places]), strict=True):
            if not answer and isinstance(answers[place], Failed):
                continue  # it is in front alone, where it cannot be read now
            answers[place] = answer
            if isinstance(answer, int):
                self._promote(*files[place], answer)

    def _promote(self, name: str, parts: Sequence[memoryview], size: int) -> None:
        """Copy to the front what has been read from behind, as long as it lies here as it was read."""
        address = _address(name)
        with self._changed:
            self._counts[f"read {_BEHIND}"] += 1
            if (
                self._promoting_bytes + size > PROMOTED_BYTES_MAX
                or size % PAGE
                or size > self._index.caps.total
                or address in self._promoting
                or self._index.knows(address)
                or self._is_purging(address)
            ):
                return
            self._promoting_bytes += size
            self._promoting[address] = memoryview(b"".join(parts))[:size]
        self._submit(self._put_promoted, address)

    def _put_promoted(self, address: Address) -> None:
        with self._changed:
            content = self._promoting.get(address)
            if content is None:
                return  # it was purged or deleted meanwhile
            self._copying.add(address)
        try:
            stored = self._put(self._copies, [Outgoing(address.name, [content], lambda: True)])
        finally:
            with self._changed:
                self._counts["promoted"] += bool(stored)
                self._copying.discard(address)
                self._drop_promotion(address)
                self._changed.notify_all()

    # Copying behind

    def tidy(self) -> None:
        """Try again what could not be copied behind."""
        if self._writes is not Writes.DISPLACED:
            with self._changed:
                left = [address for address in self._since if address not in self._copying]
            for address in left:
                self._submit(self._flush, address)
        self._behind.tidy()

    def _flush(self, address: Address) -> None:
        with self._changed:
            since = self._since.get(address)
            if since is None or address in self._copying or self._is_purging(address):
                return
            self._copying.add(address)
        is_behind = False
        try:
            self._copy_behind(address, since)
            self._waiting.hand_over(address.name, self._copies)
            is_behind = True
        except Failed as failed:
            self._count_fault(failed)
        finally:
            with self._changed:
                self._copying.discard(address)
                if is_behind:
                    del self._since[address]
                    self._index.end_read(address)
                self._changed.notify_all()

    def _copy_behind(self, address: Address, since: float) -> None:
        """Raises Failed."""
        _copy(self._waiting, self._behind, address, since)
        with self._changed:
            self._counts["copied behind"] += 1

    # Removing

    def look(self, name: str) -> Seen | None:
        address = _address(name)
        with self._changed:
            is_waiting = address in self._since
        if is_waiting and (seen := self._waiting.look(name)):
            return seen
        return self._behind.look(name)

    def delete(self, names: Sequence[str]) -> None:
        self._forget([_address(name) for name in names])
        self._behind.delete(names)

    def damaged(self, names: Sequence[str]) -> list[bool]:
        """It may be a copy in front: then that goes, and the file behind is read next."""
        elsewhere = {name for name in names if self._is_only_in_front(name)}
        self._forget([_address(name) for name in names])
        left = [name for name in names if name not in elsewhere]
        answers = dict(zip(left, self._behind.damaged(left), strict=True))
        return [name in elsewhere or answers[name] for name in names]

    def _is_only_in_front(self, name: str) -> bool:
        """Whether there is a file behind that differs from the damaged copy here."""
        address = _address(name)
        with self._changed:
            if address in self._since or not self._index.knows(address):
                return False
        copies = [_content(root, name) for root in (self._copies, self._behind)]
        return copies[1] is not None and copies[0] != copies[1]

    def _forget(self, addresses: Sequence[Address]) -> None:
        """Remove from the front what is there of these, once nobody copies it. Raises Failed."""
        with self._changed:
            for address in addresses:
                self._drop_promotion(address)
            self._changed.wait_for(lambda: not self._copying.intersection(addresses))
            known = [address for address in addresses if self._index.knows(address)]
            waiting = [address for address in known if address in self._since]
        if not known:
            return
        self._waiting.delete([address.name for address in waiting])
        self._copies.delete([address.name for address in known])
        with self._changed:
            for address in known:
                self._lose(address)

    def purge(self, scope: Scope) -> Removed:
        with self._closed_to(scope):
            lone = self._waiting.purge(scope)
            self._copies.purge(scope)
            with self._changed:
                for address in [one for one, _ in self._index.sizes() if scope.covers(one)]:
                    self._lose(address)
            behind = self._behind.purge(scope)
        return Removed(lone.columns + behind.columns, lone.bytes + behind.bytes)

    @contextlib.contextmanager
    def _closed_to(self, scope: Scope) -> Iterator[None]:
        with self._changed:
            self._purging.append(scope)
            for address in [one for one in self._promoting if scope.covers(one)]:
                self._drop_promotion(address)
            self._changed.wait_for(lambda: not any(map(scope.covers, self._copying)))
        try:
            yield
        finally:
            with self._changed:
                self._purging.remove(scope)

    # Listing

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        with self._changed:
            before = {address for address, _ in self._index.sizes()}
        seen = set()
        for found in self._behind.files(progress):
            if found.address in before:
                seen.add(found.address)
            yield found
        with self._changed:
            lone = [address for address in before - seen if address in self._since]
            gone = [address for address in before - seen if address not in self._since]
        for address in lone:
            if there := self._waiting.look(address.name):
                yield Found(address, *there)
        self._forget(gone)  # others have removed them behind

    # Inside. With the lock held:

    def _keep(self, address: Address) -> None:
        """What is to be copied behind makes no room before."""
        if self._writes is not Writes.DISPLACED:
            self._index.begin_read(address)

    def _lose(self, address: Address) -> None:
        """Its file is gone from the front."""
        self._index.remove(address)
        if self._since.pop(address, None) is not None and self._writes is not Writes.DISPLACED:
            self._index.end_read(address)

    def _drop_promotion(self, address: Address) -> None:
        content = self._promoting.pop(address, None)
        self._promoting_bytes -= len(content or b"")

    def _is_purging(self, address: Address) -> bool:
        return any(scope.covers(address) for scope in self._purging)

    def _count_fault(self, failed: Failed) -> None:
        with self._changed:
            self._faults[failed.fault] += 1
        log.warning("The front of tier 2: %s", failed)

    def _submit(self, work: Callable[[Address], None], address: Address) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self._threads.submit(_logged, work, address)


def give_up(front: Path, behind: Backend) -> None:
    """A directory that is no front any more: what waits there is copied behind, and then all of it goes.
    Raises Failed, and then nothing of what waits is lost."""
    waiting = Posix(front / WAITING)
    for found in waiting.files():
        _copy(waiting, behind, found.address, found.modified)
    with translated():
        for name in (WAITING, COPIES):
            if (front / name).exists():
                shutil.rmtree(front / name)


def _copy(one: Backend, other: Backend, address: Address, since: float) -> None:
    """Raises Failed. A file that is not there any more is not missed: its reader will see."""
    content = _content(one, address.name)
    if content is not None:
        (stored,) = other.write([Outgoing(address.name, [content], lambda: True, since)])
        if isinstance(stored, Failed):
            raise stored


def _content(backend: Backend, name: str) -> memoryview | None:
    """Of a whole file. Raises Failed."""
    seen = backend.look(name)
    if seen is None:
        return None
    content = memoryview(mmap.mmap(-1, -(-max(1, seen.bytes) // PAGE) * PAGE))
    (size,) = backend.read([(name, [content])])
    if isinstance(size, Failed):
        raise size
    return None if size is None else content[:size]


def _address(name: str) -> Address:
    address = parse(name)
    if address is None:
        raise ValueError(f"{name} is no name of a column")
    return address


def _logged(work: Callable[[Address], None], address: Address) -> None:
    try:
        work(address)
    except Exception:
        log.exception("The front of tier 2 could not copy %s", address.name)
