"""Recalling: columns from files back to slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvss_agent.mover import zero
from kvss_agent.shard import seal
from kvss_agent.shard.seal import HEADER_BYTES, Column, Header, Miss
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Arriving, Failed
from kvss_agent.tier2.column_file import Form
from kvss_agent.tier2.parts.execution import gather_whole
from kvss_agent.tier2.parts.removal import Remover
from kvss_agent.tier2.parts.state import StoreState
from kvss_agent.tier2.parts.statistics import Work

_DAMAGE: Final = (Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)


@dataclass(eq=False, slots=True)
class Recall:
    """One column of a batch on its way back, and what was found."""

    address: Address
    slot: memoryview
    sequence: int
    form: Form
    found: Header | Miss | None = None
    failed: Failed | None = None


class Recaller:
    """Admits recalls, reads their files into slots, and gives each what was found."""

    def __init__(self, state: StoreState, remover: Remover) -> None:
        self._state, self._work, self._remover = state, state.execution, remover

    async def recall(self, recalls: Sequence[Recall], work: Work) -> None:
        """Give each what was found. Who waits keeps nothing from being evicted."""
        await self._work.as_admitted(recalls, self._admit_readers, lambda some: self._read(some, work))

    def _admit_readers(self, recalls: Sequence[Recall]) -> tuple[list[Recall], list[Recall]]:
        """Those whose columns nobody evicts from now on, and those that wait for one to be written."""
        admitted, waiting = [], []
        for recall in recalls:
            address = recall.address
            if self._state.is_closed(address):
                recall.found = Miss.ABSENT
            elif self._state.index.is_written(address):
                waiting.append(recall)
            elif self._state.index.knows(address) or self._state.may_be_elsewhere(address):
                self._state.index.begin_read(address)
                admitted.append(recall)
            else:
                recall.found = Miss.ABSENT
        return admitted, waiting

    async def _read(self, recalls: list[Recall], work: Work, *, again: bool = True) -> None:
        """Read, seal, and let the index know what there was. `again`: read another copy where there is
        one and this one is damaged."""
        try:
            far: list[Recall] = []
            front: list[Recall] = []
            for recall in recalls:
                (front if self._state.is_in_front(recall.address) else far).append(recall)
            await gather_whole(
                *(
                    self._work.run_in_threads(pool, self._load, self._work.runs(some))
                    for pool, some in ((self._work.front_reads, front), (self._work.reads, far))
                    if some
                )
            )
            for recall in recalls:
                self._conclude(recall, work)
        finally:
            for recall in recalls:
                self._state.index.end_read(recall.address)
            self._work.changed()
        damaged = {recall.address for recall in recalls if recall.found in _DAMAGE}
        removing = [address for address in damaged if not self._state.index.is_busy(address)]
        with self._state.counts.faults_counted():
            if removing:
                self._state.counts.damaged += len(removing)
                left = await self._remover.remove_damaged(removing)
                if again:
                    await self._read_again([one for one in recalls if one.address in left], work)
        with self._state.counts.faults_counted():
            # A cap may have been lowered while these could not be evicted.
            if any(map(self._state.index.exceeds, {recall.address.tag for recall in recalls})):
                await self._remover.trim()

    async def _read_again(self, recalls: Sequence[Recall], work: Work) -> None:
        admitted, _ = self._admit_readers(recalls)  # not those that are being written anew
        for recall in admitted:
            recall.found = None
        if admitted:
            await self._read(admitted, work, again=False)

    def _conclude(self, recall: Recall, work: Work) -> None:
        address, found = recall.address, recall.found
        if recall.failed:
            self._state.counts.count_fault(recall.failed)
            recall.found = Miss.LOST
        elif self._state.is_closed(address):  # it waits for us, and what was read goes with the file
            recall.found = Miss.ABSENT
        elif isinstance(found, Header):
            size = recall.form.file_bytes(found.length)
            # Where another agent wrote it, that one knows since when; or a listing does, if it is gone.
            self._state.index.adopt(address, size, written=self._state.clock())
            _seal(recall.slot, found, Column(address.key, address.tag, recall.sequence))
            work.bytes += size
        elif found is Miss.ABSENT:
            self._state.index.remove(address)

    def _load(self, run: Sequence[Recall]) -> None:
        """In a thread: read the files, which have one form, into the slots and check them. A miss leaves
        no bytes there."""
        try:
            self._load_once(run)
            damaged = [one for one in run if one.found in _DAMAGE]
            if damaged and self._state.shared:
                # Another agent may have written another column over it meanwhile: then the name is gone.
                self._load_once(damaged)
        finally:
            for recall in run:
                if not isinstance(recall.found, Header):
                    zero(recall.slot[HEADER_BYTES:])

    def _load_once(self, run: Sequence[Recall]) -> None:
        if columns := self._state.columns_in(run[0].form):
            arriving = [Arriving(one.address.name, one.slot, one.address.column(0)) for one in run]
            for recall, answer in zip(run, columns.load_columns(arriving), strict=True):
                if isinstance(answer, Failed):
                    recall.failed = answer
                else:
                    recall.found = answer
            return
        landings = [
            recall.form.incoming(recall.slot, recall.address, self._state.mover) for recall in run
        ]
        files = [
            (recall.address.name, landing.parts) for recall, landing in zip(run, landings, strict=True)
        ]
        for recall, landing, size in zip(run, landings, self._state.backend.read(files), strict=True):
            if isinstance(size, Failed):
                recall.failed = size
            elif size is None:
                recall.found = Miss.ABSENT
            else:
                recall.found = landing.accept(size)


def _seal(slot: memoryview, found: Header, column: Column) -> None:
    """Seal a slot whose payload has been found good."""
    slot[:HEADER_BYTES] = seal.pack(column, found.tokens, found.length, found.checksum)
