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
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from kvss_agent.limits.background import Background, Rate, Totals
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard import seal
from kvss_agent.shard.core import batches
from kvss_agent.shard.seal import Column, Header, Miss
from kvss_agent.tier2.address import Address, Part, Scope
from kvss_agent.tier2.backend import Backend, Progress, Removed, ignore_progress
from kvss_agent.tier2.column_file import CLEAR, PAGE, Form
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.index import Caps, Index, Limits
from kvss_agent.tier2.parts.execution import Execution
from kvss_agent.tier2.parts.listing import Lister
from kvss_agent.tier2.parts.looks import Looker
from kvss_agent.tier2.parts.recalls import Recall, Recaller
from kvss_agent.tier2.parts.removal import Remover
from kvss_agent.tier2.parts.spills import Spill, Spiller
from kvss_agent.tier2.parts.state import StoreState
from kvss_agent.tier2.parts.statistics import Outcome, Receipt, Stats
from kvss_agent.wall_clock import WallClock

__all__ = ["Outcome", "Receipt", "Stats", "Tier2"]

HIT: Final = "hit"
_EXPIRE_AT_ONCE: Final = 1000
_LISTED_AT_ONCE: Final = 4096
T = TypeVar("T")


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
        clock: Callable[[], float] | None = None,
        background: Background | None = None,
        share: float = 1.0,
    ) -> None:
        """`clock` returns seconds since 1970, as files do; unless given, a `WallClock`. `background`:
        spills keep to its budget, with `share` times the bytes of their files."""
        self._front = backend if isinstance(backend, Fronted) else None
        self._work = Execution(threads)
        backend.set_caps(caps)
        self._state = StoreState(
            backend, Index(caps), self._work, mover, clock or WallClock(), shared=shared
        )
        if self._front:
            self._state.is_in_front = self._front.is_in_front
        self._remover = Remover(self._state)
        looker = Looker(self._state)
        self._spiller = Spiller(self._state, self._remover, background, share)
        self._recaller = Recaller(self._state, self._remover)
        self._lister = Lister(self._state, self._remover, looker)
        self.limits = Limits()
        self.write_rate, self.written = Rate(), Totals()  # of a bucket or shared directory
        self.use_mover = self._state.use_mover
        self.closed_to = self._state.closed_to

    @property
    def live(self) -> Collection[bytes] | None:
        """Tags of known orgs: others are neither stored nor served. None: all tags are."""
        return self._state.live

    @live.setter
    def live(self, tags: Collection[bytes] | None) -> None:
        self._state.live = tags

    # Start and end

    async def open(self, progress: Progress = ignore_progress) -> None:
        """Learn what is there. Raises Failed if the backend cannot be used; may be tried again, unless
        it was called off."""
        await self._work.uninterrupted(self._work.run(self._work.writes, self._state.backend.open))
        await self.rebuild(progress)

    async def rebuild(self, progress: Progress = ignore_progress) -> int:
        """Bring the index in line with the files, and then the files under the caps.

        At the start this is where the index comes from. Later it finds what other agents wrote and
        removed; spills and recalls go on meanwhile. Half-written files are removed. Raises Failed.

        Returns how many files are not in the index because a purge was removing them: they stay if it
        fails.
        """
        with self._state.counts.measured("rebuild"):
            return await self._work.uninterrupted(self._lister.rebuild(progress))

    async def refresh(self) -> None:
        """In a store that is shared, learn what others wrote and removed since, and remove what is too
        old of agents that are gone. Raises Failed."""
        if self._state.shared:
            with self._state.counts.measured("refresh"):
                expired = await self._work.uninterrupted(self._lister.refresh(lambda: self.limits))
                self._state.counts.expired += expired

    def call_off(self) -> None:
        """It is closed soon: what lists files does not go on to the end."""
        self._state.is_closing = True

    async def close(self) -> None:
        """Wait for what is under way, then let go of everything."""
        self.call_off()
        await self._work.close()
        await asyncio.to_thread(self._state.backend.close)

    # Columns

    async def exists(self, addresses: Sequence[Address]) -> list[bool]:
        """Which of these can be recalled, as far as one can know; they are evicted later for it.

        A backend that does not answer has nothing.
        """
        with self._state.counts.measured("exists"):
            for address in addresses:
                self._state.index.touch(address)
            there = {a for a in addresses if self._state.index.knows(a) and not self._state.is_closed(a)}
            unknown = [a for a in dict.fromkeys(addresses) if self._state.may_be_elsewhere(a)]
            if unknown:
                there |= await self._work.uninterrupted(self._lister.adopt(unknown))
            return [address in there for address in addresses]

    async def spill_many(
        self, items: Sequence[tuple[Address, memoryview, Column, int]], form: Form = CLEAR
    ) -> list[Outcome | Miss]:
        """Store what each slot holds, if it is what was expected, and tell what has become of it.

        The number is a note of the driver's: whoever recalls the column gets it back, in the same form.

        A slot lies at a page's boundary and is only read. It should not change meanwhile: if it does,
        nothing is stored. Each column has an outcome of its own; what is there twice is stored once.
        Cancelling waits until no slot is read any more. Where spills keep to a budget, one that would
        rest for longer than REST_SECONDS_MAX is LATE, and what is removed while it rests is REFUSED.
        """
        for address, slot, expected, _ in items:
            _check_slot(slot)
            if (expected.key, expected.tag) != (address.key, address.tag):
                raise ValueError("a column is stored under its own key and tag")
        with self._state.counts.measured("spill", len(items)) as work:
            taken = items[: self._work.room()]
            spills = [Spill(*item, form) for item in taken]
            if spills:
                await self._work.uninterrupted(self._spiller.spill(spills, work), len(spills))
            outcomes = [spill.outcome or Miss.LOST for spill in spills]
            outcomes += [Miss.REFUSED] * (len(items) - len(taken))
            self._state.counts.spills.update(outcomes)
            return outcomes

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
        with self._state.counts.measured("recall", len(items)) as work:
            for _, slot, sequence in items:
                seal.open_slot(slot, sequence)
            taken = items[: self._work.room()]
            recalls = [Recall(*item, form) for item in taken]
            try:
                if recalls:
                    await self._work.uninterrupted(self._recaller.recall(recalls, work), len(recalls))
            except asyncio.CancelledError:
                for _, slot, sequence in items:
                    seal.clear(slot, sequence, scrub=False)
                raise
            found = [recall.found or Miss.LOST for recall in recalls]
            found += [Miss.REFUSED] * (len(items) - len(taken))
            for (_, slot, sequence), one in zip(items, found, strict=True):
                if isinstance(one, Miss):
                    seal.clear(slot, sequence, scrub=False)
            self._state.counts.recalls.update(one if isinstance(one, Miss) else HIT for one in found)
            return found

    def knows(self, address: Address) -> bool:
        """Whether this column is there, as far as the index knows."""
        return self._state.index.knows(address)

    def is_busy(self, address: Address) -> bool:
        """Whether it is being written or removed, or may have been found by a read or a listing that
        goes on, and is not known before the end of that."""
        index = self._state.index
        is_found = not index.knows(address) and (index.is_read(address) or self._state.is_listing)
        return is_found or index.is_written(address) or index.is_leaving(address)

    async def while_read(
        self, addresses: Sequence[Address], call: Callable[[Sequence[str]], T]
    ) -> T | None:
        """Call this in a thread, with the names of those of these columns that are there: none of them
        is removed or written meanwhile. None if none is there. Raises Failed."""
        index = self._state.index
        there = [one for one in addresses if index.knows(one) and not self._state.is_closed(one)]
        if not there:
            return None
        for address in there:
            index.begin_read(address)
        try:
            return await self._work.uninterrupted(
                self._work.run(self._work.writes, call, [address.name for address in there])
            )
        finally:
            for address in there:
                index.end_read(address)
            self._work.changed()

    async def delete(self, addresses: Sequence[Address]) -> Removed:
        """Remove these columns, once nobody reads or writes them. Raises Failed: some may be left."""
        self._state.refuse_resting(set(addresses).__contains__)
        with self._state.counts.measured("delete") as work:
            removed = await self._work.uninterrupted(
                self._remover.delete(list(dict.fromkeys(addresses)))
            )
            work.bytes += removed.bytes
            return removed

    async def purge(self, *, tag: bytes | None = None, namespace: bytes | None = None) -> Receipt:
        """Remove all of a tag, of a namespace, or of a tag in a namespace; also what nobody knows of.

        Raises Failed, and then there is no receipt: it has to be repeated.
        """
        with self._state.counts.measured("purge") as work:
            removed = await self._work.uninterrupted(self._remover.purge(Scope(tag, namespace)))
            work.bytes += removed.bytes
            return Receipt(removed.columns, removed.bytes, time.time())

    # Shards that leave

    @property
    def has_front(self) -> bool:
        """Whether columns may wait in front of the store."""
        return self._front is not None

    @property
    def orphans(self) -> int:
        """How many wait there of shards that the agent does not have."""
        return self._front.orphans if self._front else 0

    def attend(self, parts: Collection[Part]) -> None:
        """The agent has these shards. What waits of others in front is copied behind."""
        if self._front:
            self._front.attend(parts)

    async def flush(self, part: Part) -> int:
        """Copy behind what waits of this shard in front, what is being written now included. How many
        columns still wait: it continues, and has to be called again. Raises Failed."""
        if self._front is None:
            return 0
        index = self._state.index
        writing = [one for one in index.being_written() if (one.namespace, one.shard) == part]
        await self._work.until(lambda: not any(map(index.is_written, writing)))
        return await self._work.uninterrupted(self._work.run(self._work.writes, self._front.flush, part))

    # Operation

    async def set_caps(self, caps: Caps) -> None:
        """Other caps from now on. Returns when files have been evicted down to them; raises Failed."""
        self._state.index.set_caps(caps)
        self._state.backend.set_caps(caps)
        with self._state.counts.measured("set_caps"):
            await self._work.uninterrupted(self._remover.trim_all())

    async def sweep(self) -> int:
        """Remove what carries a tag that is nobody's; how many columns. Raises Failed."""
        if self.live is None:
            return 0
        count = 0
        for tag in [tag for tag in self._state.index.tags() if tag not in self.live]:
            count += (await self.purge(tag=tag)).columns
        return count

    async def expire(self) -> int:
        """Remove what lies here for longer than its org allows; how many columns that were. Then the
        backend does what it has left undone. Raises Failed. Ends as soon as the store is being closed,
        which would else wait for all of it."""
        count = 0
        while not self._state.is_closing:
            expired = self._state.index.expire(self.limits, self._state.clock(), _EXPIRE_AT_ONCE)
            if not expired:
                break
            with self._state.counts.measured("expire", len(expired)):
                await self._work.uninterrupted(self._remover.remove_leaving(list(expired)))
            count += len(expired)
            self._state.counts.expired += len(expired)
            self._state.counts.overstay_max = max(self._state.counts.overstay_max, *expired.values())
        if not self._state.is_closing:
            await self._work.run(self._work.writes, self._state.backend.tidy)
        return count

    async def listed(self, namespace: bytes, part: str) -> list[tuple[Address, int, float]]:
        """The columns of this part that can be recalled, as far as the index knows, with the bytes of
        each and when it was written. Others have their turn meanwhile."""
        index, found = self._state.index, list[tuple[Address, int, float]]()
        for run in batches(index.known(), _LISTED_AT_ONCE):
            for address in run:
                if (
                    address.namespace == namespace
                    and address.shard == part
                    and (seen := index.seen(address))
                ):
                    found.append((address, *seen))
            await asyncio.sleep(0)
        return found

    def stats(self) -> Stats:
        """Any thread may ask: what changes meanwhile is copied before it is gone through."""
        counts = self._state.counts
        return Stats(
            columns=self._state.index.columns,
            bytes=self._state.index.held,
            cap_bytes=self._state.index.caps.total,
            orgs={tag.hex(): held_and_cap for tag, held_and_cap in self._state.index.orgs().items()},
            in_flight=self._work.in_flight,
            properties=self._state.backend.properties(),
            spills=dict(counts.spills),
            recalls=dict(counts.recalls),
            faults=dict(counts.faults.copy() + Counter(self._state.backend.own_faults())),
            last_fault=counts.last_fault,
            evicted=Removed(counts.evicted_columns, counts.evicted_bytes),
            damaged=counts.damaged,
            expired=counts.expired,
            overstay_seconds_max=counts.overstay_max,
            work={name: replace(work) for name, work in list(counts.work.items())},
        )


def _check_slot(slot: memoryview) -> None:
    if not slot or len(slot) % PAGE:
        raise ValueError(f"a slot consists of pages of {PAGE} bytes, not of {len(slot)} bytes")
