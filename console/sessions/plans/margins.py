"""Whether columns that are stored redundantly survive that one more agent is taken away. Pure.

An agent says of a shard at which places columns lack a fragment, and how many one column lacks at most.
What holders have that it can't reach, or has not heard of yet, nobody knows: they count as lacking all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from console.placement.rules import Redundancy
from telemetry.units import counted

REPORTED: Final = timedelta(seconds=60)  # what was said before that is not relied on
NOTICED: Final = timedelta(seconds=20)  # after which an agent has seen that a holder was away
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
    """What the agent of a stream has said last. `incomplete_at`: columns that lack the fragment of this
    node. `holders_since`: when the newest holder came that it has heard of; None if it can't say.
    `has_stored`: whether it has ever stored columns so."""

    state: str
    reason: str
    incomplete: int
    incomplete_at: Mapping[str, int]
    most_lacking: int
    unreachable: frozenset[str]
    holders_since: datetime | None
    has_stored: bool
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
        return said is not None and said.state == REFUSED and not said.has_stored

    def unknown(self, now: datetime) -> str:
        """Why nobody can say how it is, as a sentence; empty if its agent has said so."""
        report = self.report
        if report is None or now - report.at > REPORTED:
            return f"{self.agent} has not reported on the fragments of {self.stream} lately."
        if report.state != READY:
            reason = report.reason or report.state
            return f"{self.agent} can't tell yet about the fragments of {self.stream}: {reason}."
        if report.holders_since is None:
            return (
                f"{self.agent} can't tell yet about the fragments of {self.stream}: it applies a new "
                "document, or its agent is of an earlier version."
            )
        return ""

    def _changed(self, node: str) -> str:
        """As `unknown`, where the state of another holder has changed since."""
        for one in self.holders:
            is_new = self.report and self.report.at < one.state_since + NOTICED
            if one.node != node and not one.away and is_new:
                return f"{one.node} changed a moment ago; {self.agent} looks what {self.stream} lacks."
        return ""

    @property
    def unusable(self) -> dict[str, str]:
        """The holders of which nobody knows what they have, and why."""
        found = {}
        for one in self.holders:
            if one.away:
                found[one.node] = one.away
            elif self.report and one.node in self.report.unreachable:
                found[one.node] = "unreachable"
            elif self._is_unheard_of(one):
                found[one.node] = "not repaired yet"
        return found

    def _is_unheard_of(self, one: Holding) -> bool:
        since = self.report.holders_since if self.report else None
        return since is None or one.since > since

    def is_complete(self, since: datetime, now: datetime) -> bool:
        """Whether all holders can be reached, and those that came later than this have the fragments of
        all columns."""
        report = self.report
        if report is None or self.unknown(now) or report.unreachable:
            return False
        if len(self.holders) < self.code.holders or any(map(self._is_unheard_of, self.holders)):
            return False
        return not any(report.incomplete_at.get(one.node) for one in self.holders if one.since >= since)

    def why_not_without(self, node: str, now: datetime) -> str:
        """Why columns could be lost if this holder was taken away now; empty if none would be."""
        if unknown := self.unknown(now) or self._changed(node):
            return unknown
        assert self.report is not None  # noqa: S101 - or else it is unknown
        where = {name: why for name, why in self.unusable.items() if name != node}
        missing = len(where) + self.code.holders - len(self.holders)
        lacking = {
            name: "not repaired yet"
            for name, columns in self.report.incomplete_at.items()
            if columns and name != node and name not in where
        }
        # One of those columns may lack so many of these.
        missing += self.report.most_lacking if lacking else 0
        if missing < self.code.parity:
            return ""
        at = ", ".join(f"{name} ({why})" for name, why in {**where, **lacking}.items())
        loses = counted(self.code.parity, "agent")
        lack = f"{self._lack(self.report.incomplete)}{f', at {at}' if at else ''}"
        return f"{lack}, and {self.code.value} survives the loss of {loses}."

    def _lack(self, incomplete: int) -> str:
        if not incomplete:
            return f"columns of {self.stream} may lack a fragment"
        if incomplete == 1:
            return f"1 column of {self.stream} lacks a fragment"
        return f"{incomplete:,} columns of {self.stream} lack a fragment"
