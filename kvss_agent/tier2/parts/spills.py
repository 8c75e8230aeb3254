"""Spilling: columns from slots to files.

Where files cross links, spills keep to a budget. They rest before they begin: no file is reserved or
written meanwhile. One that would rest for too long is late: its driver waits for the slot, and has a
deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvss_agent.limits.background import Background
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault, Leaving, Outgoing
from kvss_agent.tier2.column_file import Form
from kvss_agent.tier2.index import Ticket
from kvss_agent.tier2.parts.execution import gather_whole
from kvss_agent.tier2.parts.removal import Remover
from kvss_agent.tier2.parts.state import StoreState
from kvss_agent.tier2.parts.statistics import Outcome, Work

# Of a spill: a driver waits for an answer for a minute, and has no use of the slots meanwhile.
REST_SECONDS_MAX: Final = 2.0


@dataclass(eq=False, slots=True)
class Spill:
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


class Spiller:
    """Admits spills, writes their files, and gives each its outcome."""

    def __init__(
        self,
        state: StoreState,
        remover: Remover,
        background: Background | None,
        share: float,
    ) -> None:
        """`background`: what the bytes of spills keep to, `share` times those of their files."""
        self._state, self._work, self._remover = state, state.execution, remover
        self._background, self._share = background, share

    async def spill(self, spills: Sequence[Spill], work: Work) -> None:
        """Give each its outcome. Who waits holds no ticket, and is refused when a purge begins."""
        if self._background is None:
            await self._begin(spills, work)
            return
        if booked := self._booked(spills, self._background):
            await gather_whole(*(self._rest(seconds, some, work) for seconds, some in booked))

    async def _begin(self, spills: Sequence[Spill], work: Work) -> None:
        await self._work.as_admitted(spills, self._admit, lambda some: self._write(some, work))

    def _booked(
        self, spills: Sequence[Spill], background: Background
    ) -> list[tuple[float, list[Spill]]]:
        """For how long to rest, and what to begin with then. The others are late."""
        now, found = time.monotonic(), list[tuple[float, list[Spill]]]()
        for size, some in self._pieces(spills, background.piece()):
            seconds = background.book(size, now, REST_SECONDS_MAX) if size else 0.0
            if seconds is None:
                for spill in some:
                    spill.outcome = Outcome.LATE
            elif found and found[-1][0] == seconds:
                found[-1][1].extend(some)
            else:
                found.append((seconds, some))
        return found

    def _pieces(self, spills: Sequence[Spill], most: int) -> Iterator[tuple[int, list[Spill]]]:
        """Each with the bytes that it moves: about so many, or those of one column."""
        size, some = 0, list[Spill]()
        for spill in spills:
            size += int(self._share * self._file_bytes(spill))
            some.append(spill)
            if size >= most:
                yield size, some
                size, some = 0, []
        if some:
            yield size, some

    def _file_bytes(self, spill: Spill) -> int:
        """Of the file that will be written; 0 if none will be."""
        header = seal.identify(spill.slot[:HEADER_BYTES], spill.expected)
        if isinstance(header, Miss) or self._state.index.knows(spill.address):
            return 0
        return spill.form.file_bytes(header.length)

    async def _rest(self, seconds: float, spills: Sequence[Spill], work: Work) -> None:
        if seconds:
            self._state.resting.update(spills)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._state.resting.difference_update(spills)
        await self._begin([spill for spill in spills if spill.outcome is None], work)

    def _admit(self, spills: Sequence[Spill]) -> tuple[list[Spill], list[Spill]]:
        """Those that have a ticket now, and those that have to wait for somebody to finish."""
        admitted, waiting = [], []
        for spill in spills:
            header = seal.identify(spill.slot[:HEADER_BYTES], spill.expected)
            if isinstance(header, Miss):
                spill.outcome = header
            elif slot_bytes_for(header.length) > len(spill.slot):
                spill.outcome = Miss.CORRUPT
            elif self._state.is_closed(spill.address):
                spill.outcome = Miss.REFUSED
            elif self._state.index.knows(spill.address):
                self._state.index.touch(spill.address)
                spill.outcome = Outcome.ALREADY
            elif self._state.index.is_busy(spill.address):
                waiting.append(spill)  # only then one can tell if the column is there
            elif ticket := self._state.index.reserve(
                spill.address, spill.form.file_bytes(header.length)
            ):
                spill.ticket, spill.header = ticket, header
                admitted.append(spill)
            else:
                spill.outcome = Outcome.FULL
        return admitted, waiting

    async def _write(self, spills: list[Spill], work: Work) -> None:
        """Make room, write, and let the index know what has become of the tickets."""
        try:
            await self._write_files(spills)
        finally:
            lacking, now = list[Spill](), self._state.clock()
            for spill in spills:
                ticket = _ticket(spill)
                if spill.failed and spill.failed.fault is Fault.OVER_BUDGET:
                    spill.outcome = Outcome.LATE
                elif spill.failed:
                    spill.outcome = Outcome.FAILED
                    self._state.counts.count_fault(spill.failed)
                    if spill.failed.fault is Fault.NO_SPACE:
                        lacking.append(spill)
                if spill.outcome is Outcome.STORED:
                    self._state.index.commit(ticket, now)
                    work.bytes += ticket.bytes
                else:
                    self._state.index.cancel(ticket)
            self._work.changed()
        with self._state.counts.faults_counted():
            if lacking:  # taken by somebody else: the next one shall find room
                await self._shed(lacking)
            if any(map(self._state.index.exceeds, {spill.address.tag for spill in spills})):
                await self._remover.trim()  # a cap was lowered

    async def _shed(self, lacking: Sequence[Spill]) -> None:
        """Give up as much as these lacked; if there is nothing to give up, they are told."""
        if leaving := self._state.index.shed(sum(_ticket(spill).bytes for spill in lacking)):
            await self._remover.evict(leaving)
            return
        for spill in lacking:
            spill.outcome = Outcome.FULL

    async def _write_files(self, spills: list[Spill]) -> None:
        takers = {spill for spill in spills if self._takes_over(spill)}
        evicting = [one for one in spills if _ticket(one).victims and one not in takers]
        if evicting:
            await self._work.run_in_threads(
                self._work.writes, self._make_room, [[spill] for spill in evicting]
            )
        for spill in spills:
            if not spill.failed and spill not in takers and not self._start(spill):
                spill.outcome = Outcome.FULL
        self._work.changed()
        writing = [spill for spill in spills if not spill.failed and not spill.outcome]
        try:
            if writing:
                runs = self._work.runs(writing)
                await self._work.run_in_threads(self._work.writes, self._store, runs)
        finally:  # whatever became of others: a victim that is gone would be leaving for ever
            for spill in takers:
                if spill.outcome:
                    self._start(spill)  # it holds what its victim held, so files are not more for it

    def _takes_over(self, spill: Spill) -> bool:
        """Whether its file can be its victim's, written over: one of its own org, as a purge of either
        has to find what a writer that dies leaves."""
        ticket, org = _ticket(spill), (spill.address.namespace, spill.address.tag)
        return (
            [*ticket.victims.values()] == [ticket.bytes]
            and all((victim.namespace, victim.tag) == org for victim in ticket.victims)
            and self._state.columns_in(spill.form) is not None
        )

    def _start(self, spill: Spill) -> bool:
        """Its victims are gone. Whether there is still room for it."""
        ticket = _ticket(spill)
        if ticket.victims:
            self._state.counts.count_evicted(ticket.victims)
        return self._state.index.start(ticket)

    def _make_room(self, run: Sequence[Spill]) -> None:
        """In a thread: the files of its victims go."""
        for spill in run:
            self._state.backend.delete([victim.name for victim in _ticket(spill).victims])

    def _store(self, run: Sequence[Spill]) -> None:
        """In a thread: publish the files of these columns, which have one form."""
        if columns := self._state.columns_in(run[0].form):
            answers = columns.store_columns([_leaving(spill) for spill in run])
            for spill, answer in zip(run, answers, strict=True):
                if isinstance(answer, Failed):
                    spill.failed = answer
                else:
                    spill.outcome = answer or Outcome.STORED
            return
        stored_or_not = self._state.backend.write([self._outgoing(spill) for spill in run])
        for spill, stored in zip(run, stored_or_not, strict=True):
            if isinstance(stored, Failed):
                spill.failed = stored
            elif stored:
                spill.outcome = Outcome.STORED

    def _outgoing(self, spill: Spill) -> Outgoing:
        slot, header = spill.slot, _header(spill)

        def intact() -> bool:
            """Nobody has touched the slot since the ticket was given, and it is what was sealed."""
            found = self._state.verify(slot, spill.expected)
            if found == header:
                return True
            spill.outcome = found if isinstance(found, Miss) else Miss.TORN
            return False

        parts = spill.form.outgoing(slot, header, spill.address, spill.note)
        return Outgoing(spill.address.name, parts, intact)


def _leaving(spill: Spill) -> Leaving:
    address = spill.address
    filed, ticket = address.column(spill.note), _ticket(spill)
    victim = None if ticket.started else next((one.name for one in ticket.victims), None)
    return Leaving(address.name, spill.slot, spill.expected, _header(spill), filed, victim)


def _header(spill: Spill) -> Header:
    if spill.header is None:
        raise RuntimeError("a spill that was not admitted has no header")
    return spill.header


def _ticket(spill: Spill) -> Ticket:
    if spill.ticket is None:
        raise RuntimeError("a spill that was not admitted has no ticket")
    return spill.ticket
