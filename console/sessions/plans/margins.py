"""Whether columns that are stored redundantly survive that one more agent is taken away. Pure.

An agent says of a shard how many columns lack a fragment, and not which fragments those are. They may
be those of holders that are away, and of holders that came after all columns were complete last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from console.placement.rules import Redundancy

REPORTED: Final = timedelta(seconds=60)  # what was said before that is not relied on
NOTICED: Final = timedelta(seconds=20)  # after which an agent knows what a holder lacks that came back
READY: Final = "ready"
REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True)
class Holding:
    """A holder of one fragment of each column. `away`: the state of its node where that is lost, or is
    being taken away; else empty. `state_since`: that its node has its state."""

    node: str
    since: datetime
    state_since: datetime
    away: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What the agent of a stream has said last. `unreachable`: names of nodes. `complete_up_to`: when
    the newest holder had come of those with which no column lacked a fragment last."""

    state: str
    reason: str
    columns: int
    incomplete: int
    unreachable: frozenset[str]
    complete_up_to: datetime | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Margin:
    """Of a stream whose columns are stored redundantly. `agent`: the node whose agent stores them."""

    stream: str
    agent: str
    code: Redundancy
    holders: Sequence[Holding]
    column_bytes: int
    report: Report | None

    @property
    def is_unused(self) -> bool:
        """Whether its agent has never been able to store a column so."""
        said = self.report
        return said is not None and said.state == REFUSED and said.complete_up_to is None

    def unknown(self, now: datetime) -> str:
        """Why nobody can say how it is, as a sentence; empty if its agent has said so."""
        if self.report is None or now - self.report.at > REPORTED:
            return f"{self.agent} has not reported on the fragments of {self.stream} lately."
        if self.report.state != READY:
            reason = self.report.reason or self.report.state
            return f"{self.agent} can't tell yet about the fragments of {self.stream}: {reason}."
        return ""

    def _returned(self, node: str) -> str:
        """As `unknown`, where another holder has come back since."""
        for one in self.holders:
            is_new = self.report and self.report.at < one.state_since + NOTICED
            if one.node != node and not one.away and is_new:
                return f"{one.node} has just come back; {self.agent} looks what {self.stream} lacks."
        return ""

    @property
    def lacking(self) -> dict[str, str]:
        """The holders whose fragments columns may lack, and why."""
        found = {}
        for one in self.holders:
            if one.away:
                found[one.node] = one.away
            elif self.report and one.node in self.report.unreachable:
                found[one.node] = "unreachable"
            elif self._is_new(one):
                found[one.node] = "not repaired yet"
        return found

    def _is_new(self, one: Holding) -> bool:
        whole = self.report.complete_up_to if self.report else None
        return whole is None or one.since > whole

    @property
    def is_complete(self) -> bool:
        """Whether every column has all of its fragments, at the holders that there are now."""
        report = self.report
        if report is None or report.state != READY or report.incomplete or report.unreachable:
            return False
        return len(self.holders) == self.code.holders and not any(map(self._is_new, self.holders))

    def why_not_without(self, node: str, now: datetime) -> str:
        """Why columns could be lost if this holder was taken away now; empty if none would be."""
        if unknown := self.unknown(now) or self._returned(node):
            return unknown
        lacking = {name: why for name, why in self.lacking.items() if name != node}
        incomplete = self.report.incomplete if self.report else 0
        missing = len(lacking) + self.code.holders - len(self.holders)
        # Whose fragments those are nobody knows.
        missing = max(missing, bool(incomplete) and node not in self.lacking)
        if missing < self.code.parity:
            return ""
        at = ", ".join(f"{name} ({why})" for name, why in lacking.items())
        loses = "1 agent" if self.code.parity == 1 else f"{self.code.parity} agents"
        lack = f"{self._lack(incomplete)}{f', at {at}' if at else ''}"
        return f"{lack}, and {self.code.value} survives the loss of {loses}."

    def _lack(self, incomplete: int) -> str:
        if not incomplete:
            return f"columns of {self.stream} may lack a fragment"
        if incomplete == 1:
            return f"1 column of {self.stream} lacks a fragment"
        return f"{incomplete:,} columns of {self.stream} lack a fragment"
