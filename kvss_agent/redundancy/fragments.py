"""Column files as fragments on several agents: see `Backend`.

A fragment's note says how long its file is and which fragments belong together: those that one `write`
has made. Whoever reads takes the fragments with data, and others in place of those that are missing.

A file is stored when `data` of its fragments are; which ones it lacks is remembered, and `repair` makes
them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import (
    Fault,
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
        gatherer, lister, remover = Gatherer(state), Lister(state), Remover(state)
        self.write, self.read = Writer(state).write, Reader(state, gatherer).read
        self.look, self.files = lister.look, lister.files
        self.delete, self.purge = remover.delete, remover.purge
        self.repair = Repairer(state, gatherer).repair
        self.forget, self.put_off = state.incomplete.forget, state.incomplete.put_off
        self.reach_holders, self.close = self.holders.reach, self.holders.close

    def open(self) -> None:
        answers = self.holders.each(lambda holder, _: holder.open())
        need(answers, self._state.code.data)

    def set_caps(self, caps: Caps) -> None:
        """Each holder has caps of its own."""

    def tidy(self) -> None:
        """Nothing is left undone: whoever has the budget calls `repair`."""

    def damaged(self, names: Sequence[str]) -> list[bool]:
        self.delete(names)
        return [False] * len(names)

    def some_incomplete(self, most: int) -> list[Address]:
        """Those that have waited longest, of those that can be repaired now."""
        return self._state.incomplete.some(most, self.holders.usable)

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
