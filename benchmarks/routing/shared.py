"""How soon first tokens come where replicas borrow from each other. Part of `benchmarks.sharing`.

Four emulated replicas get the conversation trace by the brain's choice, at 60 and 90 % of capacity, with
and without borrowing. A borrowed token takes what 160 KiB (the KV of a model of 70 billion parameters in
8 bits) take at a quarter of 400 Gbit/s; `tier2` is the same at 3.1 GB/s, a shared disk. Compared are the
requests that borrowed, with themselves in the run without. What this machine does meanwhile changes
nothing, and each run has the same figures. But one request that goes elsewhere sends many after it
elsewhere: of some fifty requests the ratio is 0.7 at one speed and 2.6 at another one near it, and any
change of the brain's choice deals them anew. So each load is played at many speeds near it, the requests
of all of them are compared, and fewer than `JUDGED_FROM` are judged by no goal.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Final

from benchmarks.harness import Row, percentile, progress, traces_folder
from benchmarks.routing.fleet import Fleet, Result, Router, Transfers
from benchmarks.routing.policies import Exact, Ours, Sharing
from benchmarks.routing.timing import served
from benchmarks.routing.traffic import Asking, conversation, orgs

REPLICAS: Final = 4
COLUMNS: Final = 32_000  # of each
REQUESTS, QUICK_REQUESTS = 800, 300
LOADS: Final = (60, 90)
NEAR: Final = tuple(percent / 100 for percent in range(90, 111))  # times the speed of a load
IN_FLIGHT: Final = 32
TOKEN_BYTES: Final = 160 << 10
WAYS: Final = {"memory": 12.5e9, "tier2": 3.1e9}  # bytes a second
WAIT_SECONDS: Final = 0.005  # until the first byte
GOAL: Final = 1 / 0.6
JUDGED_FROM: Final = 500  # requests that borrowed; of 250 the ratio is 1.2 to 1.9, of 1,000 1.4 to 1.8


def ttft(*, quick: bool) -> Iterator[Row]:
    count = QUICK_REQUESTS if quick else REQUESTS
    requests = _requests(count)
    lasts = requests[-1].at - requests[0].at
    progress("capacity of four replicas")
    capacity = lasts / _play(count, Exact(), 1.0, 0.0, IN_FLIGHT * REPLICAS).ended
    for load in LOADS:
        speeds = [near * capacity * load / 100 for near in ((1.0,) if quick else NEAR)]
        progress(f"conversation at {load} %, without borrowing")
        alone = [_play(count, Ours(), speed, 0.0) for speed in speeds]
        for way, rate in WAYS.items():
            progress(f"conversation at {load} %, {way}")
            shared = [_play(count, Sharing(), speed, TOKEN_BYTES / rate) for speed in speeds]
            pairs = list(zip(alone, shared, strict=True))
            yield from rows(f"{load}.{way}", pairs, GOAL if way == "memory" else None)


def _requests(count: int) -> list[Asking]:
    return conversation(traces_folder(), count)


def _play(
    count: int, router: Router, speed: float, token_seconds: float, at_once: int | None = None
) -> Result:
    transfers = Transfers(WAIT_SECONDS, token_seconds)
    fleet = Fleet(served(), REPLICAS, COLUMNS, [keys.org for keys in orgs()], transfers)
    gc.collect()
    return asyncio.run(fleet.play(_requests(count), router, speed, at_once))


def rows(name: str, pairs: Sequence[tuple[Result, Result]], goal: float | None) -> Iterator[Row]:
    """Of runs without borrowing and with it."""
    before, after, ratios = [], [], []
    for alone, shared in pairs:
        which = [number for number in shared.borrowed if number in alone.by_request]
        if which:
            before += (one := [alone.by_request[number] for number in which])
            after += (other := [shared.by_request[number] for number in which])
            ratios.append(percentile(one, 0.5) / percentile(other, 0.5))
    if after:
        ours, limit = percentile(after, 0.5), percentile(before, 0.5)
        more = {
            "requests": len(after),
            "least ratio %": 100 * min(ratios),
            "largest ratio %": 100 * max(ratios),
        }
        judged = goal if len(after) >= JUDGED_FROM else None
        yield Row(f"p2p.ttft.p50.{name}", 1e3 * ours, "ms", "without", limit / ours, judged, more)
    alone_mean = fmean(alone.mean for alone, _ in pairs)
    shared_mean = fmean(shared.mean for _, shared in pairs)
    hits = {
        "hit %": 100 * fmean(shared.hit_rate for _, shared in pairs),
        "alone hit %": 100 * fmean(alone.hit_rate for alone, _ in pairs),
    }
    row, ratio = f"p2p.ttft.mean.{name}.of_all", alone_mean / shared_mean
    yield Row(row, 1e3 * shared_mean, "ms", "without", ratio, more=hits)
