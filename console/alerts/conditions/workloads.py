"""Conditions on workloads, and on what looks after them. Pure.

They read what the orchestrator has written. While none leads that is old, so one condition is on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from console.alerts.conditions.condition import (
    Finding,
    Snapshot,
    Tables,
    ValuesOf,
    WorkloadState,
    verdict,
)
from telemetry.topics import FLEET, of_workload
from telemetry.units import counted, duration

UNDONE: Final = ("failed", "undone")


def not_ready(_tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach for each workload that has not been ready for a while, and is not being deleted."""
    for one in snapshot.workloads:
        topic = of_workload(one.name)
        seconds = _seconds(one.not_ready_since, snapshot.at)
        threshold = values(topic)["not_ready_seconds"]
        yield Finding(
            topic,
            verdict(breach=one.not_ready_since is not None and seconds > threshold),
            _not_ready(one, seconds),
            seconds,
            threshold,
            evidence=_evidence(one) if one.not_ready_since else {},
        )


def _not_ready(one: WorkloadState, seconds: float) -> str:
    if one.not_ready_since is None:
        return f"{one.name} is ready"
    why = f": {one.message[:1].lower()}{one.message[1:].rstrip('.')}" if one.message else ""
    return f"{one.name} has not been ready for {duration(round(seconds))}{why}"


def _evidence(one: WorkloadState) -> dict[str, Any]:
    return {
        "reason": one.reason,
        "since": f"{one.not_ready_since:%Y-%m-%d %H:%M:%S} UTC" if one.not_ready_since else None,
        "ready_replicas": f"{one.ready_replicas} of {one.replicas}",
        "instances": ", ".join(one.instances),
    }


def rollout_stopped(_tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach for each workload whose latest rollout is paused for a reason of its own, or was rolled
    back lately. One that people pause is none."""
    for one in snapshot.workloads:
        last = one.rollout
        if last is None:
            continue
        topic = of_workload(one.name)
        threshold = values(topic)["told_seconds"]
        age = _seconds(last.ended_at, snapshot.at)
        is_paused = last.phase == "paused" and bool(last.reason)
        is_undone = last.phase in UNDONE and age <= threshold
        told = {"paused": "is paused", "failed": "has failed", "undone": "was rolled back"}
        did = told.get(last.phase, last.phase)
        why = f": {last.sentence[:1].lower()}{last.sentence[1:].rstrip('.')}" if last.sentence else ""
        yield Finding(
            topic,
            verdict(breach=is_paused or is_undone),
            f"the rollout of {one.name} to revision {last.revision} {did}{why}",
            evidence={
                "reason": last.reason,
                "switched": f"{last.switched} of {last.total} replicas",
                "started": f"{last.started_at:%Y-%m-%d %H:%M:%S} UTC",
                "ended": f"{last.ended_at:%Y-%m-%d %H:%M:%S} UTC" if last.ended_at else None,
            },
        )


def nobody_leads(_tables: Tables, snapshot: Snapshot, _values: ValuesOf) -> Iterator[Finding]:
    """Breach while there are workloads and no orchestrator is the leader."""
    count = len(snapshot.workloads)
    sentence = f"no orchestrator leads {counted(count, 'workload')}"
    is_breach = count > 0 and not snapshot.has_leader
    yield Finding(FLEET, verdict(breach=is_breach), sentence, evidence={"workloads": count})


def cluster_silent(_tables: Tables, snapshot: Snapshot, values: ValuesOf) -> Iterator[Finding]:
    """Breach while the leader has not heard from the Cluster Server. Without a leader nobody knows."""
    since = snapshot.cluster_silent_since if snapshot.has_leader else None
    seconds = _seconds(since, snapshot.at)
    threshold = values(FLEET)["silent_seconds"]
    sentence = f"the Cluster Server has not reported for {duration(round(seconds))}"
    evidence = {"since": f"{since:%Y-%m-%d %H:%M:%S} UTC" if since else None}
    found = verdict(breach=since is not None and seconds > threshold)
    yield Finding(FLEET, found, sentence, seconds, threshold, evidence=evidence)


def _seconds(since: datetime | None, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds()) if since else 0.0
