"""Replays a trace through the wafer emulator, and reports the cache's effect by org.

Tokens are made from the ids of blocks: equal blocks, equal tokens. Each session belongs to one org.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from swdriver_shim.adapters.wafer import Emulator, Served
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Tally
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.replay.traces import Request, tenant
from telemetry.histogram import Histogram

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CLEARS_AT_ONCE: Final = 1024
ORDER_S: Final = 1e-6
_ID = struct.Struct("<Q")  # of a block, as two tokens
_OWN: Final = 0xFFFF_FFFF << 32  # above all ids that traces have: what no block names


def prompt_tokens(request: Request, number: int) -> bytes:
    """The prompt of the request with this number in its trace. Tokens without a block are unique."""
    repeats = -(-request.block_tokens // 2)
    size = 4 * request.block_tokens
    blocks = b"".join([(_ID.pack(block % _OWN) * repeats)[:size] for block in request.blocks])
    unnamed = max(0, request.input_tokens - len(blocks) // 4)
    return (blocks + _own(number, unnamed))[: 4 * request.input_tokens]


def output_tokens(request: Request, number: int) -> bytes:
    """The model's answer: unique tokens, since traces do not have them."""
    return _own(number, request.output_tokens)[: 4 * request.output_tokens]


def _own(number: int, tokens: int) -> bytes:
    return _ID.pack(_OWN + number) * -(-tokens // 2)


class TraceClock:
    """The time of a trace, which passes as it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_to(self, at_s: float) -> None:
        """Clocks of traces are coarse: requests of the same time follow each other by `ORDER_S`."""
        self.now = max(at_s, self.now + ORDER_S)


@dataclass(slots=True)
class Totals:
    """Totals of all requests."""

    requests: int = 0
    seconds: float = 0.0  # from the first to the last,
    cpu_seconds: float = 0.0  # and of processor time
    bytes_in: int = 0
    bytes_out: int = 0
    wrong_bytes: int = 0
    ttft_seconds: float = 0.0
    ttft_cold_seconds: float = 0.0
    load: Histogram = field(default_factory=Histogram)
    store: Histogram = field(default_factory=Histogram)

    def add(self, served: Served) -> None:
        self.requests += 1
        self.bytes_in += served.load.bytes
        self.bytes_out += served.store.bytes
        self.wrong_bytes += served.load.wrong_bytes
        self.ttft_seconds += served.ttft_seconds
        self.ttft_cold_seconds += served.ttft_cold_seconds
        self.load.record(served.load.seconds)
        self.store.record(served.store.seconds)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """All requests are served meanwhile."""
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - began
            self.cpu_seconds = time.process_time() - cpu_began

    @property
    def ttft_gain(self) -> float | None:
        """The part of the wait for first tokens that the cache saves; None without requests."""
        return 1 - self.ttft_seconds / self.ttft_cold_seconds if self.ttft_cold_seconds else None


class Orgs:
    """The orgs of a replay, and which of them a session belongs to."""

    def __init__(self, count: int, seed: int, namespace: Namespace) -> None:
        self._seed = seed
        self._keys = [
            Keys(f"org-{index}", hashlib.sha256(f"{seed}\0{index}".encode()).digest(), namespace)
            for index in range(count)
        ]

    @property
    def names(self) -> list[str]:
        return [keys.org for keys in self._keys]

    def of(self, request: Request) -> Keys:
        return self._keys[tenant(request.session, len(self._keys), self._seed)]


def replay(
    requests: Iterable[Request],
    emulator: Emulator,
    orgs: Orgs,
    before_each: Callable[[Request], None],
    *,
    speed: float | None = None,
) -> Totals:
    """Serve requests one after the other, `speed` times as fast as in the trace; None for without
    pauses.

    An interrupt ends it early, with the totals so far.
    """
    totals = Totals()
    first_s = None
    with contextlib.suppress(KeyboardInterrupt), _no_garbage(), totals.timed():
        began = time.perf_counter()
        for number, request in enumerate(requests):
            if first_s is None:
                first_s = request.at_s  # traces may count from 1970
            if speed:
                time.sleep(max(0.0, began + (request.at_s - first_s) / speed - time.perf_counter()))
            before_each(request)
            tokens, output = prompt_tokens(request, number), output_tokens(request, number)
            totals.add(emulator.serve(orgs.of(request), tokens, output))
    return totals


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Nothing here makes cycles. To look for some among a million columns takes a quarter of a second,
    again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_housekeeping(ledger: Ledger, now: float) -> None:
    """The background work of a driver, without agents."""
    while ledger.sweep(now) | ledger.reclaim():
        pass
    while clears := ledger.take_clears(CLEARS_AT_ONCE):
        ledger.finish_clears(clears, is_done=True)
    while deletes := ledger.tier2.take_deletes(CLEARS_AT_ONCE):
        ledger.tier2.finish_deletes(deletes, is_done=True)
    while purge := ledger.tier2.take_purge():
        ledger.tier2.finish_purge(purge, is_done=True)


def report(totals: Totals, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """The report as plain numbers. A rate without traffic is None."""
    return {
        "requests": totals.requests,
        "seconds": totals.seconds,
        "requests_per_second": _per(totals.requests, totals.seconds),
        "all": _hits(list(tallies.values())),
        "orgs": {org: _hits([tally]) for org, tally in tallies.items()},
        "load": _moved(totals.load, totals.bytes_in),
        "store": _moved(totals.store, totals.bytes_out),
        "wrong_bytes": totals.wrong_bytes,
        "ttft": {
            "mean_seconds": _per(totals.ttft_seconds, totals.requests),
            "mean_seconds_without_cache": _per(totals.ttft_cold_seconds, totals.requests),
            "gain": totals.ttft_gain,
        },
    }


def _hits(tallies: Sequence[Tally]) -> dict[str, Any]:
    requested = sum(tally.requested for tally in tallies)
    hits, missed = Counter[str](), Counter[str]()
    for tally in tallies:
        hits += tally.hits
        missed.update({str(reason): count for reason, count in (+tally.missed).items()})
    return {
        "requests": sum(tally.requests for tally in tallies),
        "requested_tokens": requested,
        "hit_tokens": dict(hits),
        "hit_rate": _per(hits.total(), requested),
        "missed_tokens": dict(missed.most_common()),
    }


def _moved(times: Histogram, size: int) -> dict[str, Any]:
    quantiles = {f"{name}_seconds": times.quantile(part) for name, part in QUANTILES.items()}
    return {
        "bytes": size,
        "gigabytes_per_second": _per(size / 1e9, times.sum) if size else None,
        **quantiles,
    }


def _per(one: float, other: float) -> float | None:
    return one / other if other else None
