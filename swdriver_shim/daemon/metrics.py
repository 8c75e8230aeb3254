"""The driver's metrics, for Prometheus and for telemetry. Names and meanings: docs/metrics.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvss_agent.metrics import put_http
from swdriver_shim.cache.overstay import SWEPT_SECONDS
from telemetry.emit.exposition import Page
from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink, put

if TYPE_CHECKING:
    # The console reads the catalog, and needs no driver for it.
    from swdriver_shim.daemon.shim import Shim
    from swdriver_shim.decider.decider import Decider

METRICS: Final = Catalog()
_counter, _gauge, _histogram = METRICS.counter, METRICS.gauge, METRICS.histogram

UP_SINCE = _gauge("swdriver_up_since_seconds", "When the driver started, in seconds since 1970.")
READY = _gauge("swdriver_ready", "1 when all shards are where they should be.")
GENERATION = _gauge(
    "swdriver_generation", "Generation of the desired document: desired and observed.", "which"
)
CONSOLE = _counter(
    "swdriver_console_calls_total",
    "Requests to join the console's fleet and heartbeats, by result.",
    "what",
)
HTTP_CONNECTIONS = _gauge(
    "swdriver_http_connections",
    "Connections of the HTTP API, by whether they have shown a token.",
    "peer",
)
HTTP_REFUSED = _counter(
    "swdriver_http_refused_total",
    "Connections of the HTTP API that were closed, by the limit that was reached.",
    "bound",
)
TRANSFERS = _gauge(
    "swdriver_transfer_bytes", "Bytes of requests and answers: in use, and the limit.", "which"
)
TURNED_AWAY = _counter(
    "swdriver_turned_away_total",
    "Requests refused because the org had too many bytes or verbs in progress.",
    "because",
)
LEFT_TO_MOVE = _gauge(
    "swdriver_shard_left_to_move",
    "Slots whose bytes are still at the old home of a moving shard.",
    "group",
    "index",
)
SLOTS = _gauge("swdriver_slots", "Slots of a group: the slot limit, used, free.", "group", "which")
OVERSTAY_COLUMNS = _counter(
    "swdriver_overstay_columns_total",
    f"Columns kept in memory more than {SWEPT_SECONDS:g} s past their TTL; never served.",
)
OVERSTAY = _gauge(
    "swdriver_overstay_seconds_max", "The longest time that a column stayed in memory past its TTL."
)
TIER2_COLUMNS = _counter(
    "swdriver_tier2_columns_total",
    "Columns copied between memory and tier 2, by result; redundant: the spilled ones that were to be "
    "stored redundantly.",
    "what",
)
TIER2_BYTES = _counter(
    "swdriver_tier2_bytes_total", "Bytes spilled to tier 2 and recalled from it.", "what"
)
PROMOTED_COLUMNS = _counter(
    "swdriver_promoted_columns_total",
    "Columns recalled from tier 2 before a request: promoted, and of those used by a request, or "
    "unused (removed before one came).",
    "what",
)
PROMOTED_BYTES = _counter(
    "swdriver_promoted_bytes_total", "Bytes recalled from tier 2 before a request."
)
RECALL_REQUESTS = _counter(
    "swdriver_recall_requests_total",
    "Prompts that brains asked to recall from tier 2, or to borrow, while requests were queued: asked, "
    "unknown, no_sibling, busy, too_many, late or malformed.",
    "what",
)
BORROWS = _counter(
    "swdriver_borrows_total",
    "Prompts to borrow from a sibling: borrowed, partly, failed (none of it came), refused (by this "
    "driver's own nodes), nothing (it had none), slower (than to compute it), away (it does not "
    "answer), in_memory (nothing was missing), busy (with others) or no_sibling (of that name).",
    "what",
)
BORROWED_COLUMNS = _counter(
    "swdriver_borrowed_columns_total",
    "Columns that were to come from siblings: borrowed, not_borrowed, late (expired); and "
    "those that were lent.",
    "what",
)
BORROWED_BYTES = _counter(
    "swdriver_borrowed_bytes_total", "Bytes borrowed, by the path from the sibling's nodes.", "path"
)
BORROW = _histogram(
    "swdriver_borrow_seconds", "Duration of borrowing up to 64 columns, by path.", "path"
)
WORTH = _gauge(
    "swdriver_worth_tokens_min",
    "Least number of tokens for which fetching is faster than computing, as measured; +Inf for never.",
    "org",
    "tier",
)
DISPLACEMENT = _gauge(
    "swdriver_displacement_in_use",
    "1 for the displacement policy that an org's traffic has chosen.",
    "org",
    "policy",
)
DISPLACEMENT_HIT_RATE = _gauge(
    "swdriver_displacement_hit_rate",
    "Hit rate of each competing displacement policy on a sample of the org's traffic.",
    "org",
    "policy",
)
ORG_BYTES = _gauge("swdriver_org_bytes", "Memory used by an org's columns.", "org")
EXPIRED = _counter(
    "swdriver_expired_columns_total",
    "Columns that expired, by tier.",
    "org",
    "tier",
)
ORG_OVERSTAY = _gauge(
    "swdriver_org_overstay_seconds_max",
    "The longest time that a column of an org stayed in memory past its TTL; never served.",
    "org",
)
REQUESTS = _counter("swdriver_requests_total", "Prompts requested.", "org")
REQUESTED = _counter("swdriver_requested_tokens_total", "Tokens requested.", "org", corrected=True)
HIT = _counter(
    "swdriver_hit_tokens_total", "Tokens that were hit, by tier.", "org", "tier", corrected=True
)
MISSED = _counter(
    "swdriver_missed_tokens_total",
    "Tokens that were missed, by reason.",
    "org",
    "reason",
    corrected=True,
)
EVICT = _histogram(
    "swdriver_evict_seconds",
    "Duration of a store: from the decision to the last byte of all columns.",
    "org",
)
REFILL = _histogram(
    "swdriver_refill_seconds",
    "Duration of a load: from the decision to the last byte of all columns.",
    "org",
)
BYTES = _counter(
    "swdriver_bytes_total", "Bytes of an org that were evicted and refilled.", "org", "direction"
)
FAILED = _counter(
    "swdriver_evict_failed_columns_total",
    "Columns that could not be evicted to all their agents.",
    "org",
)
PATH_BYTES = _counter(
    "tidegate_driver_path_bytes_total",
    "Bytes of columns, by path: out to a node, in from it, or pulled by it from another node in a move."
    " The tier is `unknown` for homes without a path.",
    *("stream", "session", "node", "tier", "port_leaf", "nic_leaf", "link", "box", "direction"),
)
PATH_SECONDS = _histogram(
    "tidegate_driver_path_seconds",
    "Duration of transfers of batches of columns of one request, by path: out to a node, or in from it.",
    *("stream", "session", "node", "tier", "nic_leaf", "link", "direction"),
)
TOO_LARGE = _counter(
    "swdriver_objects_too_large_total",
    "Puts that were refused because a value does not fit a column.",
)
LMCACHE = _counter(
    "swdriver_lmcache_total",
    "Requests and connections of LMCache's engines, by result.",
    "org",
    "what",
)


def page(shim: Shim) -> str:
    made = Page(shim.limits)
    collect(shim, made)
    return str(made)


def collect(shim: Shim, into: Sink) -> None:
    """Collect all metrics. May be called from any thread."""
    from swdriver_shim.data_plane.paths import labels_of
    from swdriver_shim.driver import Driver

    observed = shim.observed()
    put(into, UP_SINCE, shim.started_at)
    put(into, READY, int(shim.is_ready))
    put(into, CONSOLE, shim.membership_status.calls)
    put(into, TRANSFERS, {"used": shim.transfers.used, "most": shim.transfers.shares.total})
    put(into, RECALL_REQUESTS, dict(shim.recalls))
    put(into, TURNED_AWAY, {"bytes": shim.transfers.refused, "verbs": shim.verbs.refused})
    put_http(into, shim.http, HTTP_CONNECTIONS, HTTP_REFUSED)
    generations = {"desired": observed["generation"], "observed": observed["observed_generation"]}
    put(into, GENERATION, generations)
    into.put(
        LEFT_TO_MOVE,
        [
            ({"group": one["group"], "index": str(one["index"])}, one["left_to_move"])
            for one in observed["shards"]
        ],
    )
    slots = {
        one["name"]: {which: one[which] for which in ("slots", "used", "free")}
        for one in observed["groups"]
    }
    put(into, SLOTS, slots)
    traffic = [
        ({"stream": stream, **labels_of(one.path), "direction": one.direction}, one)
        for stream, one in shim.shards.traffic()
    ]
    into.put(PATH_BYTES, [(labels, one.bytes) for labels, one in traffic])
    into.put(
        PATH_SECONDS,
        [
            (labels, Histogram(one.counts, one.seconds))
            for labels, one in traffic
            if one.direction != "pull"
        ],
    )
    if observed["groups"]:
        _tiers(shim.driver, into)
        _orgs(shim.driver, into)
        keeps_objects = isinstance(shim.driver, Driver) and shim.driver.keeps_objects
        into.put(TOO_LARGE, [({}, shim.mover.objects.too_large)] if keeps_objects else [])
    put(into, LMCACHE, shim.fronts)


def _tiers(driver: Decider, into: Sink) -> None:
    overstay = driver.ledger.overstay
    spilled, recalled = driver.ledger.tier2.spilled, driver.ledger.tier2.recalled
    put(into, OVERSTAY_COLUMNS, overstay.columns)
    put(into, OVERSTAY, overstay.seconds_max)
    columns = {
        "spilled": spilled.columns,
        "redundant": spilled.redundant,
        "not_spilled": spilled.not_spilled,
        "no_time": spilled.no_time,
        "recalled": recalled.columns,
        "not_recalled": recalled.not_recalled,
        "restored": recalled.restored,
        "late": recalled.late,
    }
    put(into, TIER2_COLUMNS, columns)
    put(into, TIER2_BYTES, {"spilled": spilled.bytes, "recalled": recalled.bytes})
    promoted = driver.ledger.tier2.promoted
    columns = {"promoted": promoted.columns, "used": promoted.used, "unused": promoted.unused}
    put(into, PROMOTED_COLUMNS, columns)
    put(into, PROMOTED_BYTES, promoted.bytes)
    borrowed, borrowing = driver.ledger.tier2.borrowed, driver.borrowing
    put(into, BORROWS, dict(borrowing.outcomes))
    columns = {
        "borrowed": borrowed.columns,
        "not_borrowed": borrowed.not_recalled,
        "late": borrowed.late,
        "lent": driver.ledger.lent_columns,
    }
    put(into, BORROWED_COLUMNS, columns)
    put(into, BORROWED_BYTES, dict(borrowing.bytes))
    put(into, BORROW, dict(borrowing.seconds))


def _orgs(driver: Decider, into: Sink) -> None:
    orgs = {one.org: one for one in driver.statistics.orgs()}
    expired = {org: {"dram": one.expired.dram, "tier2": one.expired.tier2} for org, one in orgs.items()}
    put(into, ORG_BYTES, {org: one.bytes for org, one in orgs.items()})
    choices = {org: one.displacement for org, one in orgs.items() if one.displacement}
    put(into, DISPLACEMENT, {org: {one.in_use: 1} for org, one in choices.items()})
    rates = {org: {each.policy: each.hit_rate for each in one.standings} for org, one in choices.items()}
    put(into, DISPLACEMENT_HIT_RATE, rates)
    put(into, EXPIRED, expired)
    put(into, ORG_OVERSTAY, {org: one.expired.overstay_seconds_max for org, one in orgs.items()})
    put(into, REQUESTS, {org: one.requests for org, one in orgs.items()})
    put(into, REQUESTED, {org: one.requested_tokens for org, one in orgs.items()})
    put(into, HIT, {org: one.hit_tokens for org, one in orgs.items()})
    put(into, MISSED, {org: one.missed_tokens for org, one in orgs.items()})
    worth = {
        org: {"dram": _or_never(one.dram_tokens_min), "tier2": _or_never(one.tier2_tokens_min)}
        for org, one in driver.statistics.break_even().items()
    }
    put(into, WORTH, worth)
    moved = driver.statistics.transfers()
    put(into, EVICT, {org: one.evict for org, one in moved.items()})
    put(into, REFILL, {org: one.refill for org, one in moved.items()})
    sizes = {org: {"out": one.evicted_bytes, "in": one.refilled_bytes} for org, one in moved.items()}
    put(into, BYTES, sizes)
    put(into, FAILED, {org: one.failed_columns for org, one in moved.items()})


def _or_never(tokens: int | None) -> float:
    return math.inf if tokens is None else tokens
