"""The agent's numbers, for Prometheus and for the stream. Names and meanings: docs/metrics.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import psutil

from telemetry.emit.exposition import Page
from telemetry.metrics import Catalog, Metric, Sink, put

if TYPE_CHECKING:
    from kvss_agent.agent import Agent
    from kvss_agent.http.server import HttpPolicy
    from kvss_agent.redundancy.stores import RedundantStores

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
PULLED = _counter("kvss_pulled_bytes_total", "Bytes of columns that came from other agents in moves.")
RESTED = _counter(
    "kvss_pull_rests_seconds_total",
    "Time that moves rested: for their budget, and to yield to other traffic on their way.",
    "why",
)
BORROWED = _counter(
    "kvss_borrowed_bytes_total",
    "Bytes that were copied from a sibling's slots, on the same agent or on another one.",
    "from",
)
NOT_BORROWED = _counter(
    "kvss_not_borrowed_columns_total",
    "Columns that were to be borrowed and did not come, by why.",
    "why",
)
BORROWS_LATE = _counter(
    "kvss_borrows_late_total", "Borrows that were given up when their time was over."
)
BORROW_RESTED = _counter(
    "kvss_borrow_rests_seconds_total",
    "Time that borrowing rested: for its budget, and to yield to other traffic on its way.",
    "why",
)
BACKGROUND_BYTES = _counter(
    "kvss_background_bytes_total",
    "Bytes that keep to a budget of links, beside those of moves and borrowing: `holders`, fragments "
    "that were stored or repaired; `tier2`, what was written to a bucket or a shared directory.",
    "what",
)
BACKGROUND_RESTED = _counter(
    "kvss_background_rests_seconds_total",
    "Time that these rested: for their budget, and to yield to other traffic on their way.",
    "what",
    "why",
)
REDUNDANT_COLUMNS = _gauge(
    "kvss_redundancy_columns", "Columns that are stored as fragments on several agents.", "shard"
)
INCOMPLETE = _gauge(
    "kvss_redundancy_incomplete_columns",
    "Columns of which a fragment is missing, as far as the agent knows.",
    "shard",
)
UNREACHABLE_HOLDERS = _gauge(
    "kvss_redundancy_unreachable_holders", "Agents with fragments that can't be reached.", "shard"
)
HOLDER_FAULTS = _counter(
    "kvss_redundancy_holder_faults_total",
    "Requests that an agent with fragments failed: it could not be reached, or did not do it in time.",
    "shard",
)
PARITY_READS = _counter(
    "kvss_redundancy_parity_reads_total",
    "Columns that were read with parity, since a fragment with data was missing or bad.",
    "shard",
)
HEDGES = _counter(
    "kvss_redundancy_hedges_total",
    "Columns that an agent with fragments was late with: parity was asked for beside it (`begun`), or "
    "was not, since that would have been too many (`over_budget`).",
    "shard",
    "what",
)
LATE_HOLDERS = _gauge(
    "kvss_redundancy_late_holders",
    "Agents with fragments that were late, and are asked last until they answer in time.",
    "shard",
)
REPAIRED = _counter(
    "kvss_redundancy_repaired_total", "Columns whose missing fragments were made again.", "shard"
)
REPAIR_BYTES = _counter(
    "kvss_redundancy_repair_bytes_total", "Bytes that were read and written to repair columns."
)
STORED_ALONE = _counter(
    "kvss_redundancy_stored_alone_total",
    "Columns that were stored in tier 2 of this agent alone, by why: others were full, have failed or "
    "can't be reached, or the links to them had no room in time.",
    "why",
)
REDUNDANT_SPILLS = _counter(
    "kvss_redundancy_spills_total", "Redundant spills, by what became of them.", "outcome"
)
REDUNDANT_RECALLS = _counter(
    "kvss_redundancy_recalls_total", "Recalls from fragments, by what became of them.", "outcome"
)
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
TIER2_FRONT = _gauge(
    "kvss_tier2_front_bytes",
    "Bytes in the directory in front of tier 2, those that only it has (waiting), and their limit.",
    "which",
)
TIER2_WAITING = _gauge(
    "kvss_tier2_front_waiting_columns", "Columns that only the front of tier 2 has so far."
)
TIER2_GIVEN_UP = _counter(
    "kvss_tier2_front_given_up_total",
    "Columns that waited in front of tier 2 when their shard left, and could not be copied behind.",
)
TIER2_WAITING_SECONDS = _gauge(
    "kvss_tier2_front_waiting_seconds",
    "For how long the oldest of these columns has waited. Not where columns wait until they make room.",
)
TIER2_READS = _counter(
    "kvss_tier2_reads_total", "Files read, where tier 2 has a directory in front.", "level"
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
    put(into, UP_SINCE, agent.started_at)
    put(into, CONSOLE, agent.membership_status.calls)
    put(into, READY, int(agent.is_ready))
    put(into, GENERATION, {"desired": generation, "observed": agent.observed_generation})
    put(into, CPU, cpu.user + cpu.system)
    put(into, RESIDENT, process.memory_info().rss)
    put(into, GRANTED, agent.granted_bytes)
    put(into, CONNECTIONS, agent.plane.connections)
    put(into, STRANGERS, agent.plane.admission.strangers)
    put(into, DISPLACED, agent.plane.admission.displaced)
    put_http(into, agent.http, HTTP_CONNECTIONS, HTTP_REFUSED)
    put(into, ENDED, agent.plane.breaches)
    put(into, PULLED, agent.background_totals.bytes)
    put(into, RESTED, agent.background_totals.rested_seconds)
    borrowing = agent.borrowing
    put(into, BORROWED, dict(borrowing.borrowed.bytes))
    put(into, NOT_BORROWED, dict(borrowing.borrowed.missed))
    put(into, BORROWS_LATE, borrowing.borrowed.late)
    put(into, BORROW_RESTED, dict(borrowing.totals.rested_seconds))
    background = {"holders": agent.redundant.totals}
    if (store := agent.tier_requests.store) and store.write_rate.bytes_per_second:
        background["tier2"] = store.written
    put(into, BACKGROUND_BYTES, {what: totals.bytes for what, totals in background.items()})
    rested = {what: dict(totals.rested_seconds) for what, totals in background.items()}
    put(into, BACKGROUND_RESTED, rested)
    _redundancy(agent.redundant, into)
    _shards(agent, into)
    if agent.tier_requests.store:
        _tier2(asdict(agent.tier_requests.store.stats()), into)


def put_http(into: Sink, policy: HttpPolicy, connections: Metric, refused: Metric) -> None:
    """What stands at an HTTP server, and what has hit its bounds."""
    admission = policy.admission
    put(into, connections, {"proven": admission.proven, "stranger": admission.strangers})
    put(into, refused, policy.refused)


def _redundancy(redundant: RedundantStores, into: Sink) -> None:
    shown = {name: one for name in redundant.shards() if (one := redundant.shown(name))}
    put(into, REDUNDANT_COLUMNS, {name: one["columns"] for name, one in shown.items()})
    put(into, INCOMPLETE, {name: one["incomplete"] for name, one in shown.items()})
    unreachable = {  # who can't begin reaches nobody
        name: one["holders"] if one["state"] == "refused" else len(one["unreachable"])
        for name, one in shown.items()
    }
    put(into, UNREACHABLE_HOLDERS, unreachable)
    put(into, HOLDER_FAULTS, {name: one["holder_faults"] for name, one in shown.items()})
    put(into, PARITY_READS, {name: one["parity_reads"] for name, one in shown.items()})
    hedges = {"begun": "hedges", "over_budget": "hedges_over_budget"}
    by_what = {name: {what: one[key] for what, key in hedges.items()} for name, one in shown.items()}
    put(into, HEDGES, by_what)
    put(into, LATE_HOLDERS, {name: len(one["late"]) for name, one in shown.items()})
    put(into, REPAIRED, {name: one["repaired"] for name, one in shown.items()})
    put(into, REPAIR_BYTES, redundant.repair_bytes)
    put(into, STORED_ALONE, dict(redundant.stored_alone))
    put(into, REDUNDANT_SPILLS, redundant.spills())
    put(into, REDUNDANT_RECALLS, redundant.recalls())


def _shards(agent: Agent, into: Sink) -> None:
    shards = agent.shards.copy()
    states = {name: shard.state() for name, shard in shards.items()}
    latencies = {name: agent.plane.latencies_of(name) for name in shards}
    put(into, SLOTS, {name: shard.core.slots for name, shard in shards.items()})
    put(into, SLOT_BYTES, {name: shard.arena.slot_bytes for name, shard in shards.items()})
    for metric, key in (
        (APPLIED, "applied"),
        (QUEUED, "queued_evicts"),
        (WAITING, "waiting_requests"),
        (LEASES, "leases"),
    ):
        put(into, metric, {name: state[key] for name, state in states.items()})
    put(into, EVENTS, {name: state["counts"] for name, state in states.items()})
    put(into, EVICT, {name: of.evict for name, of in latencies.items()})
    put(into, REFILL, {name: of.refill for name, of in latencies.items()})
    moved = {name: {"in": of.evicted_bytes, "out": of.refilled_bytes} for name, of in latencies.items()}
    put(into, BYTES, moved)
    put(into, SHARD_CPU, {name: of.cpu_seconds for name, of in latencies.items()})


def _tier2(stats: dict[str, Any], into: Sink) -> None:
    held = {"": (stats["bytes"], stats["cap_bytes"]), **stats["orgs"]}
    put(into, TIER2_COLUMNS, stats["columns"])
    put(into, TIER2_BYTES, {tag: {"held": bytes_, "cap": cap} for tag, (bytes_, cap) in held.items()})
    put(into, TIER2_SPILLS, stats["spills"])
    put(into, TIER2_RECALLS, stats["recalls"])
    put(into, TIER2_FAULTS, stats["faults"])
    put(into, TIER2_EXPIRED, stats["expired"])
    if "front_bytes" in (front := stats["properties"]):
        each = {"held": "bytes", "waiting": "waiting_bytes", "cap": "cap_bytes"}
        put(into, TIER2_FRONT, {which: front[f"front_{name}"] for which, name in each.items()})
        put(into, TIER2_WAITING, front["front_waiting"])
        put(into, TIER2_GIVEN_UP, front["given_up"])
        if front["front_copies_at_once"]:
            put(into, TIER2_WAITING_SECONDS, front["front_waiting_seconds"])
        put(into, TIER2_READS, {level: front[f"read_{level}"] for level in ("front", "behind")})
    put(into, TIER2_OVERSTAY, stats["overstay_seconds_max"])
    put(into, TIER2_WORK, {verb: one["seconds"] for verb, one in stats["work"].items()})
    put(into, TIER2_WORK_BYTES, {verb: one["bytes"] for verb, one in stats["work"].items()})
