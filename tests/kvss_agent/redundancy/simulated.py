"""Holders in memory, that die, stall, lose and damage what they have, as a test wants it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvss_agent.client import Column, Header, Miss, Recalled, TierAnswer, Wanted
from kvss_agent.client.withdrawal import Withdrawal
from kvss_agent.data_plane.wire import ListedColumn
from kvss_agent.redundancy.holder import Evicted, Fragment, Holder, Place
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.tier2.backend import Failed, Fault

Name = tuple[bytes, bytes]  # tag and key


@dataclass
class Stored:
    note: int
    content: bytes
    is_damaged: bool = False


@dataclass
class SimulatedHolder(Holder):
    """As `Holder`, without a connection. `before` is called with the name of each request."""

    address: str
    since: float = 0.0
    files: dict[Name, Stored] = field(default_factory=dict)
    is_alive: bool = True
    is_full: bool = False
    incarnation: bytes = b"first"
    was_listed: bytes = b""
    is_read_only: bool = False
    before: Callable[[str], None] = lambda _: None
    slots: dict[int, tuple[int, Name, bytes]] = field(default_factory=dict)
    number: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    in_use: set[int] = field(default_factory=set)  # slots that a request is about
    used_twice: int = 0  # times that a slot was asked for something while it was in use

    @property
    def is_away(self) -> bool:
        return not self.is_alive

    @property
    def is_known(self) -> bool:
        return self.is_alive and self.was_listed == self.incarnation

    def note_listed(self, incarnation: bytes) -> None:
        self.was_listed = incarnation

    def _asked(self, what: str) -> None:
        self.before(what)
        if not self.is_alive:
            raise Failed(Fault.UNREACHABLE, f"{self.address} is dead")

    def open(self) -> None:
        self._asked("open")

    def close(self) -> None:
        pass

    def evict(self, fragments: Sequence[Fragment]) -> list[Evicted]:
        self._asked("evict")
        evicted = []
        with self._using([one.slot for one in fragments]), self.lock:
            for slot, key, tag, content in fragments:
                self.number += 1
                self.slots[slot] = self.number, (tag, key), bytes(content)
                evicted.append(Evicted(Wanted(slot, Column(key, tag, self.number)), None))
        return evicted

    def spill(self, evicted: Sequence[Evicted], notes: Sequence[int]) -> list[TierAnswer | Miss]:
        self._asked("spill")
        answers: list[TierAnswer | Miss] = []
        for ((slot, column), _), note in zip(evicted, notes, strict=True):
            its_number, name, content = self.slots[slot]
            if (its_number, name) != (column.sequence, (column.tag, column.key)):
                answers.append(Miss.STALE)
            elif name in self.files:
                answers.append(TierAnswer.ALREADY)
            elif self.is_full:
                answers.append(TierAnswer.FULL)
            elif self.is_read_only:
                answers.append(TierAnswer.FAILED)
            else:
                self.files[name] = Stored(note, content)
                answers.append(TierAnswer.DONE)
        return answers

    @contextlib.contextmanager
    def _using(self, slots: Sequence[int]) -> Iterator[None]:
        with self.lock:
            self.used_twice += len(self.in_use.intersection(slots))
            self.in_use.update(slots)
        try:
            yield
        finally:
            with self.lock:
                self.in_use.difference_update(slots)

    def recall(self, places: Sequence[Place]) -> list[Recalled | Miss]:
        with self._using([one.slot for one in places]):
            self._asked("recall")
            return self._recalled(places)

    def _recalled(self, places: Sequence[Place]) -> list[Recalled | Miss]:
        answers: list[Recalled | Miss] = []
        with self.lock:
            for slot, key, tag in places:
                found = self.files.get((tag, key))
                if found is None:
                    answers.append(Miss.ABSENT)
                elif found.is_damaged:
                    del self.files[tag, key]
                    answers.append(Miss.CORRUPT)
                else:
                    self.slots[slot] = self.number, (tag, key), found.content
                    answers.append(Recalled(self.number, found.note))
        return answers

    def refill(
        self,
        places: Sequence[Place],
        numbers: Sequence[int],
        into: Sequence[memoryview],
        withdrawal: Withdrawal,
    ) -> list[Header | Miss]:
        with self._using([one.slot for one in places]):
            self._asked("refill")
            return self._refilled(places, numbers, into, withdrawal)

    def _refilled(
        self,
        places: Sequence[Place],
        numbers: Sequence[int],
        into: Sequence[memoryview],
        withdrawal: Withdrawal,
    ) -> list[Header | Miss]:
        with withdrawal.receiving(lambda: None) as may_write:
            if may_write:
                return self._copied(places, numbers, into)
        return [Miss.LOST for _ in places]

    def _copied(
        self, places: Sequence[Place], numbers: Sequence[int], into: Sequence[memoryview]
    ) -> list[Header | Miss]:
        answers: list[Header | Miss] = []
        for (slot, key, tag), number, place in zip(places, numbers, into, strict=True):
            its_number, name, content = self.slots[slot]
            if name != (tag, key) or its_number != number:
                answers.append(Miss.STALE)
            elif len(content) > len(place):
                answers.append(Miss.CORRUPT)
            else:
                place[: len(content)] = content
                answers.append(Header(1, number, key, tag, 0, len(content)))
        return answers

    def reach(self) -> None:
        self._asked("exists")

    def exists(self, columns: Sequence[Column]) -> list[bool]:
        self._asked("exists")
        return [(one.tag, one.key) in self.files for one in columns]

    def delete(self, columns: Sequence[Column]) -> None:
        self._asked("delete")
        if self.is_read_only:
            raise Failed(Fault.UNREACHABLE, "read-only")
        for one in columns:
            self.files.pop((one.tag, one.key), None)

    def purge(self, tag: bytes) -> tuple[int, int]:
        self._asked("purge")
        if self.is_read_only:
            raise Failed(Fault.UNREACHABLE, "read-only")
        gone = [name for name in self.files if name[0] == tag]
        return len(gone), sum(len(self.files.pop(name).content) for name in gone)

    def listed(self) -> Iterator[ListedColumn]:
        self._asked("list")
        for (tag, key), found in sorted(self.files.items()):
            yield ListedColumn(key, tag, slot_bytes_for(len(found.content)), 0)


class Connected:
    """A holder, as one opening of redundancy has it: nothing is asked of it once that is closed."""

    def __init__(self, to: SimulatedHolder) -> None:
        self._to = to
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._to, name)
        if self._is_closed and callable(found):
            raise Failed(Fault.UNREACHABLE, "redundancy was closed")
        return found


def connected(holders: Sequence[SimulatedHolder]) -> list[Holder]:
    return [cast("Holder", Connected(one)) for one in holders]
