"""Redundancy of the streams of a driver, as its page and the API show it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.utils import timezone

from console.fleet.models import Driver
from console.placement.rules import Redundancy
from console.sessions import endpoints
from console.sessions.budgets import Budget, Budgets
from console.sessions.holders import Assignment
from console.sessions.models import FragmentHolder, Session, Stream, StreamRedundancy
from console.sessions.rules import effective_rules_of_all
from telemetry.units import counted

LOOKS: Final = {"ready": "ok", "indexing": "warn", "refused": "bad"}


@dataclass(frozen=True, slots=True)
class Row:
    """`holders`: in the order of the fragments; none without redundancy. `asked`: by the rules of its
    session. `why`: it is not so, or why a holder that should be replaced is not. `budget`: at what rate
    fragments may move. `said`: by the agent, last; None while it has not."""

    stream: Stream
    holders: list[FragmentHolder]
    asked: str
    why: str
    budget: Budget | None
    said: StreamRedundancy | None

    @property
    def code(self) -> str:
        return self.holders[0].code if self.holders else "none"

    @property
    def since(self) -> datetime:
        """When the last of them was assigned."""
        return max(one.since for one in self.holders)

    @property
    def look(self) -> str:
        if self.said is None:
            return "off"
        is_well = not self.said.incomplete and not self.said.unreachable
        return LOOKS.get(self.said.state, "off") if is_well or self.said.state != "ready" else "warn"

    @property
    def state(self) -> str:
        return self.said.state if self.said else "not reported yet"

    @property
    def unreachable(self) -> list[str]:
        """Names of nodes; an address that is no holder's any more stays one."""
        known = self._names
        return [known.get(address, address) for address in self.said.unreachable] if self.said else []

    @property
    def _names(self) -> dict[str, str]:
        """Of the nodes of its holders, by address."""
        return {endpoints.address_for_agents(one.node): one.node.name for one in self.holders}

    @property
    def reason(self) -> str:
        """What its agent gives for its state, with names of nodes in place of their addresses."""
        said = self.said.reason if self.said else ""
        for address, name in self._names.items():
            said = re.sub(rf"{re.escape(address)}(?!\w)", name, said)
        return said

    @property
    def incomplete_at(self) -> dict[str, int]:
        """By node, how many columns lack its fragment; only where some do."""
        counts = dict(enumerate(self.said.incomplete_at)) if self.said else {}
        return {one.node.name: count for one in self.holders if (count := counts.get(one.place))}

    def reaches(self, holder: FragmentHolder) -> bool | None:
        """Whether the agent can reach it; None while that has not said, or could not begin."""
        if self.said is None or self.said.state == "refused":
            return None
        return holder.node.name not in self.unreachable

    @property
    def complete_share(self) -> float | None:
        """Of its columns; None where all have all of their fragments, or not all are counted yet."""
        if self.said is None or not 0 < self.said.incomplete <= self.said.columns:
            return None
        return max(0.0, 1 - self.said.incomplete / max(1, self.said.columns))

    @property
    def progress(self) -> str:
        """Of repair, in words."""
        if self.said is None:
            return ""
        incomplete, away = self.said.incomplete, self.unreachable
        if not incomplete:
            unknown = f"; what {', '.join(away)} lack{'s' if len(away) == 1 else ''} is unknown"
            return f"{counted(self.said.columns, 'column')}{unknown if away else ''}"
        # Columns are counted once they have been listed; that some lack a fragment may be known before.
        if self.said.columns >= incomplete:
            which = f"{incomplete:,} of {counted(self.said.columns, 'column')}"
        else:
            which = counted(incomplete, "column")
        return f"{which} {'lacks' if incomplete == 1 else 'lack'} a fragment"


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a session. `code`: of shards with different ones the weakest. `why`: it is not what its rules
    ask for; empty if it is."""

    code: str
    why: str


def kept_by(session: Session, asked: Redundancy) -> Kept | None:
    """None where no job runs."""
    streams = Stream.objects.filter(job__session=session, job__running=True)
    codes = [one or Redundancy.NONE.value for one in streams.values_list("code", flat=True)]
    if not codes:
        return None
    code = weakest(codes)
    if code == asked.value:
        return Kept(code, "")
    found, keys = Assignment(timezone.now()), set(streams.values_list("pk", flat=True))
    whys = (found.division(one).why for one in found.streams if one.stream in keys)
    return Kept(code, next(filter(None, whys), "Agents are being assigned."))


def weakest(codes: Iterable[str]) -> str:
    return min(codes, key=lambda one: Redundancy(one).strictness)


def of_driver(driver: Driver) -> list[Row]:
    """Of each of its streams; none for a driver without a running job, or without redundancy."""
    assignment = Assignment(timezone.now())
    fragments = assignment.known
    streams = Stream.objects.filter(job__driver=driver, job__running=True)
    stored = {one.stream: one for one in assignment.streams}
    budgets, rules, found = Budgets(fragments), effective_rules_of_all(), []
    related = ("job__driver", "job__session", "redundancy")
    for stream in streams.select_related(*related).order_by("group", "index"):
        if stream.pk not in stored:
            continue
        its = assignment.division(stored[stream.pk])
        said = getattr(stream, "redundancy", None)
        budget = budgets.of_fragments(stream, rules(stream.job.session.org_id).moves_percent)
        holders = fragments.holders_of_stream(stream)
        found.append(Row(stream, holders, its.asked.value, its.why, budget, said))
    return found
