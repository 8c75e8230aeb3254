"""The second tier of an agent: columns go from slots to files and back.

All decisions are the index's and are taken on the event loop, one at a time; threads only move bytes.
Whatever goes wrong with a file, a disk or a service is an answer with a reason, counted by that reason.

**Sharing.** Several agents may use one directory or bucket. What the others wrote is found when it is
asked for (`shared`), and read from then on as if it were ours. Each agent's caps bound what that agent
wrote, adopted or found at its start; it adopts only what fits. A column that another agent removed
is absent when it is recalled.

**Purging.** From the call on, nothing of the scope is served or accepted. What was on its way before is
waited for and removed with the rest. So after the receipt nothing comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeVar

from kvss_agent.mover import PYTHON, Mover, zero
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import (
    Backend,
    Failed,
    Fault,
    Found,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.column_file import CLEAR, PAGE, Form, plausible
from kvss_agent.tier2.index import Caps, Index, Limits, Ticket

THREADS_MAX: Final = 256
IN_FLIGHT_MAX: Final = 4096  # spills and recalls; more are refused
HIT: Final = "hit"
RUN_BYTES: Final = 1 << 20  # of slots that a thread takes at a time
_EXPIRE_AT_ONCE: Final = 1000
_STEP: Final = 10_000  # columns that a rebuild enters before others have their turn
_DAMAGE: Final = (Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)
_T = TypeVar("_T")
_Item = TypeVar("_Item", "_Spill", "_Recall")


class Outcome(StrEnum):
    """What has become of a spill. A Miss says that the slot did not hold the column, or REFUSED."""

    STORED = "stored"
    ALREADY = "already"  # the column is there
    FULL = "full"  # no room under the org's cap or the store's, nor anything that could be evicted
    FAILED = "failed"  # the backend's fault, see the count of faults


@dataclass(frozen=True, slots=True)
class Receipt:
    """The purge is done: of what the scope held, nothing is left."""

    columns: int
    bytes: int
    finished_at: float  # seconds since 1970


@dataclass(slots=True)
class Work:
    """What was done of one kind since the start."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    seconds_max: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Plain numbers at one moment. Counts are since the start, by reason."""

    columns: int
    bytes: int  # held by files, or promised to writers
    cap_bytes: int
    orgs: Mapping[str, tuple[int, int]]  # by tag in hex: bytes held, cap
    in_flight: int
    properties: Mapping[str, bool | int]
    spills: Mapping[str, int]  # by Outcome or Miss
    recalls: Mapping[str, int]  # HIT, or by Miss
    faults: Mapping[str, int]  # by Fault
    last_fault: str
    evicted: Removed
    damaged: int  # files removed because their seal did not hold
    expired: int
    overstay_seconds_max: float  # how long one of those lay here beyond its time
    work: Mapping[str, Work]  # by the method's name


@dataclass(frozen=True, slots=True)
class Difference:
    """How files and index differ. Between agents that share a store, they may."""

    missing: tuple[Address, ...]  # known, but there is no such file
    unknown: tuple[Address, ...]  # a file that is not known
    resized: tuple[Address, ...]  # known with another size


@dataclass(eq=False, slots=True)
class _Spill:
    """One column of a batch on its way out, and what has become of it."""

    address: Address
    slot: memoryview
    expected: Column
    note: int
    form: Form
    outcome: Outcome | Miss | None = None
    failed: Failed | None = None
    ticket: Ticket | None = None
    header: Header | None = None  # what the slot held when the ticket was given


@dataclass(eq=False, slots=True)
class _Recall:
    """One column of a batch on its way back, and what was found."""

    address: Address
    slot: memoryview
    sequence: int
    form: Form
    found: Header | Miss | None = None
    failed: Failed | None = None


@dataclass(slots=True)
class _Counts:
    spills: Counter[str] = field(default_factory=Counter)
    recalls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    last_fault: str = ""
    evicted_columns: int = 0
    evicted_bytes: int = 0
    damaged: int = 0
    expired: int = 0
    overstay_max: float = 0.0
    work: dict[str, Work] = field(default_factory=dict)


class Tier2:
    """One store. Its methods belong to one event loop."""

    def __init__(
        self,
        backend: Backend,
        caps: Caps,
        *,
        shared: bool = True,
        threads: int = 8,
        mover: Mover = PYTHON,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` tells seconds since 1970, as files do."""
        if not 0 < threads <= THREADS_MAX:
            raise ValueError(f"tier 2 uses 1 to {THREADS_MAX} threads, not {threads}")
        self._backend = backend
        self._index = Index(caps)
        self._shared = shared
        self.use_mover(mover)
        self._threads = threads
        self._clock = clock
        self.limits = Limits()
        self.live: Collection[bytes] | None = None  # tags that are somebody's; None: nobody has said so
        # Recalls, which somebody waits for, do not queue behind spills, which nobody does.
        self._reads = ThreadPoolExecutor(threads, "tier2-read")
        self._writes = ThreadPoolExecutor(threads, "tier2-write")
        self._counts = _Counts()
        self._purging: list[Scope] = []
        self._in_flight = 0
        self._is_closing = False
        self._change = asyncio.Event()

    def use_mover(self, mover: Mover) -> None:
        """Check columns with this mover from now on."""
        self._mover, self._verify = mover, seal.verifier(mover)

    # Start and end

    async def open(self, progress: Progress = ignore_progress) -> None:
        """Learn what is there. Raises Failed if the backend cannot be used; may be tried again."""
        await self._run(self._writes, self._backend.open)
        await self.rebuild(progress)

    async def rebuild(self, progress: Progress = ignore_progress) -> None:
        """Bring the index in line with the files, and then the files under the caps.

        At the start this is where the index comes from. Later it finds what other agents wrote and
        removed; spills and recalls go on meanwhile. Half-written files are removed. Raises Failed.
        """
        with self._measured("rebuild"):
            await self._uninterrupted(self._rebuild(progress))

    async def close(self) -> None:
        """Wait for what is under way, then let go of everything."""
        self._is_closing = True
        await self._until(lambda: not self._in_flight)
        self._reads.shutdown()
        self._writes.shutdown()
        self._backend.close()

    # Columns

    async def exists(self, addresses: Sequence[Address]) -> list[bool]:
        """Which of these can be recalled, as far as one can know; they are evicted later for it.

        A backend that does not answer has nothing.
        """
        with self._measured("exists"):
            for address in addresses:
                self._index.touch(address)
            there = {a for a in addresses if self._index.knows(a) and not self._is_closed(a)}
            unknown = [a for a in dict.fromkeys(addresses) if self._may_be_elsewhere(a)]
            if unknown:
                there |= await self._uninterrupted(self._adopt(unknown))
            return [address in there for address in addresses]

    async def spill(
        self, address: Address, slot: memoryview, expected: Column, note: int = 0, form: Form = CLEAR
    ) -> Outcome | Miss:
        """`spill_many` of one."""
        (outcome,) = await self.spill_many([(address, slot, expected, note)], form)
        return outcome

    async def spill_many(
        self, items: Sequence[tuple[Address, memoryview, Column, int]], form: Form = CLEAR
    ) -> list[Outcome | Miss]:
        """Store what each slot holds, if it is what was expected, and tell what has become of it.

        The number is a note of the driver's: whoever recalls the column gets it back, in the same form.

        A slot lies at a page's boundary and is only read. It should not change meanwhile: if it does,
        nothing is stored. Each column has an outcome of its own; what is there twice is stored once.
        Cancelling waits until no slot is read any more.
        """
        for address, slot, expected, _ in items:
            _check_slot(slot)
            if (expected.key, expected.tag) != (address.key, address.tag):
                raise ValueError("a column is stored under its own key and tag")
        with self._measured("spill", len(items)) as work:
            taken = items[: self._room_in_flight()]
            spills = [_Spill(*item, form) for item in taken]
            if spills:
                await self._uninterrupted(self._spill(spills, work), len(spills))
            outcomes = [spill.outcome or Miss.LOST for spill in spills]
            outcomes += [Miss.REFUSED] * (len(items) - len(taken))
            self._counts.spills.update(outcomes)
            return outcomes

    async def recall(
        self, address: Address, slot: memoryview, sequence: int, form: Form = CLEAR
    ) -> Header | Miss:
        """`recall_many` of one."""
        (found,) = await self.recall_many([(address, slot, sequence)], form)
        return found

    async def recall_many(
        self, items: Sequence[tuple[Address, memoryview, int]], form: Form = CLEAR
    ) -> list[Header | Miss]:
        """Bring columns back into these slots, sealed as the evicts of these numbers, or say why not.

        The headers are those of the files: where a slot has the evict's number, they have the note.

        A slot lies at a page's boundary and is writable; nobody else writes to it. Readers find it
        torn meanwhile, and absent after a miss. A file that is not what its name says is removed.
        Cancelling waits until no slot is written any more, and clears them all.
        """
        for _, slot, _ in items:
            _check_slot(slot)
        with self._measured("recall", len(items)) as work:
            for _, slot, sequence in items:
                seal.open_slot(slot, sequence)
            taken = items[: self._room_in_flight()]
            recalls = [_Recall(*item, form) for item in taken]
            try:
                if recalls:
                    await self._uninterrupted(self._recall(recalls, work), len(recalls))
            except asyncio.CancelledError:
                for _, slot, sequence in items:
                    seal.clear(slot, sequence, scrub=False)
                raise
            found = [recall.found or Miss.LOST for recall in recalls]
            found += [Miss.REFUSED] * (len(items) - len(taken))
            for (_, slot, sequence), one in zip(items, found, strict=True):
                if isinstance(one, Miss):
                    seal.clear(slot, sequence, scrub=False)
            self._counts.recalls.update(one if isinstance(one, Miss) else HIT for one in found)
            return found

    async def delete(self, addresses: Sequence[Address]) -> Removed:
        """Remove these columns, once nobody reads or writes them. Raises Failed: some may be left."""
        with self._measured("delete") as work:
            removed = await self._uninterrupted(self._delete(list(dict.fromkeys(addresses))))
            work.bytes += removed.bytes
            return removed

    async def purge(self, *, tag: bytes | None = None, namespace: bytes | None = None) -> Receipt:
        """Remove all of a tag, of a namespace, or of a tag in a namespace; also what nobody knows of.

        Raises Failed, and then there is no receipt: it has to be repeated.
        """
        with self._measured("purge") as work:
            removed = await self._uninterrupted(self._purge(Scope(tag, namespace)))
            work.bytes += removed.bytes
            return Receipt(removed.columns, removed.bytes, time.time())

    # Running it

    async def set_caps(self, caps: Caps) -> None:
        """Other caps from now on. Returns when files have been evicted down to them; raises Failed."""
        self._index.set_caps(caps)
        with self._measured("set_caps"):
            await self._uninterrupted(self._trim_all())

    async def sweep(self) -> int:
        """Remove what carries a tag that is nobody's; how many columns. Raises Failed."""
        if self.live is None:
            return 0
        count = 0
        for tag in [tag for tag in self._index.tags() if tag not in self.live]:
            count += (await self.purge(tag=tag)).columns
        return count

    async def expire(self) -> int:
        """Remove what lies here for longer than its org allows; how many columns that were. Raises
        Failed. Ends as soon as the store is being closed, which would else wait for all of it."""
        count = 0
        while not self._is_closing:
            expired = self._index.expire(self.limits, self._clock(), _EXPIRE_AT_ONCE)
            if not expired:
                break
            with self._measured("expire", len(expired)):
                await self._uninterrupted(self._remove_leaving(list(expired)))
            count += len(expired)
            self._counts.expired += len(expired)
            self._counts.overstay_max = max(self._counts.overstay_max, *expired.values())
        return count

    def stats(self) -> Stats:
        counts = self._counts
        return Stats(
            columns=self._index.columns,
            bytes=self._index.held,
            cap_bytes=self._index.caps.total,
            orgs={tag.hex(): held_and_cap for tag, held_and_cap in self._index.orgs().items()},
            in_flight=self._in_flight,
            properties=self._backend.properties(),
            spills=dict(counts.spills),
            recalls=dict(counts.recalls),
            faults=dict(counts.faults),
            last_fault=counts.last_fault,
            evicted=Removed(counts.evicted_columns, counts.evicted_bytes),
            damaged=counts.damaged,
            expired=counts.expired,
            overstay_seconds_max=counts.overstay_max,
            work={name: replace(work) for name, work in counts.work.items()},
        )

    async def check_integrity(self) -> Difference:
        """Hold the index against the files, while nothing is under way. Raises RuntimeError, Failed."""
        self._index.check_integrity()
        files = {file.address: file.bytes for file in await self._files(ignore_progress)}
        known = dict(self._index.sizes())
        return Difference(
            missing=tuple(known.keys() - files.keys()),
            unknown=tuple(files.keys() - known.keys()),
            resized=tuple(a for a in known.keys() & files.keys() if known[a] != files[a]),
        )

    # Spilling

    async def _spill(self, spills: Sequence[_Spill], work: Work) -> None:
        """Give each its outcome. Who waits holds no ticket, and is refused when a purge begins."""
        admitted, waiting = self._admit(spills)
        while waiting and not admitted:
            await self._change.wait()
            admitted, waiting = self._admit(waiting)
        if waiting:  # not after the writing: a purge would be over by then
            await _all(self._write(admitted, work), self._spill(waiting, work))
        elif admitted:
            await self._write(admitted, work)

    def _admit(self, spills: Sequence[_Spill]) -> tuple[list[_Spill], list[_Spill]]:
        """Those that have a ticket now, and those that have to wait for somebody to finish."""
        admitted, waiting = [], []
        for spill in spills:
            header = seal.identify(spill.slot[:HEADER_BYTES], spill.expected)
            if isinstance(header, Miss):
                spill.outcome = header
            elif slot_bytes_for(header.length) > len(spill.slot):
                spill.outcome = Miss.CORRUPT
            elif self._is_closed(spill.address):
                spill.outcome = Miss.REFUSED
            elif self._index.knows(spill.address):
                self._index.touch(spill.address)
                spill.outcome = Outcome.ALREADY
            elif self._index.is_busy(spill.address):
                waiting.append(spill)  # only then one can tell if the column is there
            elif ticket := self._index.reserve(spill.address, spill.form.file_bytes(header.length)):
                spill.ticket, spill.header = ticket, header
                admitted.append(spill)
            else:
                spill.outcome = Outcome.FULL
        return admitted, waiting

    async def _write(self, spills: list[_Spill], work: Work) -> None:
        """Make room, write, and let the index know what has become of the tickets."""
        try:
            await self._write_files(spills)
        finally:
            lacking = 0
            for spill in spills:
                ticket = _ticket(spill)
                if spill.failed:
                    spill.outcome = Outcome.FAILED
                    self._count_fault(spill.failed)
                    lacking += ticket.bytes if spill.failed.fault is Fault.NO_SPACE else 0
                if spill.outcome is Outcome.STORED:
                    self._index.commit(ticket, self._clock())
                    work.bytes += ticket.bytes
                else:
                    self._index.cancel(ticket)
            self._changed()
        with self._faults_counted():
            if lacking:  # taken by somebody else: the next one shall find room
                await self._evict(self._index.shed(lacking))
            if any(self._index.exceeds(spill.address.tag) for spill in spills):  # a cap was lowered
                await self._trim()

    async def _write_files(self, spills: list[_Spill]) -> None:
        evicting = [spill for spill in spills if _ticket(spill).victims]
        if evicting:
            await self._run_in_threads(self._writes, self._make_room, [[spill] for spill in evicting])
        for spill in spills:
            if spill.failed:
                continue
            self._count_evicted(_ticket(spill).victims)
            if not self._index.start(_ticket(spill)):
                spill.outcome = Outcome.FULL
        self._changed()
        writing = [spill for spill in spills if not spill.failed and not spill.outcome]
        if writing:
            await self._run_in_threads(self._writes, self._store, self._runs(writing))

    def _make_room(self, run: Sequence[_Spill]) -> None:
        """In a thread: the files of its victims go."""
        for spill in run:
            self._backend.delete([victim.name for victim in _ticket(spill).victims])

    def _store(self, run: Sequence[_Spill]) -> None:
        """In a thread: publish the files of these columns."""
        stored_or_not = self._backend.write([self._outgoing(spill) for spill in run])
        for spill, stored in zip(run, stored_or_not, strict=True):
            if isinstance(stored, Failed):
                spill.failed = stored
            elif stored:
                spill.outcome = Outcome.STORED

    def _outgoing(self, spill: _Spill) -> Outgoing:
        slot, header = spill.slot, spill.header
        if header is None:
            raise RuntimeError("a spill that was not admitted has no header")

        def intact() -> bool:
            """Nobody has touched the slot since the ticket was given, and it is what was sealed."""
            found = self._verify(slot, spill.expected)
            if found == header:
                return True
            spill.outcome = found if isinstance(found, Miss) else Miss.TORN
            return False

        parts = spill.form.outgoing(slot, header, spill.address, spill.note)
        return Outgoing(spill.address.name, parts, intact)

    # Recalling

    async def _recall(self, recalls: Sequence[_Recall], work: Work) -> None:
        """Give each what was found. Who waits keeps nothing from being evicted."""
        admitted, waiting = self._admit_readers(recalls)
        while waiting and not admitted:
            await self._change.wait()
            admitted, waiting = self._admit_readers(waiting)
        if waiting:
            await _all(self._read(admitted, work), self._recall(waiting, work))
        elif admitted:
            await self._read(admitted, work)

    def _admit_readers(self, recalls: Sequence[_Recall]) -> tuple[list[_Recall], list[_Recall]]:
        """Those whose columns nobody evicts from now on, and those that wait for one to be written."""
        admitted, waiting = [], []
        for recall in recalls:
            address = recall.address
            if self._is_closed(address):
                recall.found = Miss.ABSENT
            elif self._index.is_written(address):
                waiting.append(recall)
            elif self._index.knows(address) or self._may_be_elsewhere(address):
                self._index.begin_read(address)
                admitted.append(recall)
            else:
                recall.found = Miss.ABSENT
        return admitted, waiting

    async def _read(self, recalls: list[_Recall], work: Work) -> None:
        """Read, seal, and let the index know what there was."""
        try:
            await self._run_in_threads(self._reads, self._load, self._runs(recalls))
            for recall in recalls:
                self._conclude(recall, work)
        finally:
            for recall in recalls:
                self._index.end_read(recall.address)
            self._changed()
        damaged = {recall.address for recall in recalls if recall.found in _DAMAGE}
        removing = [address for address in damaged if not self._index.is_busy(address)]
        with self._faults_counted():
            if removing:
                self._counts.damaged += len(removing)
                await self._remove(removing)
        with self._faults_counted():
            # A cap may have been lowered while these could not be evicted.
            if any(self._index.exceeds(recall.address.tag) for recall in recalls):
                await self._trim()

    def _conclude(self, recall: _Recall, work: Work) -> None:
        address, found = recall.address, recall.found
        if recall.failed:
            self._count_fault(recall.failed)
            recall.found = Miss.LOST
        elif self._is_closed(address):  # it waits for us, and what was read goes with the file
            recall.found = Miss.ABSENT
        elif isinstance(found, Header):
            size = recall.form.file_bytes(found.length)
            # Where another agent wrote it, that one knows since when.
            self._index.adopt(address, size, written=self._clock())
            _seal(recall.slot, found, Column(address.key, address.tag, recall.sequence))
            work.bytes += size
        elif found is Miss.ABSENT:
            self._index.remove(address)

    def _load(self, run: Sequence[_Recall]) -> None:
        """In a thread: read the files into the slots and check them. A miss leaves no bytes there."""
        try:
            landings = [recall.form.incoming(recall.slot, recall.address, self._mover) for recall in run]
            files = [
                (recall.address.name, landing.parts)
                for recall, landing in zip(run, landings, strict=True)
            ]
            for recall, landing, size in zip(run, landings, self._backend.read(files), strict=True):
                if isinstance(size, Failed):
                    recall.failed = size
                elif size is None:
                    recall.found = Miss.ABSENT
                else:
                    recall.found = landing.accept(size)
        finally:
            for recall in run:
                if not isinstance(recall.found, Header):
                    zero(recall.slot[HEADER_BYTES:])

    # Finding

    def _may_be_elsewhere(self, address: Address) -> bool:
        """Whether only the backend can tell if this column is there."""
        return (
            self._shared
            and not self._index.knows(address)
            and not self._index.is_written(address)
            and not self._index.is_leaving(address)
            and not self._is_closed(address)
        )

    async def _adopt(self, addresses: Sequence[Address]) -> set[Address]:
        """Ask the backend for these, and enter those that are there."""
        step = -(-len(addresses) // self._threads) or 1
        batches = [addresses[start : start + step] for start in range(0, len(addresses), step)]
        there = set()
        for batch, looks in zip(batches, await self._gathered(batches), strict=True):
            for address, seen in zip(batch, looks, strict=True):
                if seen and plausible(seen.bytes) and self._may_be_elsewhere(address):
                    self._index.adopt(address, seen.bytes, written=seen.modified)
                    there.add(address)
        return there

    async def _gathered(self, batches: Sequence[Sequence[Address]]) -> list[list[Seen | None]]:
        return await asyncio.gather(*(self._look_or_none(batch) for batch in batches))

    async def _look_or_none(self, addresses: Sequence[Address]) -> list[Seen | None]:
        try:
            return await self._run(self._reads, self._look_at, addresses)
        except Failed as failed:
            self._count_fault(failed)
            return [None] * len(addresses)

    def _look_at(self, addresses: Sequence[Address]) -> list[Seen | None]:
        return [self._backend.look(address.name) for address in addresses]

    async def _rebuild(self, progress: Progress) -> None:
        before = list(self._index.idle())
        found = await self._files(progress)
        found.sort(key=lambda file: file.modified)
        damaged = []
        for count, file in enumerate(found):
            if not count % _STEP:
                await asyncio.sleep(0)
            if not plausible(file.bytes):
                damaged.append(file.address)
            elif not self._is_purging(file.address):
                self._index.adopt(file.address, file.bytes, written=file.modified, beyond_caps=True)
        await self._remove_missing(before, {file.address for file in found})
        if damaged:
            self._counts.damaged += len(damaged)
            await self._delete(damaged)
        await self._trim_all()

    async def _files(self, progress: Progress) -> list[Found]:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int | None) -> None:
            loop.call_soon_threadsafe(progress, done, total)

        return await self._run(self._writes, lambda: list(self._backend.files(report)))

    async def _remove_missing(self, before: Sequence[Address], found: set[Address]) -> None:
        """Forget what was known before a listing, is not in it, and is indeed not there."""
        missing = [a for a in before if a not in found and self._index.knows(a)]
        for address, seen in zip(
            missing, await self._run(self._reads, self._look_at, missing), strict=True
        ):
            if seen is None and self._index.knows(address):
                self._index.remove(address)

    # Removing

    async def _delete(self, addresses: Sequence[Address]) -> Removed:
        await self._until(lambda: not any(self._index.is_busy(address) for address in addresses))
        return await self._remove(addresses)

    async def _remove(self, addresses: Sequence[Address]) -> Removed:
        """Remove files that nobody uses. What the index does not know, the backend may."""
        sizes = {address: self._index.begin_removal(address) for address in addresses}
        unknown = [address for address, size in sizes.items() if not size] if self._shared else []
        try:
            found = await self._run(self._writes, self._look_at, unknown) if unknown else []
        except Failed:
            self._cancel_removal(addresses)
            raise
        await self._remove_leaving(addresses)
        gone = [size for size in sizes.values() if size] + [seen.bytes for seen in found if seen]
        return Removed(len(gone), sum(gone))

    async def _remove_leaving(self, addresses: Sequence[Address]) -> None:
        try:
            await self._run(self._writes, self._backend.delete, [one.name for one in addresses])
        except Failed:
            self._cancel_removal(addresses)
            raise
        self._finish_removal(addresses)

    async def _purge(self, scope: Scope) -> Removed:
        self._purging.append(scope)
        try:
            await self._until(lambda: not self._index.any_busy(scope))
            known = list(self._index.idle(scope))
            for address in known:
                self._index.begin_removal(address)
            try:
                removed = await self._run(self._writes, self._backend.purge, scope)
            except Failed:
                self._cancel_removal(known)
                raise
            self._finish_removal(known)
            return removed
        finally:
            self._purging.remove(scope)
            self._changed()

    async def _trim(self) -> None:
        """Evict until all caps hold, as far as nobody is using what would have to go."""
        while leaving := self._index.trim():
            await self._evict(leaving)

    async def _trim_all(self) -> None:
        """Evict until all caps hold, also what is being read or written now."""
        await self._trim()
        while self._index.any_exceeds():
            await self._change.wait()
            await self._trim()

    async def _evict(self, leaving: Mapping[Address, int]) -> None:
        try:
            await self._run(self._writes, self._backend.delete, [address.name for address in leaving])
        except Failed:
            self._cancel_removal([*leaving])
            raise
        self._count_evicted(leaving)
        self._finish_removal(leaving)

    def _finish_removal(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            self._index.finish_removal(address)
        self._changed()

    def _cancel_removal(self, addresses: Sequence[Address]) -> None:
        for address in reversed(addresses):
            self._index.cancel_removal(address)
        self._changed()

    # Counting

    @contextlib.contextmanager
    def _measured(self, kind: str, count: int = 1) -> Iterator[Work]:
        """Each column of a batch takes as long as the batch."""
        work = self._counts.work.setdefault(kind, Work())
        start = time.perf_counter()
        try:
            yield work
        except Failed as failed:
            self._count_fault(failed)
            raise
        finally:
            seconds = time.perf_counter() - start
            work.count += count
            work.seconds += seconds * count
            work.seconds_max = max(work.seconds_max, seconds)

    def _count_fault(self, failed: Failed) -> None:
        self._counts.faults[failed.fault] += 1
        self._counts.last_fault = str(failed)

    def _count_evicted(self, victims: Mapping[Address, int]) -> None:
        self._counts.evicted_columns += len(victims)
        self._counts.evicted_bytes += sum(victims.values())

    @contextlib.contextmanager
    def _faults_counted(self) -> Iterator[None]:
        """Housekeeping that fails is told by its count; who caused it has an answer of its own."""
        try:
            yield
        except Failed as failed:
            self._count_fault(failed)

    # Waiting

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    def _runs(self, items: Sequence[_Item]) -> list[Sequence[_Item]]:
        """What a thread takes at a time: small columns by the dozen, if each thread has as many."""
        each = max(1, RUN_BYTES // max(len(item.slot) for item in items))
        each = min(each, -(-len(items) // self._threads))
        return [items[start : start + each] for start in range(0, len(items), each)]

    async def _run_in_threads(
        self,
        pool: ThreadPoolExecutor,
        call: Callable[[Sequence[_Item]], None],
        runs: Sequence[Sequence[_Item]],
    ) -> None:
        """Call this for each, in a few threads; each takes the next one when it is done with one.

        A hop to a thread and back costs as much as a small file. Returns when no thread is at it.
        """
        left = iter(runs)  # `next` of a list's iterator is one step of the interpreter

        def do() -> None:
            for run in left:
                try:
                    call(run)
                except Failed as failed:
                    for item in run:
                        item.failed = failed

        loop = asyncio.get_running_loop()
        done, _ = await asyncio.wait(
            [loop.run_in_executor(pool, do) for _ in range(min(self._threads, len(runs)))]
        )
        for future in done:
            future.result()  # raises what nobody foresaw

    def _room_in_flight(self) -> int:
        return max(0, IN_FLIGHT_MAX - self._in_flight)

    async def _uninterrupted(self, work: Coroutine[object, object, _T], columns: int = 1) -> _T:
        """Do this to its end, even if who waits for it is cancelled: a thread cannot be called back."""
        self._in_flight += columns
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # nobody will ask for it any more
            raise
        finally:
            self._in_flight -= columns
            self._changed()

    def _changed(self) -> None:
        """Wake whoever waits for something to end."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._change.wait()

    def _is_closed(self, address: Address) -> bool:
        """It is being purged, or its tag is nobody's any more: nothing goes in or comes out."""
        return (self.live is not None and address.tag not in self.live) or self._is_purging(address)

    def _is_purging(self, address: Address) -> bool:
        return bool(self._purging) and any(scope.covers(address) for scope in self._purging)


async def _all(*work: Coroutine[object, object, None]) -> None:
    """Do these at once, and all of them to their end, whatever becomes of one."""
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()


def _ticket(spill: _Spill) -> Ticket:
    if spill.ticket is None:
        raise RuntimeError("a spill that was not admitted has no ticket")
    return spill.ticket


def _seal(slot: memoryview, found: Header, column: Column) -> None:
    """Seal a slot whose payload has been found good."""
    slot[:HEADER_BYTES] = seal.pack(column, found.tokens, found.length, found.checksum)


def _check_slot(slot: memoryview) -> None:
    if not slot or len(slot) % PAGE:
        raise ValueError(f"a slot consists of pages of {PAGE} bytes, not of {len(slot)} bytes")
