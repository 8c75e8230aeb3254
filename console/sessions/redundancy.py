"""Redundancy of the streams of a driver, as its page and the API show it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.utils import timezone

from console.fleet.models import Driver
from console.placement.topology import Tier
from console.sessions import endpoints
from console.sessions.budgets import Budget, Budgets
from console.sessions.holders import Assignment
from console.sessions.models import FragmentHolder, Stream, StreamRedundancy
from console.sessions.rules import effective_rules_of_all

LOOKS: Final = {"ready": "ok", "indexing": "warn", "refused": "bad"}


@dataclass(frozen=True, slots=True)
class Row:
    """`holders`: in the order of the fragments; none without redundancy. `why`: of that, or why a holder
    that should be replaced is not. `budget`: at what rate fragments may move. `said`: by the agent,
    last; None while it has not."""

    stream: Stream
    holders: list[FragmentHolder]
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
        known = {endpoints.address(one.node, Tier.SPINE): one.node.name for one in self.holders}
        return [known.get(address, address) for address in self.said.unreachable] if self.said else []

    def reaches(self, holder: FragmentHolder) -> bool | None:
        """Whether the agent can reach it; None while that has not said, or could not begin."""
        if self.said is None or self.said.state == "refused":
            return None
        return holder.node.name not in self.unreachable

    @property
    def complete_share(self) -> float | None:
        """Of its columns; None where all have all of their fragments."""
        if self.said is None or not self.said.incomplete:
            return None
        return max(0.0, 1 - self.said.incomplete / max(1, self.said.columns))

    @property
    def progress(self) -> str:
        """Of repair, in words."""
        if self.said is None:
            return ""
        columns = "1 column" if self.said.columns == 1 else f"{self.said.columns:,} columns"
        if not self.said.incomplete:
            return columns
        lack = "lacks" if self.said.incomplete == 1 else "lack"
        return f"{self.said.incomplete:,} of {columns} {lack} a fragment"


def of_driver(driver: Driver) -> list[Row]:
    """Of each of its streams; none for a driver without a running job, or without redundancy."""
    assignment = Assignment(timezone.now())
    fragments = assignment.known
    streams = Stream.objects.filter(job__driver=driver, job__running=True)
    budgets, rules, found = Budgets(fragments), effective_rules_of_all(), []
    related = ("job__driver", "job__session", "redundancy")
    for stream in streams.select_related(*related).order_by("group", "index"):
        shard = fragments.shard_of(stream)
        if shard is None:
            continue
        why = assignment.choice(shard).why
        said = getattr(stream, "redundancy", None)
        budget = budgets.of_fragments(stream, rules(stream.job.session.org_id).moves_percent)
        found.append(Row(stream, fragments.holders_of(shard), why, budget, said))
    return found
