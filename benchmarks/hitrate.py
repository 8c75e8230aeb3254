"""Hit rates of the displacement policies on public traces, beside simple policies and the optimum.

A request hits its longest prefix of blocks that are present; then all its blocks are stored, a last one
that is not full included. Room is made by the policies as the driver uses them, leaf-first. Who asks for
what is taken from the traces, so that nothing here depends on this machine but the costs at the end.

Constants of the default were chosen by some traces only. The others judge it: the synthetic one, every
other agent session, and generated ones with other seeds and parameters than those chosen by.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeAlias

from benchmarks import generated, simulators
from benchmarks.candidates import CANDIDATES
from benchmarks.harness import QUICK_HELP, Row, add_traces, limited, parser, progress, show, timed
from benchmarks.peers.environment import REQUIREMENTS, Unavailable, prepare
from swdriver_shim import loops
from swdriver_shim.cache.displacement import DEFAULT, POLICIES, DisplacementPolicy
from swdriver_shim.cache.turns import Turns
from swdriver_shim.replay.traces import Malformed, Request, read, sessions

CONVERSATION_SIZES = {"1k": 1_000, "5k": 5_000, "10k": 10_000, "30k": 30_000, "50k": 50_000}
SYNTHETIC = "synthetic_trace.jsonl"  # beside the others or not
SYNTHETIC_SIZES = {"1k": 1_000, "5k": 5_000, "10k": 10_000}
SHARES = {"2%": 0.02, "5%": 0.05, "10%": 0.1, "20%": 0.2, "40%": 0.4}  # of all blocks there are
QUICK = ("1k", "10k", "10%")
ALL = {**POLICIES, **CANDIDATES}
SIMPLE = [name for name in ALL if name != DEFAULT]
BELOW_MAX = 0.99  # the default, over the best of the simple ones
CLOSED_MIN = 1 / 3  # of the way from LRU to the optimum
CLOSED_AT = ("1k", "5k")  # of conversations and synthetic
CROSS_CHECKED = ("LRU", "S3FIFO", "ARC")
ORDER_S = 1e-6  # many rows have the same time; their order is the order of arrival
HIT_COLUMNS, HIT_US = 512, 100.0
LOWEST = f"{DEFAULT}, lowest"
SAMPLES = 3  # of keys: they decide what the default learns from
COST_PROMPTS, COST_COLUMNS = 1_000, 32


@dataclass(slots=True, eq=False)
class Column:
    """What the driver knows of a column, as far as policies ask."""

    key: bytes
    parent: Column | None
    used_at: float
    stored_at: float
    needs: int
    tail: bool
    turn: int
    block: int
    bytes: int = 1
    uses: int = 0
    ref_count: int = 0
    mark: object = None
    terms: int = field(init=False)  # nothing but the turn

    def __post_init__(self) -> None:
        self.terms = self.turn


AnyPolicy: TypeAlias = DisplacementPolicy[Column]


class Store:
    """So many blocks, and a policy that makes room: what the driver does, without bytes."""

    def __init__(self, policy: AnyPolicy, size: int, salt: int) -> None:
        self.policy = policy
        policy.columns = self._present
        self.present: dict[int, Column] = {}
        self._turns = Turns()
        self._size = size
        self._salt = salt

    def ask(self, request: Request, now: float) -> int:
        """How many blocks are hit. All are stored then, as far as there is room beside themselves."""
        policy = self.policy
        path = self._hit(request.blocks)
        hits = len(path)
        turn = self._turns.asked(
            [_key(block, self._salt) for block in request.blocks[: request.whole_blocks]]
        )
        tip: Column | None = None
        if path:
            policy.used(path, now)
            for column in path:
                column.used_at = now
                column.uses += 1
            tip = path[-1]
            if not tip.ref_count:
                policy.leaf(tip)  # it has been read; what follows is stored later
            tip.ref_count += 1  # a pin, which goes on to the child
        columns = []
        for depth in range(hits, hits + self._make_room(len(request.blocks) - hits, now)):
            block, tail = request.blocks[depth], depth >= request.whole_blocks
            tip = self.present[block] = Column(
                _key(block, self._salt), tip, now, now, depth, tail, turn, block, ref_count=1
            )
            columns.append(tip)
        policy.stored_all(columns, now)
        if tip:
            self._release(tip)
        return hits

    def _present(self, bits: int) -> Iterator[Iterator[Column]]:
        some: list[Column] = loops.current.sampled(list(self.present.values()), bits)
        yield (one for one in some if self.present.get(one.block) is one)

    def _hit(self, blocks: Sequence[int]) -> list[Column]:
        path = []
        for block in blocks:
            column = self.present.get(block)
            if column is None:
                break
            path.append(column)
        return path

    def _make_room(self, wanted: int, now: float) -> int:
        """For how many of so many blocks there is room, once others are displaced."""
        while (more := wanted + len(self.present) - self._size) > 0:
            run = self.policy.victims(now, more)
            if not run:
                return wanted - more
            for column in run:
                del self.present[column.block]
            self.policy.displaced(run, now)
            if run[-1].parent:
                self._release(run[-1].parent)
        return wanted

    def _release(self, column: Column) -> None:
        column.ref_count -= 1
        if not column.ref_count:
            self.policy.leaf(column)


@dataclass
class Trace:
    name: str
    requests: list[Request]
    sizes: dict[str, int]
    judges: bool = False  # nothing was chosen by it
    blocks: list[tuple[int, ...]] = field(init=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [request.blocks for request in self.requests]
        self.total = sum(map(len, self.blocks))

    @property
    def title(self) -> str:
        return f"{self.name}, judges" if self.judges else self.name

    def size_by_shares(self) -> Trace:
        """This trace, with sizes that are shares of its blocks."""
        footprint = self.footprint
        self.sizes = {name: int(share * footprint) for name, share in SHARES.items()}
        return self

    @property
    def footprint(self) -> int:
        return len(set().union(*self.blocks))

    @property
    def unbounded(self) -> float:
        """The share of blocks that were asked for before."""
        return 1 - self.footprint / self.total

    def share(self, hits: int) -> float:
        return hits / self.total


def replay(policy: AnyPolicy, size: int, requests: Sequence[Request], salt: int = 0) -> int:
    """Blocks that are hit. Another salt makes other keys, by which policies may sample."""
    store = Store(policy, size, salt)
    return sum(
        store.ask(request, request.at_s + number * ORDER_S) for number, request in enumerate(requests)
    )


def load(folder: Path, *, quick: bool, only: Sequence[str] = ()) -> list[Trace]:
    """The traces in the folder and the generated ones. Raises FileNotFoundError with a sentence."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There are no traces in {folder}. Say where they are: --traces DIR or TRACES_DIR."
        )
    files = sorted((folder / "agent-sessions").glob("*.json"))
    traces = [
        Trace("conversation", list(read(folder / "conversation.jsonl")), CONVERSATION_SIZES),
        Trace("sessions", list(sessions(files[::2])), {}).size_by_shares(),
        Trace("sessions", list(sessions(files[1::2])), {}, judges=True).size_by_shares(),
    ]
    if (folder / SYNTHETIC).exists():
        requests = list(read(folder / SYNTHETIC))
        traces.append(Trace("synthetic", requests, SYNTHETIC_SIZES, judges=True))
    traces += [
        Trace(one.name, one.requests(), {}, one.judges).size_by_shares()
        for one in generated.variants()
        if not quick or one.name in only or not one.name.startswith("mixture")
    ]
    for trace in traces:
        trace.sizes = {name: size for name, size in trace.sizes.items() if not quick or name in QUICK}
    if unknown := sorted(set(only) - {trace.name for trace in traces}):
        names = ", ".join(dict.fromkeys(trace.name for trace in traces))
        raise FileNotFoundError(f"There is no trace {unknown[0]!r}. There are: {names}.")
    return [trace for trace in traces if not only or trace.name in only]


def measure(trace: Trace, size: int) -> dict[str, float]:
    """The share of blocks hit, by policy. That of the default is the mean of some samples of keys."""
    progress(f"{trace.title}, {size:,} blocks")
    shares = {name: trace.share(replay(ALL[name](), size, trace.requests)) for name in SIMPLE}
    for name, cache in simulators.PLAIN.items():
        shares[name] = trace.share(simulators.plain(trace.blocks, cache(size)))
    samples = [
        trace.share(replay(POLICIES[DEFAULT](), size, trace.requests, salt)) for salt in range(SAMPLES)
    ]
    shares[DEFAULT] = statistics.mean(samples)
    shares[LOWEST] = min(samples)
    shares["who comes back"] = trace.share(simulators.who_comes_back(trace.blocks, size))
    shares["optimum"] = trace.share(simulators.optimum(trace.blocks, size))
    return shares


def rows_of(trace: Trace, name: str, shares: dict[str, float]) -> Iterator[Row]:
    prefix = f"hitrate.{'judge.' * trace.judges}{trace.name}.{name}"
    for policy, share in shares.items():
        of_optimum = share / shares["optimum"]
        yield Row(f"{prefix}.{policy.replace(' ', '_')}", 100 * share, "%", "optimum", of_optimum)
    for policy in SIMPLE:
        ratio = shares[DEFAULT] / shares[policy] / BELOW_MAX
        yield Row(f"{prefix}.default_to.{policy}", 100 * ratio * BELOW_MAX, "%", policy, ratio, 1.0)
    if trace.name in ("conversation", "synthetic") and name in CLOSED_AT:
        closed = (shares[DEFAULT] - shares["lru"]) / (shares["optimum"] - shares["lru"])
        goal = closed / CLOSED_MIN
        yield Row(f"{prefix}.closed", 100 * closed, "%", "a third to the optimum", goal, 1.0)


def print_shares(trace: Trace, measured: dict[str, dict[str, float]]) -> None:
    print(
        f"\n{trace.title}: {len(trace.requests):,} requests, {trace.total:,} blocks, "
        f"{trace.footprint:,} different ones; unbounded {100 * trace.unbounded:.2f} %\n"
    )
    policies = list(next(iter(measured.values())))
    print(
        "| % of blocks hit | "
        + " | ".join(f"{name} ({trace.sizes[name]:,})" for name in measured)
        + " |"
    )
    print("|---|" + "---:|" * len(measured))
    for policy in policies:
        cells = (f"{100 * shares[policy]:.2f}" for shares in measured.values())
        print(f"| {policy} | " + " | ".join(cells) + " |")


def cross_check(trace: Trace, measured: dict[str, dict[str, float]]) -> Iterator[Row]:
    """The plain ones again, by libCacheSim in an environment of its own."""
    environment = prepare("libcachesim")
    sizes = [trace.sizes[name] for name in measured]
    told = {"requests": trace.blocks, "sizes": sizes, "policies": CROSS_CHECKED}
    answer = subprocess.run(
        [environment.python, REQUIREMENTS / "simulate_libcachesim.py"],
        input=json.dumps(told),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ours = {"LRU": "plain lru", "S3FIFO": "s3fifo", "ARC": "plain arc"}
    for policy, hits in json.loads(answer.stdout).items():
        for name, count in zip(measured, hits, strict=True):
            share = trace.share(count)
            row = f"hitrate.{trace.name}.{name}.libcachesim.{policy.lower()}"
            yield Row(row, 100 * share, "%", ours[policy], share / measured[name][ours[policy]])


def costs(make: Callable[[], AnyPolicy], name: str, rounds: int) -> list[Row]:
    """What a policy takes of a driver's time: per column stored, displaced, and hit."""
    stored, displaced, hit = zip(*(_cost_round(make()) for _ in range(rounds)), strict=True)
    stored_s, displaced_s, hit_s = map(statistics.median, (stored, displaced, hit))
    more = {
        "stored ns": 1e9 * stored_s,
        "displaced ns": 1e9 * displaced_s,
        "hit column ns": 1e9 * hit_s / HIT_COLUMNS,
    }
    hit_us = 1e6 * hit_s
    return [
        Row(f"displacement.{name}.us", 1e6 * (stored_s + displaced_s), "µs/column", more=more),
        limited(f"displacement.{name}.hit512.us", hit_us, "µs", HIT_US),
    ]


def _cost_round(policy: AnyPolicy) -> tuple[float, float, float]:
    """Seconds per column stored, per column displaced, and of a long hit."""
    prompts = [_prompt(number, COST_COLUMNS) for number in range(COST_PROMPTS)]
    path = _prompt(COST_PROMPTS, HIT_COLUMNS)
    gc.collect()
    gc.disable()
    try:
        stored = timed(lambda: _store_all(policy, prompts))
        _store_all(policy, [path])
        hits = [timed(partial(_hit_all, policy, path, 5000.0 + number)) for number in range(20)]
        displaced = timed(lambda: _displace_all(policy))
    finally:
        gc.enable()
    columns = COST_PROMPTS * COST_COLUMNS
    return stored / columns, displaced / columns, statistics.median(hits)


def _prompt(number: int, length: int) -> list[Column]:
    """A prompt of its own, without a shared beginning."""
    now = 1000.0 + number
    columns: list[Column] = []
    for depth in range(length):
        block = number << 16 | depth
        parent = columns[-1] if columns else None
        columns.append(Column(_key(block, 0), parent, now, now, depth, False, 0, block))
    return columns


def _store_all(policy: AnyPolicy, prompts: Sequence[Sequence[Column]]) -> None:
    for columns in prompts:
        for column in columns:
            column.ref_count = 1
            policy.stored(column, column.stored_at)
        columns[-1].ref_count = 0
        policy.leaf(columns[-1])


def _hit_all(policy: AnyPolicy, path: Sequence[Column], now: float) -> None:
    """Without the driver's stamps, which cost the same for each policy."""
    policy.used(path, now)
    policy.leaf(path[-1])


def _displace_all(policy: AnyPolicy) -> None:
    for number in range(COST_PROMPTS * COST_COLUMNS):
        now = 6000.0 + number * 1e-3
        column = policy.victim(now)
        assert column is not None
        policy.displaced([column], now)
        if column.parent is not None:
            column.parent.ref_count -= 1
            policy.leaf(column.parent)


@lru_cache(1 << 20)
def _key(block: int, salt: int) -> bytes:
    return hashlib.blake2b(struct.pack("<QQ", block, salt), digest_size=16).digest()


def main() -> int:
    to_tell = parser(__doc__, f"{QUICK_HELP}; fewer sizes")
    add_traces(to_tell)
    to_tell.add_argument(
        "--only", nargs="+", metavar="TRACE", default=(), help="these traces only, such as drift"
    )
    to_tell.add_argument(
        "--cross-check", action="store_true", help="also by libCacheSim, in an environment of its own"
    )
    asked = to_tell.parse_args()
    try:
        traces = load(asked.traces, quick=asked.quick, only=asked.only)
    except (OSError, Malformed) as error:
        print(error, file=sys.stderr)
        return 1
    rows: list[Row] = []
    for trace in traces:
        measured = {name: measure(trace, size) for name, size in trace.sizes.items()}
        print_shares(trace, measured)
        for name, shares in measured.items():
            rows += rows_of(trace, name, shares)
        if asked.cross_check:
            with _absent_is_said():
                rows += cross_check(trace, measured)
    for name, make in POLICIES.items():
        progress(f"what {name} costs")
        rows += costs(make, name, 3 if asked.quick else 9)
    show("Hit rates", rows, asked.json)
    return 0


@contextlib.contextmanager
def _absent_is_said() -> Iterator[None]:
    try:
        yield
    except Unavailable as reason:
        print(f"libCacheSim is absent: {reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
