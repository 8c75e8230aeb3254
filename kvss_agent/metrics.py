"""The agent's numbers for Prometheus. Names and meanings: docs/metrics.md is written from this page."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil

from telemetry.exposition import Page

if TYPE_CHECKING:
    from kvss_agent.agent import Agent


def page(agent: Agent) -> str:
    made = Page()
    shards = list(agent.shards.items())
    states = [({"shard": name}, shard.state()) for name, shard in shards]
    process = psutil.Process()
    cpu = process.cpu_times()
    made.gauge(
        "kvss_up_since_seconds",
        "When the agent started, in seconds since 1970.",
        [({}, agent.started_at)],
    )
    made.gauge("kvss_ready", "1 when all that was asked for is there.", [({}, int(agent.is_ready))])
    made.gauge(
        "kvss_generation",
        "Of the desired document: told, and fully tried.",
        [
            ({"which": "desired"}, agent.desired.generation if agent.desired else 0),
            ({"which": "observed"}, agent.observed_generation),
        ],
    )
    made.counter("kvss_cpu_seconds_total", "CPU time of the agent.", [({}, cpu.user + cpu.system)])
    made.gauge(
        "kvss_resident_bytes",
        "Memory of the process, arenas included.",
        [({}, process.memory_info().rss)],
    )
    made.gauge("kvss_granted_bytes", "Memory granted to shards.", [({}, agent.granted_bytes)])
    made.gauge("kvss_connections", "Connections of drivers and agents.", [({}, agent.plane.connections)])
    made.counter(
        "kvss_connections_ended_total",
        "Connections that were ended, by why.",
        [({"cause": cause}, count) for cause, count in sorted(agent.plane.breaches.items())],
    )
    made.gauge(
        "kvss_shard_slots", "The line: slots in use.", [({"shard": n}, s.core.slots) for n, s in shards]
    )
    made.gauge(
        "kvss_shard_slot_bytes",
        "Size of a slot.",
        [({"shard": n}, s.arena.slot_bytes) for n, s in shards],
    )
    made.gauge(
        "kvss_shard_applied", "Number of the last applied evict.", [(n, s["applied"]) for n, s in states]
    )
    for key, text in (
        ("queued_evicts", "Evicts accepted and not applied."),
        ("waiting_requests", "Refills, deletes and fills that wait."),
        ("leases", "Leases on slots."),
    ):
        made.gauge(f"kvss_shard_{key}", text, [(labels, state[key]) for labels, state in states])
    made.counter(
        "kvss_shard_events_total",
        "What has happened to the columns of a shard.",
        [
            ({**labels, "event": event}, count)
            for labels, state in states
            for event, count in state["counts"].items()
        ],
    )
    latencies = [({"shard": name}, agent.plane.latencies_of(name)) for name, _ in shards]
    made.histogram(
        "kvss_evict_seconds",
        "From the frame to the seal, as the agent sees it; evicts over shm pass it by.",
        [(labels, one.evict) for labels, one in latencies],
    )
    made.histogram(
        "kvss_refill_seconds",
        "From its turn to the last byte sent.",
        [(labels, one.refill) for labels, one in latencies],
    )
    made.counter(
        "kvss_bytes_total",
        "Payload moved by streams.",
        [
            ({**labels, "direction": direction}, count)
            for labels, one in latencies
            for direction, count in (("in", one.evicted_bytes), ("out", one.refilled_bytes))
        ],
    )
    made.counter(
        "kvss_shard_cpu_seconds_total",
        "CPU time spent on a shard's evicts and refills.",
        [(labels, one.cpu_seconds) for labels, one in latencies],
    )
    if agent.tiering.store:
        _tier2(made, asdict(agent.tiering.store.stats()))
    return str(made)


def _tier2(made: Page, stats: dict) -> None:  # type: ignore[type-arg]
    made.gauge("kvss_tier2_columns", "Columns that are known to be there.", [({}, stats["columns"])])
    made.gauge(
        "kvss_tier2_bytes",
        "Held, and the cap, of the store and of each org.",
        [
            ({"org": "", "which": "held"}, stats["bytes"]),
            ({"org": "", "which": "cap"}, stats["cap_bytes"]),
            *(
                ({"org": org, "which": which}, value)
                for org, values in sorted(stats["orgs"].items())
                for which, value in zip(("held", "cap"), values, strict=True)
            ),
        ],
    )
    for verb in ("spills", "recalls", "faults"):
        made.counter(
            f"kvss_tier2_{verb}_total",
            "By what became of them." if verb != "faults" else "Of disk or bucket, by reason.",
            [({"outcome": reason}, count) for reason, count in sorted(stats[verb].items())],
        )
    made.counter(
        "kvss_tier2_expired_total",
        "Columns that were removed because they were too old.",
        [({}, stats["expired"])],
    )
    made.gauge(
        "kvss_tier2_overstay_seconds_max",
        "For how long one of them lay there beyond its time, at most.",
        [({}, stats["overstay_seconds_max"])],
    )
    made.counter(
        "kvss_tier2_work_seconds_total",
        "Time spent, by verb.",
        [({"verb": verb}, work["seconds"]) for verb, work in sorted(stats["work"].items())],
    )
    made.counter(
        "kvss_tier2_work_bytes_total",
        "Bytes moved, by verb.",
        [({"verb": verb}, work["bytes"]) for verb, work in sorted(stats["work"].items())],
    )
