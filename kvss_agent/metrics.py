"""The agent's numbers, for Prometheus and for the stream. Names and meanings: docs/metrics.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import psutil

from telemetry.emit.exposition import Page
from telemetry.metrics import Catalog, Metric, Sink

if TYPE_CHECKING:
    from kvss_agent.agent import Agent
    from kvss_agent.http.server import HttpPolicy

METRICS: Final = Catalog()
_counter, _gauge, _histogram = METRICS.counter, METRICS.gauge, METRICS.histogram

UP_SINCE = _gauge("kvss_up_since_seconds", "When the agent started, in seconds since 1970.")
READY = _gauge("kvss_ready", "1 when everything that the desired document asks for is ready.")
GENERATION = _gauge(
    "kvss_generation", "Generation of the desired document: desired and observed.", "which"
)
CONSOLE = _counter(
    "kvss_console_calls_total", "Calls to the console (joining, heartbeats), by result.", "what"
)
CPU = _counter("kvss_cpu_seconds_total", "CPU time of the agent.")
RESIDENT = _gauge("kvss_resident_bytes", "Memory of the process, arenas included.")
GRANTED = _gauge("kvss_granted_bytes", "Memory granted to shards.")
CONNECTIONS = _gauge("kvss_connections", "Connections of drivers and agents.")
STRANGERS = _gauge(
    "kvss_unproven_connections", "Data-plane connections whose peer is not authenticated yet."
)
DISPLACED = _counter(
    "kvss_displaced_connections_total",
    "Unauthenticated data-plane connections that were closed to make room for others.",
)
HTTP_CONNECTIONS = _gauge(
    "kvss_http_connections", "Connections of the control API, by whether a token was presented.", "peer"
)
HTTP_REFUSED = _counter(
    "kvss_http_refused_total",
    "Connections of the control API that were closed, by the limit that they exceeded.",
    "bound",
)
ENDED = _counter("kvss_connections_ended_total", "Connections that were closed, by cause.", "cause")
SLOTS = _gauge("kvss_shard_slots", "Slot limit: slots that may be used.", "shard")
SLOT_BYTES = _gauge("kvss_shard_slot_bytes", "Size of a slot.", "shard")
APPLIED = _gauge("kvss_shard_applied", "Number of the last applied evict.", "shard")
QUEUED = _gauge(
    "kvss_shard_queued_evicts", "Evicts that were accepted and are not applied yet.", "shard"
)
WAITING = _gauge("kvss_shard_waiting_requests", "Refills, deletes and fills that are waiting.", "shard")
LEASES = _gauge("kvss_shard_leases", "Leases on slots.", "shard")
EVENTS = _counter(
    "kvss_shard_events_total",
    "Events of the columns of a shard, evicts over shared memory included.",
    "shard",
    "event",
)
EVICT = _histogram(
    "kvss_evict_seconds",
    "Time of an evict in the agent, from its frame to its seal; without evicts over shared memory.",
    "shard",
)
REFILL = _histogram(
    "kvss_refill_seconds",
    "Time of a refill in the agent, from its start to the last byte sent.",
    "shard",
)
BYTES = _counter("kvss_bytes_total", "Payload bytes moved over sockets.", "shard", "direction")
SHARD_CPU = _counter(
    "kvss_shard_cpu_seconds_total", "CPU time spent on a shard's evicts and refills.", "shard"
)
TIER2_COLUMNS = _gauge("kvss_tier2_columns", "Columns in tier 2.")
TIER2_BYTES = _gauge(
    "kvss_tier2_bytes",
    "Bytes in tier 2 and their limit, of the store and of each org, by its isolation tag.",
    "tag",
    "which",
)
TIER2_SPILLS = _counter("kvss_tier2_spills_total", "By what became of them.", "outcome")
TIER2_RECALLS = _counter("kvss_tier2_recalls_total", "By what became of them.", "outcome")
TIER2_FAULTS = _counter("kvss_tier2_faults_total", "Errors of the disk or bucket, by reason.", "outcome")
TIER2_EXPIRED = _counter(
    "kvss_tier2_expired_total", "Columns that were removed because they had expired."
)
TIER2_OVERSTAY = _gauge(
    "kvss_tier2_overstay_seconds_max", "The longest time that an expired column stayed in tier 2."
)
TIER2_WORK = _counter("kvss_tier2_work_seconds_total", "Time spent on tier-2 requests, by verb.", "verb")
TIER2_WORK_BYTES = _counter(
    "kvss_tier2_work_bytes_total", "Bytes moved by tier-2 requests, by verb.", "verb"
)


def page(agent: Agent) -> str:
    made = Page(agent.limits)
    collect(agent, made)
    return str(made)


def collect(agent: Agent, into: Sink) -> None:
    """All of them, as they are now. From any thread."""
    process = psutil.Process()
    cpu = process.cpu_times()
    generation = agent.desired.generation if agent.desired else 0
    into.put(UP_SINCE, [({}, agent.started_at)])
    into.put(CONSOLE, [({"what": what}, n) for what, n in sorted(agent.membership_status.calls.items())])
    into.put(READY, [({}, int(agent.is_ready))])
    into.put(
        GENERATION,
        [({"which": "desired"}, generation), ({"which": "observed"}, agent.observed_generation)],
    )
    into.put(CPU, [({}, cpu.user + cpu.system)])
    into.put(RESIDENT, [({}, process.memory_info().rss)])
    into.put(GRANTED, [({}, agent.granted_bytes)])
    into.put(CONNECTIONS, [({}, agent.plane.connections)])
    into.put(STRANGERS, [({}, agent.plane.admission.strangers)])
    into.put(DISPLACED, [({}, agent.plane.admission.displaced)])
    put_http(into, agent.http, HTTP_CONNECTIONS, HTTP_REFUSED)
    ended = sorted(agent.plane.breaches.copy().items())
    into.put(ENDED, [({"cause": cause}, count) for cause, count in ended])
    _shards(agent, into)
    if agent.tier_requests.store:
        _tier2(asdict(agent.tier_requests.store.stats()), into)


def put_http(into: Sink, policy: HttpPolicy, connections: Metric, refused: Metric) -> None:
    """What stands at an HTTP server, and what has hit its bounds."""
    admission = policy.admission
    into.put(
        connections,
        [({"peer": "proven"}, admission.proven), ({"peer": "stranger"}, admission.strangers)],
    )
    into.put(refused, [({"bound": bound}, count) for bound, count in sorted(policy.refused.items())])


def _shards(agent: Agent, into: Sink) -> None:
    shards = [({"shard": name}, shard) for name, shard in list(agent.shards.items())]
    states = [(labels, shard.state()) for labels, shard in shards]
    latencies = [(labels, agent.plane.latencies_of(labels["shard"])) for labels, _ in shards]
    into.put(SLOTS, [(labels, shard.core.slots) for labels, shard in shards])
    into.put(SLOT_BYTES, [(labels, shard.arena.slot_bytes) for labels, shard in shards])
    for metric, key in (
        (APPLIED, "applied"),
        (QUEUED, "queued_evicts"),
        (WAITING, "waiting_requests"),
        (LEASES, "leases"),
    ):
        into.put(metric, [(labels, state[key]) for labels, state in states])
    into.put(
        EVENTS,
        [
            ({**labels, "event": event}, count)
            for labels, state in states
            for event, count in state["counts"].items()
        ],
    )
    into.put(EVICT, [(labels, of.evict) for labels, of in latencies])
    into.put(REFILL, [(labels, of.refill) for labels, of in latencies])
    into.put(
        BYTES,
        [
            ({**labels, "direction": direction}, count)
            for labels, of in latencies
            for direction, count in (("in", of.evicted_bytes), ("out", of.refilled_bytes))
        ],
    )
    into.put(SHARD_CPU, [(labels, of.cpu_seconds) for labels, of in latencies])


def _tier2(stats: dict[str, Any], into: Sink) -> None:
    of_orgs = [
        ({"tag": tag, "which": which}, value)
        for tag, values in sorted(stats["orgs"].items())
        for which, value in zip(("held", "cap"), values, strict=True)
    ]
    into.put(TIER2_COLUMNS, [({}, stats["columns"])])
    into.put(
        TIER2_BYTES,
        [
            ({"tag": "", "which": "held"}, stats["bytes"]),
            ({"tag": "", "which": "cap"}, stats["cap_bytes"]),
            *of_orgs,
        ],
    )
    for metric, verb in (
        (TIER2_SPILLS, "spills"),
        (TIER2_RECALLS, "recalls"),
        (TIER2_FAULTS, "faults"),
    ):
        into.put(metric, [({"outcome": reason}, count) for reason, count in sorted(stats[verb].items())])
    into.put(TIER2_EXPIRED, [({}, stats["expired"])])
    into.put(TIER2_OVERSTAY, [({}, stats["overstay_seconds_max"])])
    work = sorted(stats["work"].items())
    into.put(TIER2_WORK, [({"verb": verb}, one["seconds"]) for verb, one in work])
    into.put(TIER2_WORK_BYTES, [({"verb": verb}, one["bytes"]) for verb, one in work])
