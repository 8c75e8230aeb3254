"""Column files as fragments on several agents: see `Backend`.

A fragment's note says how long its file is and which fragments belong together: those that one `write`
has made. Whoever reads takes the fragments with data, and others in place of those that are missing.

A file is stored when `data` of its fragments are; which ones it lacks is remembered, and `repair` makes
them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.holder import Holder
from kvss_agent.redundancy.parts.gatherer import Gatherer
from kvss_agent.redundancy.parts.holders import Holders, need
from kvss_agent.redundancy.parts.listing import Lister
from kvss_agent.redundancy.parts.reads import Reader
from kvss_agent.redundancy.parts.removal import Remover
from kvss_agent.redundancy.parts.repairs import Repairer
from kvss_agent.redundancy.parts.state import AT_ONCE, State
from kvss_agent.redundancy.parts.writes import Writer
from kvss_agent.tier2.address import Address, Scope
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
from kvss_agent.tier2.index import Caps

__all__ = ["AT_ONCE", "Fragments"]


class Fragments:
    """The fragments of one shard's columns."""

    kind = "fragments"
    looks_together = True

    def __init__(
        self, code: ErasureCode, holders: Sequence[Holder], namespace: bytes, part: str, slot_bytes: int
    ) -> None:
        """`slot_bytes`: of the shard. The order of the holders is that of the fragments."""
        self.holders = Holders(code, holders, part)
        state = self._state = State(code, self.holders, namespace, part, slot_bytes + PAGE)
        gatherer = Gatherer(state)
        self._writer, self._reader = Writer(state), Reader(state, gatherer)
        self._repairer = Repairer(state, gatherer)
        self._lister, self._remover = Lister(state), Remover(state)

    # Start and end

    def open(self) -> None:
        answers = self.holders.each(lambda holder, _: holder.open())
        need(answers, self._state.code.data)

    def set_caps(self, caps: Caps) -> None:
        """Each holder has caps of its own."""

    def tidy(self) -> None:
        """Nothing is left undone: whoever has the budget calls `repair`."""

    def close(self) -> None:
        self.holders.close()

    # Files

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        return self._writer.write(files)

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        return self._reader.read(files)

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        return self._lister.look(names)

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        return self._lister.files(progress)

    def delete(self, names: Sequence[str]) -> None:
        self._remover.delete(names)

    def damaged(self, names: Sequence[str]) -> list[bool]:
        self._remover.delete(names)
        return [False] * len(names)

    def purge(self, scope: Scope) -> Removed:
        return self._remover.purge(scope)

    # Repair

    def repair(self, names: Sequence[str], *, one_by_one: bool = False) -> int:
        """See `Repairer`: at most AT_ONCE files."""
        return self._repairer.repair(names, one_by_one=one_by_one)

    def some_incomplete(self, most: int) -> list[Address]:
        """Those that have waited longest, of those that can be repaired now."""
        return self._state.incomplete.some(most, self.holders.usable)

    def forget(self, addresses: Sequence[Address]) -> None:
        """These files are not there any more."""
        self._state.incomplete.forget(addresses)

    def put_off(self, address: Address) -> None:
        """Not now: it is repaired later."""
        self._state.incomplete.put_off(address)

    def reach_holders(self) -> None:
        """Find out which of them can be reached: nobody asks for columns of an idle shard."""
        self.holders.reach()

    @property
    def is_superseded(self) -> bool:
        """Whether another agent has taken the place of this one at a holder."""
        return any(one.is_superseded for one in self.holders)

    @property
    def needs_listing(self) -> bool:
        """Whether a holder is reached that was not listed since it was started: it may have nothing."""
        return any(one.incarnation and not one.is_known for one in self.holders)

    # What is known

    @property
    def incomplete(self) -> int:
        return len(self._state.incomplete)

    @property
    def repaired(self) -> int:
        return self._state.repaired.value

    @property
    def parity_reads(self) -> int:
        """Reads that made a file with parity."""
        return self._state.parity_reads.value

    @property
    def hedges(self) -> int:
        """Files whose parity was asked for, since a holder was late."""
        return self._state.hedges.begun

    @property
    def hedges_over_budget(self) -> int:
        """Files that waited for a late holder, since too many were asked for twice."""
        return self._state.hedges.over_budget

    @property
    def late(self) -> list[str]:
        """The holders that are asked last, since they were late."""
        return self.holders.late

    @property
    def holder_faults(self) -> int:
        """Requests that holders failed."""
        return self.holders.faults

    def incomplete_at(self) -> list[int]:
        """By place of the holder, the files whose fragment is missing there."""
        return self._state.incomplete.at(self._state.code.fragments)

    @property
    def most_lacking(self) -> int:
        """How many fragments the file lacks that lacks most."""
        return self._state.incomplete.most

    def unreachable(self) -> list[str]:
        """The holders of which nobody knows now what they have."""
        return [one.address for one in self.holders if not one.is_known]

    def own_faults(self) -> Mapping[str, int]:
        return {Fault.UNREACHABLE: self.holder_faults}

    def properties(self) -> Mapping[str, bool | int]:
        return {
            "fragments": self._state.code.fragments,
            "incomplete": self.incomplete,
            "repaired": self.repaired,
            "parity_reads": self.parity_reads,
        }
