"""Conditions on redundancy of tier 2 that is asked for and not kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from console.alerts.conditions.condition import (
    Finding,
    Snapshot,
    Tables,
    ValuesOf,
    name_of,
    verdict,
)
from console.alerts.state.lifecycle import Verdict
from telemetry.queries import TOPIC, ResultSeries
from telemetry.topics import FLEET
from telemetry.units import counted

# By what the metric says.
_CAUSES: Final = {
    "over_budget": "links had no room in time",
    "full": "other agents were full",
    "failed": "other agents failed or could not be reached",
}


def not_kept(tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach for each code that rules ask for and streams do not have, and for each node whose agent has
    stored more columns alone, in its own tier 2, than the threshold. That is gone once
    its streams need no redundancy any more, though the window has it still."""
    for one in snapshot.without_holders:
        shards = counted(one.shards, "shard is", "shards are")
        how = f"with {one.instead} instead of {one.code}" if one.instead else "without redundancy"
        said = f"{shards} stored {how}: {one.why[:1].lower()}{one.why[1:].rstrip('.')}"
        labels = {"redundancy": one.code, **({"instead": one.instead} if one.instead else {})}
        evidence = {"shards": one.shards}
        yield Finding(FLEET, verdict(breach=True), said, one.shards, 0, labels, evidence)
    limit = values(FLEET)["columns"]
    for node, counts in _alone(tables["alone"]).items():
        count = sum(counts.values())
        columns = counted(count, "column")
        said = f"{node} stored {columns} on its own disk alone within 5 minutes, without redundancy"
        said += _why(counts)
        found = verdict(breach=count > limit) if node in snapshot.redundant_nodes else Verdict.GONE
        yield Finding(FLEET, found, said, count, limit, {"node": node})


def _alone(lines: Iterable[ResultSeries]) -> dict[str, dict[str, float]]:
    """By node and why, how many columns it has stored alone."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if known := line.numbers:
            found.setdefault(name_of(line.labels[TOPIC]), {})[line.labels["why"]] = sum(known)
    return found


def _why(counts: Mapping[str, float]) -> str:
    most = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    said = [f"{_CAUSES.get(why, why)} ({count:,.0f})" for why, count in most if count]
    return f": {', '.join(said)}" if said else ""
