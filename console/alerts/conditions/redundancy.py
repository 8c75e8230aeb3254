"""Conditions on redundancy of tier 2 that is asked for and not kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from console.alerts.conditions.condition import (
    Condition,
    Finding,
    Snapshot,
    Tables,
    ValuesOf,
    name_of,
    verdict,
)
from telemetry.queries import TOPIC
from telemetry.topics import FLEET


def not_kept(query: str, threshold: str) -> Condition:
    """Breach for each code that rules ask for and streams do not have, and for each node whose agent has
    stored more columns alone, in its own tier 2, than the threshold."""

    def condition(tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
        for one in snapshot.without_holders:
            shards = "1 shard is" if one.shards == 1 else f"{one.shards:,} shards are"
            how = f"with {one.instead} instead of {one.code}" if one.instead else "without redundancy"
            said = f"{shards} stored {how}: {one.why[:1].lower()}{one.why[1:].rstrip('.')}"
            labels = {"redundancy": one.code, **({"instead": one.instead} if one.instead else {})}
            evidence = {"shards": one.shards}
            yield Finding(FLEET, verdict(breach=True), said, one.shards, 0, labels, evidence)
        limit = values(FLEET)[threshold]
        for line in tables[query]:
            if known := line.numbers:
                node, count = name_of(line.labels[TOPIC]), sum(known)
                said = f"{node} stored {count:,.0f} columns on its own disk alone, without redundancy"
                found = verdict(breach=count > limit)
                yield Finding(FLEET, found, said, count, limit, {"node": node})

    return condition
