"""How fast the driver decides: keys, matches, a million columns, long work beside requests, replays,
and what look-ups of prefixes cost elsewhere. What hit rates do while a shard moves, and with tier 2.

Traces come from --traces or TRACES_DIR; without them replays are left out. Garbage is collected as
Python does it by itself.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import statistics
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import psutil
from blake3 import blake3

from benchmarks import peers, under_load
from benchmarks.dataplane import Memory
from benchmarks.harness import (
    QUICK_HELP,
    Row,
    add_traces,
    limited,
    parser,
    percentile,
    progress,
    show,
    timed,
)
from benchmarks.peers.matching import KINDS, Matcher, match_round, prompt
from kvss_agent import native
from swdriver_shim import loops
from swdriver_shim.adapters.wafer import DriverCache, Emulator, LedgerCache, Wafer, wafer_layout
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.daemon.serve import SWITCH_SECONDS
from swdriver_shim.decider.housekeeping import CLEARS_AT_ONCE
from swdriver_shim.driver import Driver
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import COLUMN_BYTES, COLUMN_TOKENS, Keys, Namespace, Prompt, encode
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy
from swdriver_shim.replay import fleet
from swdriver_shim.replay.emulator import Orgs, TraceClock, replay, run_housekeeping
from swdriver_shim.replay.traces import Request, conversations

MILLION, PURGED = 1_000_000, 100_000
PROMPT_COLUMNS = 512  # 32k tokens
LAYOUT = Layout((Group("full", (64, 64)),))
NAMESPACE = Namespace("bench", "1", "bf16", "full")
FOREVER = OrgPolicies(policy=Policy(ttl_last_use_seconds=None))
REPLAY_SCALE = 8192  # bytes per token: parts of columns of 87 to 175 KiB
DISPLACING_SLOTS = 250_000
SMALL_REQUESTS, SMALL_SLOTS = 600, 12_000  # nearly each column that is stored displaces another
MATCH_PROMPTS, MATCH_AT_ONCE = 100, 10
MATCH_TOKENS, MATCH_MORE = PROMPT_COLUMNS * COLUMN_TOKENS, 1024

Seconds = dict[str, list[float]]  # by kind


def keys(org: str, namespace: Namespace = NAMESPACE) -> Keys:
    return Keys(org, hashlib.sha256(org.encode()).digest(), namespace)


def tokens(seed: int, columns: int) -> list[int]:
    return [seed * 7919 + place & 0xFFFFFFFF for place in range(columns * COLUMN_TOKENS)]


# Keys


def key_rows(effort: int) -> list[Row]:
    raw = memoryview(os.urandom(COLUMN_BYTES * PROMPT_COLUMNS))
    maker = keys("acme")
    keyed, count = blake3(key=bytes(32)), COLUMN_TOKENS.to_bytes(4, "little")

    def chain() -> None:
        """As `loops.chained` does it: a copy of the keyed state, one update."""
        state, copy = bytes(32), keyed.copy
        for (column,) in struct.iter_unpack(f"{COLUMN_BYTES}s", raw):
            mixed = copy()
            mixed.update(column + state + count)
            state = mixed.digest()

    ours, theirs = [], []
    for _ in range(50 * effort):
        ours.append(timed(lambda: maker.chain(None, raw)))
        theirs.append(timed(chain))
    sha256, other = (statistics.median(of) / PROMPT_COLUMNS * 1e6 for of in (ours, theirs))
    return [
        Row("keys.sha256", sha256, "µs"),
        Row("keys.blake3", other, "µs", "keys.sha256", sha256 / other),
    ]


# A million columns


class Million:
    """A ledger of a million columns: a tenth of one org's, who is purged, and the rest of another's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = Ledger(LAYOUT, "bench")
        self.ledger.set_slot_limit(0, MILLION + 100 * PROMPT_COLUMNS)
        self.ledger.set_policies({"globex": FOREVER}, 0)
        self.stores: list[float] = []  # seconds for each column
        before = psutil.Process().memory_info().rss
        self.fill("globex", MILLION - PURGED)
        self.fill("acme", PURGED)
        self.column_bytes = (psutil.Process().memory_info().rss - before) / MILLION

    def fill(self, org: str, columns: int) -> None:
        maker = keys(org)
        for seed in range(0, columns, PROMPT_COLUMNS):
            count = min(PROMPT_COLUMNS, columns - seed)
            prompt = maker.prompt(tokens(seed, count))
            self.stores.append(timed(lambda: self.store(prompt)) / count)  # noqa: B023

    def store(self, prompt: Prompt) -> None:
        begun = self.ledger.begin_store(prompt, prompt.tokens, self.now)
        self.ledger.finish_store(begun, self.now)

    def match(self, prompt: Prompt) -> int:
        match = self.ledger.match(prompt, self.now)
        self.ledger.release(match)
        return match.tokens

    def columns(self, org: str) -> int:
        return sum(1 for _ in self.ledger.accounts[org].columns(0))


def million_rows(effort: int) -> list[Row]:
    big = Million()
    rows = [
        limited("column.bytes", big.column_bytes, "bytes", 260),
        Row("store.column", statistics.median(big.stores) * 1e6, "µs"),
        *match_rows(big, effort),
        *long_work_rows(big, "purge", lambda: purge(big)),
    ]
    big.fill("acme", PURGED)
    rows += long_work_rows(big, "expire", lambda: expire(big))
    return rows + displacement_rows(big) + garbage_rows()


def match_rows(big: Million, effort: int) -> list[Row]:
    """With compiled loops, and in turns with those in Python."""
    kinds = {"": loops.of(native.current()), ".python": loops.PYTHON}
    maker = keys("globex")
    took: dict[str, list[float]] = defaultdict(list)
    for turn in range(100 * effort):
        for kind in sorted(kinds, reverse=turn % 2 == 1):  # who comes second finds columns in caches
            loops.current = kinds[kind]
            match_both_ways(big, maker, turn, kind, took)
    loops.current = kinds[""]
    limits = {"cold": 0.35, "continued": 0.06, "packed": 0.15}
    rows = []
    for name, seconds in sorted(took.items()):
        row, median = f"match.32k.{name}", statistics.median(seconds) * 1e3
        limit = limits.get(name)
        rows += [limited(row, median, "ms", limit) if limit else Row(row, median, "ms")]
        rows += [Row(f"{row}.p99", percentile(seconds, 0.99) * 1e3, "ms")]
    return rows


def match_both_ways(
    big: Million, maker: Keys, turn: int, kind: str, took: dict[str, list[float]]
) -> None:
    asked = tokens(turn % 100 * PROMPT_COLUMNS, PROMPT_COLUMNS)
    more = tokens(turn, 1024 // COLUMN_TOKENS)
    as_bytes = encode(asked)
    began = time.perf_counter()
    prompt = maker.prompt(asked)
    hit = big.match(prompt)
    took[f"cold{kind}"].append(time.perf_counter() - began)
    assert hit == len(asked)
    began = time.perf_counter()
    prompt = maker.prompt(as_bytes)
    hit = big.match(prompt)
    took[f"packed{kind}"].append(time.perf_counter() - began)
    assert hit == len(asked)
    began = time.perf_counter()
    prompt.extend(more)
    big.match(prompt)
    took[f"continued{kind}"].append(time.perf_counter() - began)


# Others' look-ups, in turns with ours


class Ours(Matcher):
    """What a scheduler asks of the ledger, as peers are asked."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.ledger = Ledger(LAYOUT, "bench")
        self.maker = keys("globex")
        self.ledger.set_policies({"globex": FOREVER}, 0)

    def start(self) -> None:
        """Nothing has to be started."""

    def fill(self, prompts: int, tokens: int) -> dict[str, str | None]:
        self.ledger.set_slot_limit(0, (prompts + 1) * tokens // COLUMN_TOKENS)
        for number in range(prompts):
            whole = self.maker.prompt(prompt(number, tokens))
            self.ledger.finish_store(self.ledger.begin_store(whole, whole.tokens, 0), 0)
        return {"": None}

    def use(self, variant: str) -> None:
        """There is one."""

    def cold(self, tokens: list[int] | bytes) -> int:
        self.prompt = self.maker.prompt(tokens)
        return self._match()

    packed = cold

    def pack(self, tokens: list[int]) -> bytes:
        return encode(tokens)

    def continued(self, more: list[int]) -> int:
        self.prompt.extend(more)
        return self._match()

    def _match(self) -> int:
        match = self.ledger.match(self.prompt, 0)
        self.ledger.release(match)  # in the measured time, too
        return match.tokens

    def release(self) -> None:
        """Done."""


@dataclass
class Asked:
    """A variant of a peer, and what it took for the prompts so far."""

    peer: str
    variant: str
    match: Callable[[range], Seconds]
    seconds: Seconds = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def ask(self, numbers: range) -> None:
        for kind, seconds in self.match(numbers).items():
            self.seconds[kind] += seconds

    def medians(self) -> dict[str, float]:
        """Milliseconds, by kind."""
        return {kind: statistics.median(of) * 1e3 for kind, of in self.seconds.items() if of}


def peer_rows(names: Sequence[str], effort: int) -> list[Row]:
    ours = Ours()
    ours.fill(MATCH_PROMPTS, MATCH_TOKENS)
    us = Asked("", "", lambda numbers: match_round(ours, numbers, MATCH_TOKENS, MATCH_MORE))
    with contextlib.ExitStack() as stack:
        asked = [one for name in names for one in variants_of(name, stack)]
        for turn in range(4 * effort):
            first = turn * MATCH_AT_ONCE % MATCH_PROMPTS
            for one in (us, *asked):
                one.ask(range(first, first + MATCH_AT_ONCE))
    return list(rows_beside(us, asked))


def variants_of(name: str, stack: contextlib.ExitStack) -> Iterator[Asked]:
    """A peer that has been started and filled, or the reason why not."""
    try:
        peer = stack.enter_context(peers.Lookup(name))
        reasons = peer.fill(MATCH_PROMPTS, MATCH_TOKENS)
    except peers.Unavailable as reason:
        print(f"peer.{name} is left out: {reason}")
        return
    for variant, absent in reasons.items():
        if absent:
            print(f"peer.{name}.{variant} is left out: {absent}")
            continue
        yield Asked(name, variant, partial(peer.match, variant, more=MATCH_MORE))


def rows_beside(us: Asked, asked: Sequence[Asked]) -> Iterator[Row]:
    """Theirs, with theirs over ours as the ratio: more is better for us."""
    ours = us.medians()
    for kind, value in ours.items():
        yield Row(f"match.32k.{kind}.beside", value, "ms")
    for one in asked:
        name = ".".join(filter(None, ("peer", one.peer, one.variant)))
        for kind, value in one.medians().items():
            against = f"ours {ours[kind]:.3f} ms"
            yield Row(f"{name}.match.32k.{kind}", value, "ms", against, value / ours[kind], 1.0)


# Long work, and matches that go on meanwhile


def purge(big: Million) -> None:
    big.ledger.purge("acme")


def expire(big: Million) -> None:
    """An hour goes by in which nobody asks for them."""
    big.now += 3601


def long_work_rows(big: Million, name: str, begin: Callable[[], None]) -> list[Row]:
    """Once with matches between the pieces, once with a thread that matches as fast as it can."""
    ids = f"{name}.100k"
    slices, matches, took = alone(big, begin)
    # Who comes while a piece is worked on waits for it, and is then served.
    waits = [piece + match for piece, match in zip(slices, matches, strict=True)]
    rows = [
        limited(ids, took, "s", 1.0),
        Row(f"{ids}.slice_max", max(slices) * 1e3, "ms"),
        limited(f"{ids}.match_p99", percentile(waits, 0.99) * 1e3, "ms", 3),
        limited(f"{ids}.match_max", max(waits) * 1e3, "ms", 3),
    ]
    big.fill("acme", PURGED)
    beside, took = in_threads(big, begin)
    return [
        *rows,
        Row(f"{ids}.threads", took, "s"),
        limited(f"{ids}.threads.match_p99", percentile(beside, 0.99) * 1e3, "ms", 3),
        Row(f"{ids}.threads.matches", len(beside), "matches"),
    ]


def displacement_rows(big: Million) -> list[Row]:
    """Somebody changes the displacement policy of an org with nearly a million columns."""
    slices, matches, took = alone(big, lambda: big.ledger.set_displacement("globex", "lru", big.now))
    waits = [piece + match for piece, match in zip(slices, matches, strict=True)]
    return [
        Row("displacement.change", took, "s"),
        limited("displacement.change.slice_max", max(slices) * 1e3, "ms", 3),
        limited("displacement.change.match_p99", percentile(waits, 0.99) * 1e3, "ms", 5),
    ]


def alone(big: Million, begin: Callable[[], None]) -> tuple[list[float], list[float], float]:
    """Seconds of each piece, of the match after it, and of all pieces together."""
    prompt = keys("globex").prompt(tokens(0, PROMPT_COLUMNS))
    slices, matches = [timed(begin)], [timed(lambda: big.match(prompt))]
    for piece in pieces(big):
        slices.append(timed(piece))
        matches.append(timed(lambda: big.match(prompt)))
    assert not big.columns("acme")
    return slices, matches, sum(slices)


def in_threads(big: Million, begin: Callable[[], None]) -> tuple[list[float], float]:
    """Seconds of each match of a thread beside the work, under one lock as in `Driver`; of the work."""
    lock, done, before = FairLock(), threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)  # as a driver does
    prompt = keys("globex").prompt(tokens(0, PROMPT_COLUMNS))
    matches: list[float] = []

    def ask() -> None:
        while not done.is_set():
            began = time.perf_counter()
            with lock:
                big.match(prompt)
            matches.append(time.perf_counter() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    began = time.perf_counter()
    with lock:
        begin()
    for piece in pieces(big):
        with lock:
            piece()
    took = time.perf_counter() - began
    done.set()
    thread.join()
    sys.setswitchinterval(before)
    assert not big.columns("acme")
    return matches, took


def pieces(big: Million) -> Iterator[Callable[[], None]]:
    """What `Driver` does in the background, a piece at a time, until nothing is left to do."""
    ledger, more = big.ledger, [True]

    def a_piece() -> None:
        more[0] = ledger.sweep(big.now) | ledger.reclaim()

    def empty() -> None:
        clears = ledger.take_clears(CLEARS_AT_ONCE)
        ledger.finish_clears(clears, is_done=True)
        more[0] |= bool(clears)

    while more[0]:
        yield a_piece
        yield empty


def garbage_rows() -> list[Row]:
    """What a full collection costs beside a million columns, and once they are known not to be any."""
    plain = timed(gc.collect)
    gc.freeze()
    frozen = timed(gc.collect)
    gc.unfreeze()
    return [
        Row("gc.full", plain * 1e3, "ms"),
        Row("gc.full.frozen", frozen * 1e3, "ms"),
    ]


# Replays


def metadata_rows(
    name: str, requests: Sequence[Request], slots: int, goal: int | None = None
) -> list[Row]:
    """Requests a second, and a second of processor time, which others' work disturbs less."""
    wafer = Wafer(wafer_layout(1, 1024))
    ledger, clock = Ledger(wafer.layout), TraceClock()
    ledger.set_slot_limit(0, slots)

    def before(request: Request) -> None:
        clock.pass_to(request.at_s)
        run_housekeeping(ledger, clock.now)

    totals = replay(
        requests, Emulator(LedgerCache(ledger, wafer, clock)), Orgs(4, 0, wafer.namespace), before
    )
    rate, cpu_rate = totals.requests / totals.seconds, totals.requests / totals.cpu_seconds
    against = (f"{goal:,} requests/s", rate / goal, 1.0) if goal else ()
    return [
        Row(name, rate, "requests/s", *against),
        Row(f"{name}.cpu", cpu_rate, "requests/s"),
    ]


def bytes_rows(requests: Sequence[Request]) -> list[Row]:
    wafer = Wafer(wafer_layout(1, REPLAY_SCALE))
    part_bytes = COLUMN_TOKENS * REPLAY_SCALE // 4
    with contextlib.suppress(native.Unavailable):
        native.require(build=True)  # used from here on
    memory = Memory(part_bytes)
    copies = [memory.memcpy(index % memory.count) for index in range(4 * memory.count)]
    memcpy = part_bytes / statistics.median(copies) / 1e9
    rows = []
    with fleet.started(wafer.layout, 4096, 2) as agents:
        driver = Driver(wafer.layout, "bench", agents.shards())
        try:
            orgs = Orgs(4, 0, wafer.namespace)
            totals = replay(requests, Emulator(DriverCache(driver, wafer)), orgs, lambda _: None)
        finally:
            driver.close()
    assert not totals.wrong_bytes
    for kind, size, times in (
        ("load", totals.bytes_in, totals.load),
        ("store", totals.bytes_out, totals.store),
    ):
        speed = size / times.sum / 1e9
        rows.append(Row(f"replay.bytes.{kind}", speed, "GB/s", "memcpy", speed / memcpy))
    both = (totals.bytes_in + totals.bytes_out) / (totals.load.sum + totals.store.sum) / 1e9
    return [Row("replay.bytes", both, "GB/s", "memcpy", both / memcpy), *rows]


def main() -> None:
    to_tell = parser(__doc__, f"{QUICK_HELP}; peers only if they are named")
    add_traces(to_tell)
    parts: dict[str, Callable[[], list[Row]]] = {
        "keys": lambda: key_rows(effort),
        "million": lambda: million_rows(effort),
        "peers": lambda: peer_rows(named, effort),
        "replays": lambda: replay_rows(given.traces, quick=given.quick),
        "moves": lambda: under_load.move_rows(quick=given.quick),
        "tier2": lambda: under_load.tier2_rows(quick=given.quick),
    }
    to_tell.add_argument("--only", nargs="+", choices=parts, default=parts, help="some of it")
    to_tell.add_argument("--peers", nargs="*", choices=peers.LOOKUPS, metavar="NAME", help="which peers")
    given = to_tell.parse_args()
    effort = 1 if given.quick else 5
    named = given.peers if given.peers is not None else () if given.quick else peers.LOOKUPS
    native.best(build=True)  # and not while something is measured
    native.current()
    rows: list[Row] = []
    for name, rows_of in parts.items():
        if name in given.only:
            progress(name)
            rows += rows_of()
    show("The driver", rows, given.json)


def replay_rows(traces: Path, *, quick: bool) -> list[Row]:
    trace = traces / "conversation.jsonl"
    if not trace.exists():
        print("Replays are left out: there is no conversation.jsonl in --traces or TRACES_DIR")
        return []
    requests = list(islice(conversations(trace), 4000 if quick else None))
    return [
        *metadata_rows("replay.metadata", requests, 10 * MILLION, 2000),
        *metadata_rows("replay.metadata.displacing", requests, DISPLACING_SLOTS, 1500),
        *metadata_rows("replay.metadata.small", requests[:SMALL_REQUESTS], SMALL_SLOTS),
        *bytes_rows(requests[: 150 if quick else 600]),
    ]


if __name__ == "__main__":
    main()
