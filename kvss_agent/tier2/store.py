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
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeVar

from kvss_agent import seal
from kvss_agent.arena import slot_bytes_for
from kvss_agent.mover import PYTHON, Mover, zero
from kvss_agent.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Backend, Failed, Fault, Found, Progress, Removed, silent
from kvss_agent.tier2.column_file import PAGE, Scratch, accept, incoming, outgoing, plausible
from kvss_agent.tier2.index import Caps, Index, Ticket

THREADS_MAX: Final = 256
IN_FLIGHT_MAX: Final = 4096  # spills and recalls; more are refused
HIT: Final = "hit"
_STEP: Final = 10_000  # columns that a rebuild enters before others have their turn
_DAMAGE: Final = (Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)
_T = TypeVar("_T")


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
    work: Mapping[str, Work]  # by the method's name


@dataclass(frozen=True, slots=True)
class Difference:
    """How files and index differ. Between agents that share a store, they may."""

    missing: tuple[Address, ...]  # known, but there is no such file
    unknown: tuple[Address, ...]  # a file that is not known
    resized: tuple[Address, ...]  # known with another size


@dataclass(slots=True)
class _Counts:
    spills: Counter[str] = field(default_factory=Counter)
    recalls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    last_fault: str = ""
    evicted_columns: int = 0
    evicted_bytes: int = 0
    damaged: int = 0
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
    ) -> None:
        if not 0 < threads <= THREADS_MAX:
            raise ValueError(f"tier 2 uses 1 to {THREADS_MAX} threads, not {threads}")
        self._backend = backend
        self._index = Index(caps)
        self._shared = shared
        self._mover = mover
        self._threads = threads
        # Recalls, which somebody waits for, do not queue behind spills, which nobody does.
        self._reads = ThreadPoolExecutor(threads, "tier2-read")
        self._writes = ThreadPoolExecutor(threads, "tier2-write")
        self._local = threading.local()
        self._counts = _Counts()
        self._purging: list[Scope] = []
        self._in_flight = 0
        self._change = asyncio.Event()

    # Start and end

    async def open(self, progress: Progress = silent) -> None:
        """Learn what is there. Raises Failed if the backend cannot be used; may be tried again."""
        await self._run(self._writes, self._backend.open)
        await self.rebuild(progress)

    async def rebuild(self, progress: Progress = silent) -> None:
        """Bring the index in line with the files, and then the files under the caps.

        At the start this is where the index comes from. Later it finds what other agents wrote and
        removed; spills and recalls go on meanwhile. Half-written files are removed. Raises Failed.
        """
        with self._measured("rebuild"):
            await self._whole(self._rebuild(progress))

    async def close(self) -> None:
        """Wait for what is under way, then let go of everything."""
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
            there = {a for a in addresses if self._index.knows(a) and not self._is_purging(a)}
            unknown = [a for a in dict.fromkeys(addresses) if self._may_be_elsewhere(a)]
            if unknown:
                there |= await self._whole(self._adopt(unknown))
            return [address in there for address in addresses]

    async def spill(self, address: Address, slot: memoryview, expected: Column) -> Outcome | Miss:
        """Store what this slot holds, if it is what was expected, and tell what has become of it.

        The slot lies at a page's boundary and is only read. It should not change meanwhile: if it
        does, nothing is stored. Cancelling waits until the slot is not read any more.
        """
        _check_slot(slot)
        if (expected.key, expected.tag) != (address.key, address.tag):
            raise ValueError("a column is stored under its own key and tag")
        with self._measured("spill") as work:
            if self._in_flight >= IN_FLIGHT_MAX:
                outcome: Outcome | Miss = Miss.REFUSED
            else:
                outcome = await self._whole(self._spill(address, slot, expected, work))
            self._counts.spills[outcome] += 1
            return outcome

    async def recall(self, address: Address, slot: memoryview, sequence: int) -> Header | Miss:
        """Bring a column back into this slot, sealed as the evict of this number, or say why not.

        The slot lies at a page's boundary and is writable; nobody else writes to it. Readers find it
        torn meanwhile, and absent after a miss. A file that is not what its name says is removed.
        Cancelling waits until the slot is not written any more, and clears it.
        """
        _check_slot(slot)
        with self._measured("recall") as work:
            seal.open_slot(slot, sequence)
            if self._in_flight >= IN_FLIGHT_MAX:
                found: Header | Miss = Miss.REFUSED
            else:
                try:
                    found = await self._whole(self._recall(address, slot, sequence, work))
                except asyncio.CancelledError:
                    seal.clear(slot, sequence, scrub=False)
                    raise
            if isinstance(found, Miss):
                seal.clear(slot, sequence, scrub=False)
            self._counts.recalls[found if isinstance(found, Miss) else HIT] += 1
            return found

    async def delete(self, addresses: Sequence[Address]) -> Removed:
        """Remove these columns, once nobody reads or writes them. Raises Failed: some may be left."""
        with self._measured("delete") as work:
            removed = await self._whole(self._delete(list(dict.fromkeys(addresses))))
            work.bytes += removed.bytes
            return removed

    async def purge(self, *, tag: bytes | None = None, namespace: bytes | None = None) -> Receipt:
        """Remove all of a tag, of a namespace, or of a tag in a namespace; also what nobody knows of.

        Raises Failed, and then there is no receipt: it has to be repeated.
        """
        with self._measured("purge") as work:
            removed = await self._whole(self._purge(Scope(tag, namespace)))
            work.bytes += removed.bytes
            return Receipt(removed.columns, removed.bytes, time.time())

    # Running it

    async def set_caps(self, caps: Caps) -> None:
        """Other caps from now on. Returns when files have been evicted down to them; raises Failed."""
        self._index.set_caps(caps)
        with self._measured("set_caps"):
            await self._whole(self._trim_all())

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
            work={name: replace(work) for name, work in counts.work.items()},
        )

    async def check_integrity(self) -> Difference:
        """Hold the index against the files, while nothing is under way. Raises RuntimeError, Failed."""
        self._index.check_integrity()
        files = {file.address: file.bytes for file in await self._files(silent)}
        known = dict(self._index.sizes())
        return Difference(
            missing=tuple(known.keys() - files.keys()),
            unknown=tuple(files.keys() - known.keys()),
            resized=tuple(a for a in known.keys() & files.keys() if known[a] != files[a]),
        )

    # Spilling

    async def _spill(
        self, address: Address, slot: memoryview, expected: Column, work: Work
    ) -> Outcome | Miss:
        header = seal.identify(slot[:HEADER_BYTES], expected)
        if isinstance(header, Miss):
            return header
        await self._until(lambda: self._is_purging(address) or not self._is_unsettled(address))
        if self._is_purging(address):
            return Miss.REFUSED
        if self._index.knows(address):
            self._index.touch(address)
            return Outcome.ALREADY
        ticket = self._index.reserve(address, slot_bytes_for(header.length))
        if ticket is None:
            return Outcome.FULL
        try:
            outcome = await self._write(ticket, slot, expected)
        except Failed as failed:
            outcome = Outcome.FAILED
            self._count_fault(failed)
            if failed.fault is Fault.NO_SPACE:  # by somebody else: the next one shall find room
                with self._told():
                    await self._evict(self._index.shed(ticket.bytes))
        if outcome is Outcome.STORED:
            work.bytes += ticket.bytes
        if self._index.exceeds(address.tag):  # a cap was lowered meanwhile
            with self._told():
                await self._trim()
        return outcome

    def _is_unsettled(self, address: Address) -> bool:
        """Whether somebody has to finish before one can tell if this column is there."""
        return self._index.is_busy(address) and not self._index.knows(address)

    async def _write(self, ticket: Ticket, slot: memoryview, expected: Column) -> Outcome | Miss:
        """Make room, write, and let the index know what has become of the ticket."""
        miss: Miss | None = Miss.LOST
        try:
            if ticket.victims:
                names = [victim.name for victim in ticket.victims]
                await self._run(self._writes, self._backend.delete, names)
                self._count_evicted(ticket.victims)
            has_room = self._index.start(ticket)
            self._changed()
            if not has_room:
                return Outcome.FULL
            miss = await self._run(self._writes, self._store, ticket.address, slot, expected)
            return miss or Outcome.STORED
        finally:
            if miss:
                self._index.cancel(ticket)
            else:
                self._index.commit(ticket)

    def _store(self, address: Address, slot: memoryview, expected: Column) -> Miss | None:
        """In a thread: check the column and publish its file."""
        header = seal.verify(slot, expected, self._mover)
        if isinstance(header, Miss):
            return header
        stored = self._backend.write(
            address.name,
            outgoing(slot, header, address.column, self._scratch()),
            lambda: seal.identify(slot[:HEADER_BYTES], expected) == header,
        )
        return None if stored else Miss.TORN

    # Recalling

    async def _recall(
        self, address: Address, slot: memoryview, sequence: int, work: Work
    ) -> Header | Miss:
        index = self._index
        await self._until(lambda: self._is_purging(address) or not index.is_written(address))
        is_candidate = index.knows(address) or self._may_be_elsewhere(address)
        if self._is_purging(address) or not is_candidate:
            return Miss.ABSENT
        try:
            found = await self._read(address, slot, sequence)
        except Failed as failed:
            self._count_fault(failed)
            found = Miss.LOST
        if isinstance(found, Header):
            work.bytes += slot_bytes_for(found.length)
        with self._told():
            if found in _DAMAGE and not index.is_busy(address):
                self._counts.damaged += 1
                await self._remove([address])
            if index.exceeds(address.tag):  # a cap was lowered while this one could not be evicted
                await self._trim()
        return found

    async def _read(self, address: Address, slot: memoryview, sequence: int) -> Header | Miss:
        """Read, seal, and let the index know what there was. Nobody evicts the column meanwhile."""
        self._index.begin_read(address)
        try:
            found = await self._run(self._reads, self._load, address, slot)
            if self._is_purging(address):  # the purge waits for us, and what was read goes with the file
                return Miss.ABSENT
            if isinstance(found, Header):
                self._index.adopt(address, slot_bytes_for(found.length))
                return _seal(slot, found, sequence)
            if found is Miss.ABSENT:
                self._index.forget(address)
            return found
        finally:
            self._index.end_read(address)
            self._changed()

    def _load(self, address: Address, slot: memoryview) -> Header | Miss:
        """In a thread: read the file into the slot and check it. A miss leaves no bytes there."""
        scratch = self._scratch()
        found: Header | Miss = Miss.LOST
        try:
            received = self._backend.read(address.name, incoming(slot, scratch))
            if received is None:
                return Miss.ABSENT
            found = accept(slot, scratch, received, address.column, self._mover)
        finally:
            if isinstance(found, Miss):
                zero(slot[HEADER_BYTES:])
        return found

    # Finding

    def _may_be_elsewhere(self, address: Address) -> bool:
        """Whether only the backend can tell if this column is there."""
        return (
            self._shared
            and not self._index.knows(address)
            and not self._index.is_written(address)
            and not self._index.is_leaving(address)
            and not self._is_purging(address)
        )

    async def _adopt(self, addresses: Sequence[Address]) -> set[Address]:
        """Ask the backend for these, and enter those that are there."""
        step = -(-len(addresses) // self._threads) or 1
        batches = [addresses[start : start + step] for start in range(0, len(addresses), step)]
        there = set()
        for batch, sizes in zip(batches, await self._gathered(batches), strict=True):
            for address, size in zip(batch, sizes, strict=True):
                if size is not None and plausible(size) and self._may_be_elsewhere(address):
                    self._index.adopt(address, size)
                    there.add(address)
        return there

    async def _gathered(self, batches: Sequence[Sequence[Address]]) -> list[list[int | None]]:
        return await asyncio.gather(*(self._sizes_or_none(batch) for batch in batches))

    async def _sizes_or_none(self, addresses: Sequence[Address]) -> list[int | None]:
        try:
            return await self._run(self._reads, self._sizes, addresses)
        except Failed as failed:
            self._count_fault(failed)
            return [None] * len(addresses)

    def _sizes(self, addresses: Sequence[Address]) -> list[int | None]:
        return [self._backend.size(address.name) for address in addresses]

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
                self._index.adopt(file.address, file.bytes, beyond_caps=True)
        await self._forget_missing(before, {file.address for file in found})
        if damaged:
            self._counts.damaged += len(damaged)
            await self._delete(damaged)
        await self._trim_all()

    async def _files(self, progress: Progress) -> list[Found]:
        loop = asyncio.get_running_loop()

        def report(done: int, total: int | None) -> None:
            loop.call_soon_threadsafe(progress, done, total)

        return await self._run(self._writes, lambda: list(self._backend.files(report)))

    async def _forget_missing(self, before: Sequence[Address], found: set[Address]) -> None:
        """Forget what was known before a listing, is not in it, and is indeed not there."""
        missing = [a for a in before if a not in found and self._index.knows(a)]
        for address, size in zip(
            missing, await self._run(self._reads, self._sizes, missing), strict=True
        ):
            if size is None and self._index.knows(address):
                self._index.forget(address)

    # Removing

    async def _delete(self, addresses: Sequence[Address]) -> Removed:
        await self._until(lambda: not any(self._index.is_busy(address) for address in addresses))
        return await self._remove(addresses)

    async def _remove(self, addresses: Sequence[Address]) -> Removed:
        """Remove files that nobody uses. What the index does not know, the backend may."""
        sizes = {address: self._index.leave(address) for address in addresses}
        unknown = [address for address, size in sizes.items() if not size] if self._shared else []
        try:
            found = await self._run(self._writes, self._sizes, unknown) if unknown else []
            await self._run(self._writes, self._backend.delete, [address.name for address in sizes])
        except Failed:
            self._stayed(addresses)
            raise
        self._left(addresses)
        gone = [size for size in (*sizes.values(), *found) if size]
        return Removed(len(gone), sum(gone))

    async def _purge(self, scope: Scope) -> Removed:
        self._purging.append(scope)
        try:
            await self._until(lambda: not self._index.any_busy(scope))
            known = list(self._index.idle(scope))
            for address in known:
                self._index.leave(address)
            try:
                removed = await self._run(self._writes, self._backend.purge, scope)
            except Failed:
                self._stayed(known)
                raise
            self._left(known)
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
            self._stayed([*leaving])
            raise
        self._count_evicted(leaving)
        self._left(leaving)

    def _left(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            self._index.left(address)
        self._changed()

    def _stayed(self, addresses: Sequence[Address]) -> None:
        for address in reversed(addresses):
            self._index.stayed(address)
        self._changed()

    # Counting

    @contextlib.contextmanager
    def _measured(self, kind: str) -> Iterator[Work]:
        work = self._counts.work.setdefault(kind, Work())
        start = time.perf_counter()
        try:
            yield work
        except Failed as failed:
            self._count_fault(failed)
            raise
        finally:
            seconds = time.perf_counter() - start
            work.count += 1
            work.seconds += seconds
            work.seconds_max = max(work.seconds_max, seconds)

    def _count_fault(self, failed: Failed) -> None:
        self._counts.faults[failed.fault] += 1
        self._counts.last_fault = str(failed)

    def _count_evicted(self, victims: Mapping[Address, int]) -> None:
        self._counts.evicted_columns += len(victims)
        self._counts.evicted_bytes += sum(victims.values())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Housekeeping that fails is told by its count; who caused it has an answer of its own."""
        try:
            yield
        except Failed as failed:
            self._count_fault(failed)

    # Waiting

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    async def _whole(self, work: Coroutine[object, object, _T]) -> _T:
        """Do this to its end, even if who waits for it is cancelled: a thread cannot be called back."""
        self._in_flight += 1
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
            self._in_flight -= 1
            self._changed()

    def _changed(self) -> None:
        """Wake whoever waits for something to end."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._change.wait()

    def _is_purging(self, address: Address) -> bool:
        return any(scope.covers(address) for scope in self._purging)

    def _scratch(self) -> Scratch:
        """Of this thread."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        scratch: Scratch = self._local.scratch
        return scratch


def _seal(slot: memoryview, found: Header, sequence: int) -> Header:
    """Seal a slot whose payload has been found good, as the evict of this number."""
    column = Column(found.key, found.tag, sequence)
    slot[:HEADER_BYTES] = seal.pack(column, found.tokens, found.length, found.checksum)
    return found._replace(sequence=sequence)


def _check_slot(slot: memoryview) -> None:
    if not slot or len(slot) % PAGE:
        raise ValueError(f"a slot consists of pages of {PAGE} bytes, not of {len(slot)} bytes")
