"""Spilling: columns from slots to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault, Outgoing
from kvss_agent.tier2.column_file import Form
from kvss_agent.tier2.index import Ticket
from kvss_agent.tier2.parts.removal import Remover
from kvss_agent.tier2.parts.state import StoreState
from kvss_agent.tier2.parts.statistics import Outcome, Work


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

    def __init__(self, state: StoreState, remover: Remover) -> None:
        self._state, self._work, self._remover = state, state.execution, remover

    async def spill(self, spills: Sequence[Spill], work: Work) -> None:
        """Give each its outcome. Who waits holds no ticket, and is refused when a purge begins."""
        await self._work.as_admitted(spills, self._admit, lambda some: self._write(some, work))

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
            lacking = 0
            for spill in spills:
                ticket = _ticket(spill)
                if spill.failed:
                    spill.outcome = Outcome.FAILED
                    self._state.counts.count_fault(spill.failed)
                    lacking += ticket.bytes if spill.failed.fault is Fault.NO_SPACE else 0
                if spill.outcome is Outcome.STORED:
                    self._state.index.commit(ticket, self._state.clock())
                    work.bytes += ticket.bytes
                else:
                    self._state.index.cancel(ticket)
            self._work.changed()
        with self._state.counts.faults_counted():
            if lacking:  # taken by somebody else: the next one shall find room
                await self._remover.evict(self._state.index.shed(lacking))
            if any(
                self._state.index.exceeds(spill.address.tag) for spill in spills
            ):  # a cap was lowered
                await self._remover.trim()

    async def _write_files(self, spills: list[Spill]) -> None:
        evicting = [spill for spill in spills if _ticket(spill).victims]
        if evicting:
            await self._work.run_in_threads(
                self._work.writes, self._make_room, [[spill] for spill in evicting]
            )
        for spill in spills:
            if spill.failed:
                continue
            self._state.counts.count_evicted(_ticket(spill).victims)
            if not self._state.index.start(_ticket(spill)):
                spill.outcome = Outcome.FULL
        self._work.changed()
        writing = [spill for spill in spills if not spill.failed and not spill.outcome]
        if writing:
            await self._work.run_in_threads(self._work.writes, self._store, self._work.runs(writing))

    def _make_room(self, run: Sequence[Spill]) -> None:
        """In a thread: the files of its victims go."""
        for spill in run:
            self._state.backend.delete([victim.name for victim in _ticket(spill).victims])

    def _store(self, run: Sequence[Spill]) -> None:
        """In a thread: publish the files of these columns."""
        stored_or_not = self._state.backend.write([self._outgoing(spill) for spill in run])
        for spill, stored in zip(run, stored_or_not, strict=True):
            if isinstance(stored, Failed):
                spill.failed = stored
            elif stored:
                spill.outcome = Outcome.STORED

    def _outgoing(self, spill: Spill) -> Outgoing:
        slot, header = spill.slot, spill.header
        if header is None:
            raise RuntimeError("a spill that was not admitted has no header")

        def intact() -> bool:
            """Nobody has touched the slot since the ticket was given, and it is what was sealed."""
            found = self._state.verify(slot, spill.expected)
            if found == header:
                return True
            spill.outcome = found if isinstance(found, Miss) else Miss.TORN
            return False

        parts = spill.form.outgoing(slot, header, spill.address, spill.note)
        return Outgoing(spill.address.name, parts, intact)


def _ticket(spill: Spill) -> Ticket:
    if spill.ticket is None:
        raise RuntimeError("a spill that was not admitted has no ticket")
    return spill.ticket
