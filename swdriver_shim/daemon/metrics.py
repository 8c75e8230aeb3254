"""The driver's metrics, for Prometheus and for telemetry. Names and meanings: docs/metrics.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvss_agent.metrics import put_http
from swdriver_shim.cache.stock import SWEPT_SECONDS
from swdriver_shim.data_plane.paths import PathTraffic
from swdriver_shim.driver import Driver
from telemetry.emit.exposition import Page
from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink

if TYPE_CHECKING:
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
    "Columns copied between memory and tier 2, by result.",
    "what",
)
TIER2_BYTES = _counter(
    "swdriver_tier2_bytes_total", "Bytes spilled to tier 2 and recalled from it.", "what"
)
WORTH = _gauge(
    "swdriver_worth_tokens_min",
    "Least number of tokens for which fetching is faster than computing, as measured; +Inf for never.",
    "org",
    "tier",
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
    "stream",
    "session",
    "node",
    "tier",
    "port_leaf",
    "nic_leaf",
    "link",
    "box",
    "direction",
)
PATH_SECONDS = _histogram(
    "tidegate_driver_path_seconds",
    "Duration of transfers of batches of columns of one request, by path: out to a node, or in from it.",
    "stream",
    "session",
    "node",
    "tier",
    "nic_leaf",
    "link",
    "direction",
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
    observed = shim.observed()
    into.put(UP_SINCE, [({}, shim.started_at)])
    into.put(READY, [({}, int(shim.is_ready))])
    into.put(CONSOLE, [({"what": what}, n) for what, n in sorted(shim.membership_status.calls.items())])
    transfers = shim.transfers
    into.put(
        TRANSFERS, [({"which": "used"}, transfers.used), ({"which": "most"}, transfers.shares.total)]
    )
    into.put(
        TURNED_AWAY,
        [({"because": "bytes"}, transfers.refused), ({"because": "verbs"}, shim.verbs.refused)],
    )
    put_http(into, shim.http, HTTP_CONNECTIONS, HTTP_REFUSED)
    into.put(
        GENERATION,
        [
            ({"which": "desired"}, observed["generation"]),
            ({"which": "observed"}, observed["observed_generation"]),
        ],
    )
    into.put(
        LEFT_TO_MOVE,
        [
            ({"group": one["group"], "index": str(one["index"])}, one["left_to_move"])
            for one in observed["shards"]
        ],
    )
    into.put(
        SLOTS,
        [
            ({"group": one["name"], "which": which}, one[which])
            for one in observed["groups"]
            for which in ("slots", "used", "free")
        ],
    )
    traffic = shim.traffic()
    into.put(PATH_BYTES, [(_way(stream, one), one.bytes) for stream, one in traffic])
    into.put(PATH_SECONDS, [_speed(stream, one) for stream, one in traffic if one.direction != "pull"])
    if observed["groups"]:
        _tiers(shim.driver, into)
        _orgs(shim.driver, into)
        keeps_objects = isinstance(shim.driver, Driver) and shim.driver.keeps_objects
        into.put(TOO_LARGE, [({}, shim.mover.objects.too_large)] if keeps_objects else [])
    into.put(
        LMCACHE,
        [
            ({"org": org, "what": what}, count)
            for org, counts in shim.fronts.items()
            for what, count in sorted(counts.items())
        ],
    )


def _way(stream: str, one: PathTraffic) -> dict[str, str]:
    path = one.path
    return {
        "stream": stream,
        "session": path.session if path else "",
        "node": path.node if path else "",
        "tier": path.tier if path else "unknown",
        "port_leaf": path.port_leaf if path else "",
        "nic_leaf": path.nic_leaf if path else "",
        "link": path.link if path else "",
        "box": path.box if path else "",
        "direction": one.direction,
    }


def _speed(stream: str, one: PathTraffic) -> tuple[dict[str, str], Histogram]:
    way = _way(stream, one)
    labels = {name: way[name] for name in PATH_SECONDS.labels}
    return labels, Histogram(one.counts, one.seconds)


def _tiers(driver: Decider, into: Sink) -> None:
    overstay = driver.ledger.overstay
    spilled, recalled = driver.ledger.tier2.spilled, driver.ledger.tier2.recalled
    into.put(OVERSTAY_COLUMNS, [({}, overstay.columns)])
    into.put(OVERSTAY, [({}, overstay.seconds_max)])
    into.put(
        TIER2_COLUMNS,
        [
            ({"what": "spilled"}, spilled.columns),
            ({"what": "not_spilled"}, spilled.not_spilled),
            ({"what": "no_time"}, spilled.no_time),
            ({"what": "recalled"}, recalled.columns),
            ({"what": "not_recalled"}, recalled.not_recalled),
            ({"what": "restored"}, recalled.restored),
            ({"what": "late"}, recalled.late),
        ],
    )
    into.put(
        TIER2_BYTES,
        [({"what": "spilled"}, spilled.bytes), ({"what": "recalled"}, recalled.bytes)],
    )


def _orgs(driver: Decider, into: Sink) -> None:
    orgs = [({"org": org.org}, org) for org in driver.statistics.orgs()]
    into.put(ORG_BYTES, [(labels, org.bytes) for labels, org in orgs])
    into.put(
        EXPIRED,
        [
            ({**labels, "tier": tier}, count)
            for labels, org in orgs
            for tier, count in (("dram", org.expired.dram), ("tier2", org.expired.tier2))
        ],
    )
    into.put(ORG_OVERSTAY, [(labels, org.expired.overstay_seconds_max) for labels, org in orgs])
    into.put(REQUESTS, [(labels, org.requests) for labels, org in orgs])
    into.put(REQUESTED, [(labels, org.requested_tokens) for labels, org in orgs])
    into.put(
        HIT,
        [
            ({**labels, "tier": tier}, count)
            for labels, org in orgs
            for tier, count in org.hit_tokens.items()
        ],
    )
    into.put(
        MISSED,
        [
            ({**labels, "reason": reason}, count)
            for labels, org in orgs
            for reason, count in org.missed_tokens.items()
        ],
    )
    into.put(
        WORTH,
        [
            ({"org": org, "tier": tier}, math.inf if tokens is None else tokens)
            for org, one in driver.statistics.break_even().items()
            for tier, tokens in (("dram", one.dram_tokens_min), ("tier2", one.tier2_tokens_min))
        ],
    )
    moved = [({"org": org}, one) for org, one in driver.statistics.transfers().items()]
    into.put(EVICT, [(labels, one.evict) for labels, one in moved])
    into.put(REFILL, [(labels, one.refill) for labels, one in moved])
    into.put(
        BYTES,
        [
            ({**labels, "direction": direction}, count)
            for labels, one in moved
            for direction, count in (("out", one.evicted_bytes), ("in", one.refilled_bytes))
        ],
    )
    into.put(FAILED, [(labels, one.failed_columns) for labels, one in moved])
