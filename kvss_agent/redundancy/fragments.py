"""Column files as fragments on several agents: see `Backend`.

A fragment's note says how long its file is and which fragments belong together: those that one `write`
has made. Whoever reads takes the fragments with data, and others in place of those that are missing.

A file is stored when `data` of its fragments are; which ones it lacks is remembered, and `repair` makes
them again.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from xxhash import xxh3_64

from kvss_agent.client import Column, Header, Miss, TierAnswer
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.holder import Evicted, Fragment, Holder, Place
from kvss_agent.redundancy.layout import SLOTS, fragment_bytes
from kvss_agent.shard.core import batches
from kvss_agent.tier2.address import Address, Scope, address_of
from kvss_agent.tier2.backend import (
    Failed,
    Fault,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.column_file import PAGE

log = logging.getLogger(__name__)

REPAIR_RETRY_SECONDS: Final = 10.0  # after a repair that failed; twice as long each time, up to
REPAIR_RETRY_SECONDS_MAX: Final = 600.0
FEW: Final = 0.5  # a holder that has fewer than this share of the files has lost them
AT_ONCE: Final = SLOTS // 4  # files of one call that are on their way together
CALLS_AT_ONCE: Final = 4  # to one holder
_BYTES_BITS: Final = (
    32  # of a note, for the bytes of the file; the rest says which fragments belong together
)

T = TypeVar("T")
# By place of the holder.
Answers = dict[int, T | Failed]


@dataclass(eq=False, slots=True)
class _Reading:
    """One file on its way back."""

    address: Address
    slot: int  # that its fragments pass through, at each holder
    note: int | None = None
    there: dict[int, memoryview] = field(default_factory=dict)  # by place
    numbers: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by place: of the recall, and note
    lacks: dict[int, Miss | Failed] = field(default_factory=dict)  # by place: why not
    is_mixed: bool = False  # its fragments are of several writes

    @property
    def place(self) -> Place:
        return Place(self.slot, self.address.key, self.address.tag)

    @property
    def file_bytes(self) -> int:
        return (self.note or 0) & ((1 << _BYTES_BITS) - 1)


@dataclass(slots=True)
class _Lack:
    """The places where a file's fragments are missing, and when to try to repair it again."""

    places: set[int] = field(default_factory=set)
    retry_at: float = 0.0
    wait_seconds: float = REPAIR_RETRY_SECONDS


class Fragments:
    """The fragments of one shard's columns."""

    kind = "fragments"

    def __init__(
        self, code: ErasureCode, holders: Sequence[Holder], namespace: bytes, part: str, slot_bytes: int
    ) -> None:
        """`slot_bytes`: of the shard. The order of the holders is that of the fragments."""
        if len(holders) != code.fragments:
            raise ValueError(f"{code.fragments} fragments need as many holders, not {len(holders)}")
        self._code, self._holders = code, holders
        self._namespace, self._part = namespace, part
        self._file_bytes_max = slot_bytes + PAGE
        self._free = [*range(SLOTS)]
        self._freed = threading.Condition()
        self._threads = [ThreadPoolExecutor(CALLS_AT_ONCE, "fragments") for _ in holders]
        self._parity = threading.local()
        self._lock = threading.Lock()
        self._incomplete: dict[Address, _Lack] = {}
        self._touching: set[int] = set()  # places
        self._listed_once = False
        self._counts: Counter[str] = Counter()

    # What is known

    @property
    def incomplete(self) -> int:
        return len(self._incomplete)

    @property
    def repaired(self) -> int:
        return self._counts["repaired"]

    def unreachable(self) -> list[str]:
        return [holder.address for holder in self._holders if holder.is_away]

    def some_incomplete(self, most: int) -> list[Address]:
        """Those that have waited longest, of those that can be repaired now."""
        with self._lock:
            usable = {place for place, one in enumerate(self._holders) if not one.is_away}
            now = time.monotonic()
            some = (
                address
                for address, lack in self._incomplete.items()
                if lack.places & usable and lack.retry_at <= now
            )
            return list(itertools.islice(some, most))

    def take_restarts(self) -> bool:
        """Whether a holder has been started anew since this was asked last: its disk may be empty."""
        restarted = [one for one in self._holders if one.was_restarted]
        for one in restarted:
            one.was_restarted = False
        return bool(restarted)

    def forget(self, addresses: Sequence[Address]) -> None:
        """These files are not there any more."""
        with self._lock:
            for address in addresses:
                self._incomplete.pop(address, None)

    def properties(self) -> Mapping[str, bool | int]:
        with self._lock:
            return {
                "fragments": self._code.fragments,
                "incomplete": len(self._incomplete),
                "repaired": self._counts["repaired"],
                "read_with_parity": self._counts["read with parity"],
            }

    # Opening

    def open(self) -> None:
        answers = self._each(lambda holder, _: holder.open())
        self._need(answers, self._code.data)

    def tidy(self) -> None:
        """Nothing is left undone: whoever has the budget calls `repair`."""

    def own_faults(self) -> Mapping[str, int]:
        with self._lock:
            return {Fault.UNREACHABLE: self._counts["unreachable"]}

    def close(self) -> None:
        for holder in self._holders:
            holder.close()
        for pool in self._threads:
            pool.shutdown(wait=False, cancel_futures=True)

    # Writing

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        answers: list[bool | Failed] = []
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            found = self._there_already([address_of(file.name) for file in some])
            left = [file for file, answer in zip(some, found, strict=True) if answer is None]
            with self._slots(len(left)) as slots:
                written = iter(self._write(left, slots) if left else [])
            answers += [next(written) if answer is None else answer for answer in found]
        return answers

    def _there_already(self, addresses: Sequence[Address]) -> list[bool | Failed | None]:
        """Of each file: True if another driver of the model has stored it, a failure if nobody can tell,
        and None if it is to be written. So drivers do not replace each other's fragments."""
        columns = [Column(address.key, address.tag, 0) for address in addresses]
        answers = self._each(lambda holder, _: holder.exists(columns))
        failures = [one for one in answers.values() if isinstance(one, Failed)]
        found: list[bool | Failed | None] = []
        for at, address in enumerate(addresses):
            there = {p for p, one in answers.items() if not isinstance(one, Failed) and one[at]}
            if len(there) >= self._code.data:
                if lacking := set(range(self._code.fragments)) - there:
                    self._mark_incomplete(address, lacking)
                found.append(True)
            elif there and len(there) + len(failures) >= self._code.data:
                found.append(failures[0])
            else:  # too few are left of it
                column = [columns[at]]
                self._each(lambda holder, _: holder.delete(column), [*there])  # noqa: B023
                found.append(None)
        return found

    def _write(self, files: Sequence[Outgoing], slots: Sequence[int]) -> list[bool | Failed]:
        addresses = [address_of(file.name) for file in files]
        notes, fragments = [], []
        for number, (file, address, slot) in enumerate(zip(files, addresses, slots, strict=True)):
            size = sum(map(len, file.parts))
            notes.append(_note(file.parts, size))
            its = self._fragments_of(file.parts, size, number)
            fragments.append([Fragment(slot, address.key, address.tag, one) for one in its])
        evicted = self._each(lambda holder, place: holder.evict([its[place] for its in fragments]))
        intact = [place for place, file in enumerate(files) if file.intact()]
        stored = self._each(lambda holder, place: self._spill(holder, place, evicted, notes, intact))
        answers: list[bool | Failed] = [False] * len(files)
        for at, its_place in enumerate(intact):
            its_answers = {
                place: answer if isinstance(answer, Failed) else answer[at]
                for place, answer in stored.items()
            }
            answers[its_place] = self._conclude(addresses[its_place], its_answers)
        return answers

    def _spill(
        self,
        holder: Holder,
        place: int,
        evicted: Answers[list[Evicted]],
        notes: Sequence[int],
        intact: Sequence[int],
    ) -> list[TierAnswer | Miss]:
        its = evicted[place]
        if isinstance(its, Failed):
            raise its
        if not intact:
            return []
        return holder.spill([its[file] for file in intact], [notes[file] for file in intact])

    def _conclude(
        self, address: Address, answers: Mapping[int, TierAnswer | Miss | Failed]
    ) -> bool | Failed:
        """Whether the file is stored, by what each holder says."""
        stored = [place for place, answer in answers.items() if answer is TierAnswer.DONE]
        lacking = set(range(self._code.fragments)).difference(stored)
        if not lacking:
            self.forget([address])
            return True
        others = [place for place, answer in answers.items() if answer is TierAnswer.ALREADY]
        if len(stored) >= self._code.data or len(others) >= self._code.data:
            self._mark_incomplete(address, lacking)  # repair finds out whose fragments are enough
            return True
        column = [Column(address.key, address.tag, 0)]
        self._each(lambda holder, _: holder.delete(column), stored)
        failed = next((one for one in answers.values() if isinstance(one, Failed)), None)
        if failed:
            return failed
        why = next(answer for answer in answers.values() if answer is not TierAnswer.DONE)
        fault = Fault.NO_SPACE if why is TierAnswer.FULL else Fault.OTHER
        sentence = f"only {len(stored)} of {self._code.fragments} agents could store a fragment"
        return Failed(fault, f"{sentence}: {str(why).lower()}")

    def _fragments_of(self, parts: Sequence[memoryview], size: int, number: int) -> list[memoryview]:
        """All fragments of a file. Parity is in memory of this thread, until it asks for as many files
        once more."""
        if size > self._file_bytes_max:
            raise ValueError(f"a file of {size} bytes is larger than the shard's columns")
        step, data = fragment_bytes(size, self._code.data), self._code.data
        its = [_cut(parts, at * step, min(size, (at + 1) * step)) for at in range(data)]
        parity = [memory[: len(its[0])] for memory in self._parity_memory(number)]
        self._code.encode(its, parity)
        return [*its, *parity]

    def _parity_memory(self, number: int) -> list[memoryview]:
        memories: list[list[memoryview]] = self._parity.__dict__.setdefault("memories", [])
        step = fragment_bytes(self._file_bytes_max, self._code.data)
        while len(memories) <= number:
            memories.append([memoryview(bytearray(step)) for _ in range(self._code.parity)])
        return memories[number]

    # Reading

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        answers: list[int | Failed | None] = []
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            with self._slots(len(some)) as slots:
                readings = [
                    _Reading(address_of(name), slot) for (name, _), slot in zip(some, slots, strict=True)
                ]
                targets = {one: parts for one, (_, parts) in zip(readings, some, strict=True)}
                self._gather(readings, targets)
                answers += [self._read_verified(one, targets[one]) for one in readings]
            self._touch([one.address for one in readings if one.note is not None])
        return answers

    def _read_verified(self, reading: _Reading, parts: Sequence[memoryview]) -> int | Failed | None:
        """A fragment that its seal holds for good may be bad none the less, if its holder or the memory
        there is. Then the file is made without each of them in turn."""
        size = self._read(reading, parts)
        if not isinstance(size, int) or size < reading.file_bytes:
            return size
        good: _Reading | None = reading
        if not self._is_good(reading, parts):
            good = self._without_the_bad(reading, parts, lambda one: self._is_good(one, parts))
        if good is None:
            return size  # the column's own seal says what is wrong with it
        if lacking := _its_own_lacks(good):
            self._mark_incomplete(good.address, lacking)
        return min(good.file_bytes, sum(map(len, parts)))

    def _without_the_bad(
        self,
        reading: _Reading,
        parts: Sequence[memoryview] | None,
        is_good: Callable[[_Reading], bool],
    ) -> _Reading | None:
        """The file as it is without one of its fragments: the one that is bad."""
        for place in self._chosen(reading):
            again = _Reading(reading.address, reading.slot)
            again.lacks = {**reading.lacks, place: Miss.CORRUPT}
            self._gather([again], None if parts is None else {again: parts})
            if again.note is None:
                continue
            if parts is not None:
                self._read(again, parts)
            if is_good(again):
                return again
        return None

    @staticmethod
    def _is_good(reading: _Reading, parts: Sequence[memoryview]) -> bool:
        return reading.note == _note(parts, reading.file_bytes)

    def _touch(self, addresses: Sequence[Address]) -> None:
        """Holders displace what nobody has asked for: parity is asked for, too, when a column is read.
        Nobody waits for it, and while one is under way there is no other."""
        columns = [Column(address.key, address.tag, 0) for address in addresses]
        for place in range(self._code.data, self._code.fragments):
            with self._lock:
                if not columns or place in self._touching or self._holders[place].is_away:
                    continue
                self._touching.add(place)
            with contextlib.suppress(RuntimeError):  # it is closed
                self._threads[place].submit(self._touch_at, place, columns)

    def _touch_at(self, place: int, columns: Sequence[Column]) -> None:
        try:
            self._holders[place].exists(columns)
        except Failed as failed:
            self._count(failed)
        finally:
            with self._lock:
                self._touching.discard(place)

    def _read(self, reading: _Reading, parts: Sequence[memoryview]) -> int | Failed | None:
        """Bring the parts into order, with the fragments that are there."""
        if failed := self._why_not(reading):
            return failed
        if reading.note is None:
            return None
        size = min(reading.file_bytes, sum(map(len, parts)))
        step, data = fragment_bytes(reading.file_bytes, self._code.data), self._code.data
        missing = {}
        for place in range(data):
            start, end = place * step, min(reading.file_bytes, (place + 1) * step)
            if place not in reading.there:
                missing[place] = _window(parts, start, end) or memoryview(bytearray(end - start))
        if missing:
            self._code.rebuild(reading.there, missing)
            with self._lock:
                self._counts["read with parity"] += 1
        for place in range(data):
            start, its = place * step, missing.get(place) or reading.there[place]
            if _window(parts, start, start + len(its)) is None:  # else it was read to where it belongs
                _fill(parts, start, its)
        return size

    def _why_not(self, reading: _Reading) -> Failed | None:
        """The failure, where the file may be there and can't be read now."""
        if reading.note is not None:
            return None
        failures = [one for one in reading.lacks.values() if isinstance(one, Failed)]
        absent = len(reading.lacks) - len(failures)
        return failures[0] if failures and self._code.fragments - absent >= self._code.data else None

    def _gather(
        self,
        readings: Sequence[_Reading],
        targets: Mapping[_Reading, Sequence[memoryview]] | None = None,
    ) -> None:
        """Read `data` fragments of each, or fewer where there are not as many. `targets`: where to read
        those with data to, as far as a fragment fits into one piece of it."""
        open_ = [*readings]
        while open_:
            self._recall([one for one in open_ if self._wanted(one)])
            ready = [one for one in open_ if not self._wanted(one)]
            for one in ready:
                self._agree(one)
            self._refill([one for one in ready if one.note is not None], targets or {})
            open_ = [one for one in open_ if not self._is_over(one)]

    def _chosen(self, reading: _Reading) -> list[int]:
        """The places that it is read from: the first that nothing is said against."""
        usable = [place for place in range(self._code.fragments) if place not in reading.lacks]
        return usable[: self._code.data]

    def _wanted(self, reading: _Reading) -> list[int]:
        """The places that have to be asked next."""
        chosen = self._chosen(reading)
        if len(chosen) < self._code.data:
            return []
        if reading.is_mixed:
            chosen = [place for place in range(self._code.fragments) if place not in reading.lacks]
        return [place for place in chosen if place not in reading.numbers]

    def _is_over(self, reading: _Reading) -> bool:
        chosen = self._chosen(reading)
        if len(chosen) < self._code.data:
            reading.note = None
            return True
        return all(place in reading.there for place in chosen)

    def _recall(self, readings: Sequence[_Reading]) -> None:
        asked: dict[int, list[_Reading]] = {}
        for one in readings:
            for place in self._wanted(one):
                asked.setdefault(place, []).append(one)
        answers = self._each(
            lambda holder, place: holder.recall([one.place for one in asked[place]]), [*asked]
        )
        for place, answer in answers.items():
            for at, one in enumerate(asked[place]):
                found = answer if isinstance(answer, Failed) else answer[at]
                if isinstance(found, Miss | Failed):
                    one.lacks[place] = found
                else:
                    one.numbers[place] = found.number, found.note

    def _agree(self, reading: _Reading) -> None:
        """Only fragments of one write make a file. Where there are others, all are looked at before
        those of one write are chosen."""
        usable = [place for place in reading.numbers if place not in reading.lacks]
        notes = Counter(reading.numbers[place][1] for place in usable)
        before, reading.note = reading.note, None
        if len(self._chosen(reading)) < self._code.data:
            return
        if len(notes) > 1 and not reading.is_mixed:
            reading.is_mixed = True
            return
        note = max(notes, key=lambda one: notes[one])
        size = note & ((1 << _BYTES_BITS) - 1)
        for place in usable:
            if reading.numbers[place][1] != note or not 0 < size <= self._file_bytes_max:
                reading.lacks[place] = Miss.STALE
        if note != before:
            reading.there.clear()
        if all(place in reading.numbers for place in self._chosen(reading)):
            reading.note = note

    def _refill(
        self, readings: Sequence[_Reading], targets: Mapping[_Reading, Sequence[memoryview]]
    ) -> None:
        asked: dict[int, list[tuple[_Reading, memoryview]]] = {}
        for one in readings:
            step = fragment_bytes(one.file_bytes, self._code.data)
            for place in self._chosen(one):
                if place in one.there:
                    continue
                start, end = place * step, min(one.file_bytes, (place + 1) * step)
                if place >= self._code.data:
                    start, end = 0, step
                window = None
                if place < self._code.data and one in targets:
                    window = _window(targets[one], start, end)
                into = memoryview(bytearray(end - start)) if window is None else window
                asked.setdefault(place, []).append((one, into))

        def ask(holder: Holder, place: int) -> list[Header | Miss]:
            its = asked[place]
            numbers = [one.numbers[place][0] for one, _ in its]
            return holder.refill([one.place for one, _ in its], numbers, [into for _, into in its])

        for place, answer in self._each(ask, [*asked]).items():
            for at, (one, into) in enumerate(asked[place]):
                found = answer if isinstance(answer, Failed) else answer[at]
                if isinstance(found, Header) and found.length == len(into):
                    one.there[place] = into
                else:
                    one.lacks[place] = Miss.CORRUPT if isinstance(found, Header) else found

    # Looking and removing

    def look(self, name: str) -> Seen | None:
        address = address_of(name)
        column = [Column(address.key, address.tag, 0)]
        answers = self._each(lambda holder, _: holder.exists(column)[0])
        there = sum(answer is True for answer in answers.values())
        if there < self._code.data:
            failures = [answer for answer in answers.values() if isinstance(answer, Failed)]
            if failures and there + len(failures) >= self._code.data:
                raise failures[0]
            return None
        return Seen(self._file_bytes_max // PAGE * PAGE, time.time())

    def delete(self, names: Sequence[str]) -> None:
        addresses = [address_of(name) for name in names]
        columns = [Column(address.key, address.tag, 0) for address in addresses]
        answers = self._each(lambda holder, _: holder.delete(columns))
        self.forget(addresses)
        self._need(answers, self._code.fragments)

    def damaged(self, names: Sequence[str]) -> list[bool]:
        self.delete(names)
        return [False] * len(names)

    def purge(self, scope: Scope) -> Removed:
        if scope.namespace not in (None, self._namespace):
            return Removed(0, 0)
        tags = [scope.tag] if scope.tag else self._tags()
        files = size = 0
        for tag in tags:
            answers = self._each(lambda holder, _: holder.purge(tag))  # noqa: B023
            self._need(answers, self._code.fragments)
            removed = [answer for answer in answers.values() if not isinstance(answer, Failed)]
            files += max(its_files for its_files, _ in removed)
            size += sum(its_bytes for _, its_bytes in removed)
        with self._lock:
            for address in [one for one in self._incomplete if scope.covers(one)]:
                del self._incomplete[address]
        return Removed(files, size)

    def _tags(self) -> list[bytes]:
        """Of all fragments, also of those that make no file. Raises Failed if a holder is away."""
        answers = self._each(lambda holder, _: {one.tag for one in holder.listed()})
        self._need(answers, self._code.fragments)
        return sorted(set().union(*(one for one in answers.values() if not isinstance(one, Failed))))

    # Listing

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        """Those of which enough fragments are there; what they lack is known from then on."""
        progress(0, None)
        away: set[int] = set()
        older: list[list[Column]] = [[] for _ in self._holders]
        listed = [self._listed(place, away, older[place]) for place in range(self._code.fragments)]
        done, missing = 0, dict[int, list[Address]]()
        for (tag, key), group in itertools.groupby(heapq.merge(*listed), lambda one: one[0]):
            places = {place: (size, seconds) for _, place, size, seconds in group}
            if len(places) < self._code.data:
                continue
            done += 1
            progress(done, None)
            address = Address(self._namespace, tag, key, self._part)
            for place in set(range(self._code.fragments)) - places.keys() - away:
                missing.setdefault(place, []).append(address)
            sizes, seconds = zip(*places.values(), strict=True)
            yield Found(address, sum(sizes), min(seconds))
        for place, addresses in missing.items():
            # What a holder displaces now and then is not stored there again, which would displace other
            # fragments in its place.
            if not self._listed_once or len(addresses) > (1 - FEW) * done:
                for address in addresses:
                    self._mark_incomplete(address, {place})
        for place, columns in enumerate(older):
            for some in batches(columns):
                self._holders[place].delete(some)
        if len(away) > self._code.parity:
            raise Failed(Fault.UNREACHABLE, f"{len(away)} of {self._code.fragments} holders are away")
        self._listed_once = True

    def _listed(
        self, place: int, away: set[int], older: list[Column]
    ) -> Iterator[tuple[tuple[bytes, bytes], int, int, int]]:
        """`older`: those that are from before the holder's time."""
        holder = self._holders[place]
        try:
            for key, tag, size, seconds in holder.listed():
                if seconds < int(holder.since):
                    older.append(Column(key, tag, 0))
                else:
                    yield (tag, key), place, size, seconds
        except Failed as failed:
            self._count(failed)
            away.add(place)
            holder.was_not_listed = True

    # Repairing

    def repair(self, names: Sequence[str]) -> int:
        """Make the fragments that these files lack, where holders can be reached, at most AT_ONCE files.
        How many bytes were moved. Nobody else writes or removes these files meanwhile."""
        some = [address_of(name) for name in names[:AT_ONCE]]
        columns = [Column(one.key, one.tag, 0) for one in some]
        answers = self._each(lambda holder, _: holder.exists(columns))
        with self._slots(len(some)) as slots:
            readings = [_Reading(one, slot) for one, slot in zip(some, slots, strict=True)]
            lacking: dict[_Reading, list[int]] = {}
            for at, one in enumerate(readings):
                for place, answer in answers.items():
                    if isinstance(answer, Failed):
                        one.lacks[place] = answer
                    elif not answer[at]:
                        one.lacks[place] = Miss.ABSENT
                lacking[one] = [p for p, why in one.lacks.items() if why is Miss.ABSENT]
            self._gather(readings)
            return sum(self._repair(one, lacking[one]) for one in readings)

    def _repair(self, reading: _Reading, lacking: Sequence[int]) -> int:
        if reading.note is None:
            if self._why_not(reading) is None:
                self.forget([reading.address])  # too little of it is left: there is nothing to mend
            else:
                self._put_off(reading.address)
            return 0
        if self._whole(reading) is None:
            good = self._without_the_bad(reading, None, lambda one: self._whole(one) is not None)
            if good is None:
                self._put_off(reading.address)
                return reading.file_bytes
            reading = good
        places = {*lacking} | {p for p, why in reading.lacks.items() if isinstance(why, Miss)}
        step, size = fragment_bytes(reading.file_bytes, self._code.data), reading.file_bytes
        missing = {}
        for place in places:
            end = min(size, (place + 1) * step) - place * step if place < self._code.data else step
            missing[place] = memoryview(bytearray(end))
        if missing:
            self._code.rebuild(reading.there, missing)
        (slot, key, tag), note = reading.place, reading.note or 0
        stored = set()
        for place, its in missing.items():
            holder = self._holders[place]
            try:
                if reading.lacks.get(place) is not Miss.ABSENT:  # a bad one, or of another write
                    holder.delete([Column(key, tag, 0)])
                evicted = holder.evict([Fragment(slot, key, tag, its)])
                if holder.spill(evicted, [note]) == [TierAnswer.DONE]:
                    stored.add(place)
            except Failed as failed:
                self._count(failed)
        left = places - stored
        left |= {place for place, why in reading.lacks.items() if isinstance(why, Failed)}
        with self._lock:
            self._counts["repaired"] += bool(stored)
        if left:
            self._mark_incomplete(reading.address, left)
            self._put_off(reading.address)
        else:
            self.forget([reading.address])
        return size + sum(map(len, missing.values()))

    def _whole(self, reading: _Reading) -> memoryview | None:
        """The file, if it is what was written."""
        step, data = fragment_bytes(reading.file_bytes, self._code.data), self._code.data
        whole = memoryview(bytearray(reading.file_bytes))
        missing = {}
        for place in range(data):
            window = whole[place * step : (place + 1) * step]
            if place in reading.there:
                window[:] = reading.there[place]
            else:
                missing[place] = window
        if missing:
            self._code.rebuild(reading.there, missing)
        return whole if self._is_good(reading, [whole]) else None

    def _put_off(self, address: Address) -> None:
        """Behind the others: what can't be mended now must not hold them up."""
        with self._lock:
            if lack := self._incomplete.pop(address, None):
                self._incomplete[address] = lack
                lack.retry_at = time.monotonic() + lack.wait_seconds
                lack.wait_seconds = min(2 * lack.wait_seconds, REPAIR_RETRY_SECONDS_MAX)

    # Inside

    @contextmanager
    def _slots(self, count: int) -> Iterator[list[int]]:
        """Slots of the fragment shards, the same ones at each holder."""
        with self._freed:
            self._freed.wait_for(lambda: len(self._free) >= count)
            taken = [self._free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            with self._freed:
                self._free += taken
                self._freed.notify_all()

    def _each(self, call: Callable[[Holder, int], T], places: Sequence[int] | None = None) -> Answers[T]:
        """Ask these holders at once, or all."""

        def ask(place: int) -> T | Failed:
            try:
                return call(self._holders[place], place)
            except Failed as failed:
                self._count(failed)
                return failed

        asked = range(len(self._holders)) if places is None else places
        running: dict[int, Future[T | Failed]] = {}
        try:
            for place in asked:
                running[place] = self._threads[place].submit(ask, place)
        except RuntimeError as error:
            raise Failed(Fault.UNREACHABLE, "redundancy was closed") from error
        finally:
            wait(running.values())  # they read and write the caller's memory
        try:
            return {place: future.result() for place, future in running.items()}
        except CancelledError as error:
            raise Failed(Fault.UNREACHABLE, "redundancy was closed") from error

    def _need(self, answers: Mapping[int, object], least: int) -> None:
        """Raises Failed if fewer have answered."""
        failures = [one for one in answers.values() if isinstance(one, Failed)]
        if len(answers) - len(failures) < least:
            raise failures[0]

    def _count(self, failed: Failed) -> None:
        with self._lock:
            self._counts["unreachable"] += 1
        log.debug("Fragments of %s: %s", self._part, failed)

    def _mark_incomplete(self, address: Address, lacking: set[int]) -> None:
        with self._lock:
            self._incomplete.setdefault(address, _Lack()).places.update(lacking)


def _its_own_lacks(reading: _Reading) -> set[int]:
    """Where it has no good fragment, as far as holders that answer have been asked."""
    return {place for place, why in reading.lacks.items() if isinstance(why, Miss)}


def _note(parts: Sequence[memoryview], size: int) -> int:
    """Of a file's fragments: its length, and a checksum, so that those of two files don't match."""
    sum_, left = xxh3_64(), size
    for part in parts:
        sum_.update(part[:left])
        left -= min(left, len(part))
    return sum_.intdigest() >> _BYTES_BITS << _BYTES_BITS | size


def _window(parts: Sequence[memoryview], start: int, end: int) -> memoryview | None:
    """These bytes of the parts, if they lie in one of them."""
    for part in parts:
        if start >= 0 and end <= len(part):
            return part[start:end]
        start, end = start - len(part), end - len(part)
    return None


def _cut(parts: Sequence[memoryview], start: int, end: int) -> memoryview:
    """These bytes of the parts: as they are, if they lie in one that can be written to."""
    window = _window(parts, start, end)
    if window is not None and not window.readonly:
        return window
    found, filled = memoryview(bytearray(end - start)), 0
    for part in parts:
        piece = part[max(0, start) : max(0, end)]
        found[filled : filled + len(piece)] = piece
        filled += len(piece)
        start, end = start - len(part), end - len(part)
    return found


def _fill(parts: Sequence[memoryview], start: int, content: memoryview) -> None:
    """Copy the content to this place of the parts, as far as they go."""
    at = 0
    for part in parts:
        first = max(0, start - at)
        offset = max(0, at - start)
        count = min(len(part) - first, len(content) - offset)
        if count > 0:
            part[first : first + count] = content[offset : offset + count]
        at += len(part)
