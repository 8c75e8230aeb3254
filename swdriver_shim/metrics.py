"""The driver's numbers for Prometheus."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from swdriver_shim.driver import Driver
from telemetry.exposition import Page

if TYPE_CHECKING:
    from swdriver_shim.shim import Shim

ORGS_MAX = 200  # with labels of their own; the others are summed up under `other`


def page(shim: Shim) -> str:
    made = Page()
    observed = shim.observed()
    made.gauge(
        "swdriver_up_since_seconds",
        "When the driver started, in seconds since 1970.",
        [({}, shim.started_at)],
    )
    made.gauge(
        "swdriver_ready", "1 when all shards are where they should be.", [({}, int(shim.is_ready))]
    )
    made.gauge(
        "swdriver_generation",
        "Of the desired document: told, and followed.",
        [
            ({"which": "desired"}, observed["generation"]),
            ({"which": "observed"}, observed["observed_generation"]),
        ],
    )
    made.gauge(
        "swdriver_shard_left_to_move",
        "Slots whose bytes are still at the old home.",
        [
            ({"group": one["group"], "index": str(one["index"])}, one["left_to_move"])
            for one in observed["shards"]
        ],
    )
    made.gauge(
        "swdriver_slots",
        "Slots of a group: below the line, used, free.",
        [
            ({"group": one["name"], "which": which}, one[which])
            for one in observed["groups"]
            for which in ("slots", "used", "free")
        ],
    )
    if observed["groups"]:
        _orgs(made, shim)
    return str(made)


def _orgs(made: Page, shim: Shim) -> None:
    overstay = shim.driver.ledger.overstay
    made.counter(
        "swdriver_overstay_columns_total",
        "Columns that lay in memory beyond their time, never served.",
        [({}, overstay.columns)],
    )
    made.gauge("swdriver_overstay_seconds_max", "For how long, at most.", [({}, overstay.seconds_max)])
    if isinstance(shim.driver, Driver) and shim.driver.keeps_objects:
        made.counter(
            "swdriver_objects_too_large_total",
            "Times that values were refused because one does not fit a column.",
            [({}, shim.driver.objects.too_large)],
        )
    made.counter(
        "swdriver_lmcache_total",
        "Requests and connections of LMCache's engines, by what became of them.",
        [
            ({"org": org, "what": what}, count)
            for org, counts in shim.fronts.items()
            for what, count in sorted(counts.items())
        ],
    )
    _tier2(made, shim)
    orgs = sorted(shim.driver.orgs(), key=lambda org: -org.requested_tokens)
    named = [(org.org if place < ORGS_MAX else "other", org) for place, org in enumerate(orgs)]
    made.gauge(
        "swdriver_org_bytes",
        "Memory that an org's columns take.",
        _summed([({"org": name}, org.bytes) for name, org in named]),
    )
    made.counter(
        "swdriver_requested_tokens_total",
        "Tokens asked for.",
        _summed([({"org": name}, org.requested_tokens) for name, org in named]),
    )
    made.counter(
        "swdriver_hit_tokens_total",
        "Tokens that were there, by tier.",
        _summed(
            [
                ({"org": name, "tier": tier}, count)
                for name, org in named
                for tier, count in org.hit_tokens.items()
            ]
        ),
    )
    made.counter(
        "swdriver_missed_tokens_total",
        "Tokens that were not, by reason.",
        _summed(
            [
                ({"org": name, "reason": reason}, count)
                for name, org in named
                for reason, count in org.missed_tokens.items()
            ]
        ),
    )


def _tier2(made: Page, shim: Shim) -> None:
    flow, worth = shim.driver.ledger.tier2.flow, shim.driver.worth()
    made.counter(
        "swdriver_tier2_columns_total",
        "Columns on their way between memory and tier 2, by what became of them.",
        [
            ({"what": what}, getattr(flow, what))
            for what in (
                "spilled",
                "not_spilled",
                "no_time",
                "recalled",
                "not_recalled",
                "restored",
                "late",
            )
        ],
    )
    made.counter(
        "swdriver_tier2_bytes_total",
        "Bytes that went to tier 2 and came back.",
        [
            ({"what": "spilled"}, flow.spilled_bytes),
            ({"what": "recalled"}, flow.recalled_bytes),
        ],
    )
    made.gauge(
        "swdriver_worth_tokens_min",
        "From how many tokens on fetching is faster than computing, as measured; +Inf for never.",
        [
            ({"org": org, "tier": tier}, math.inf if tokens is None else tokens)
            for org, one in list(worth.items())[:ORGS_MAX]
            for tier, tokens in (("dram", one.dram_tokens_min), ("tier2", one.tier2_tokens_min))
        ],
    )


def _summed(samples: list[tuple[dict[str, str], int]]) -> list[tuple[dict[str, str], float]]:
    """One sample for each set of labels."""
    sums: dict[tuple[tuple[str, str], ...], int] = {}
    for labels, value in samples:
        key = tuple(labels.items())
        sums[key] = sums.get(key, 0) + value
    return [(dict(key), value) for key, value in sums.items()]
