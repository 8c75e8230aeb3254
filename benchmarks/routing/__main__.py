"""Times to first tokens by router, before emulated replicas with real drivers' ledgers.

Each router places the same requests of a trace; engines have the timing of a measured one. `60` and `90`
are percent of capacity: of the requests a second that exact knowledge gets through at most. `floor`:
if no request waited for another one, and each replica had what any had computed: no goal below it can be
reached. What this machine is doing meanwhile changes no figure but those of `choose`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import Row, add_traces, limited, parser, percentile, progress, show
from benchmarks.peers.environment import Unavailable
from benchmarks.routing import peers
from benchmarks.routing.fleet import Fleet, Result, Router
from benchmarks.routing.policies import Exact, LeastLoaded, Ours, RoundRobin, floor
from benchmarks.routing.timing import Timing, served
from benchmarks.routing.traffic import Asking, agent_sessions, conversation, orgs
from inference_brain.choice import Asked, Candidate, Flights, ModelRates, choose
from inference_brain.choice import Path as BytesPath
from inference_brain.choice.columns import Integers, Many

COLUMNS: Final = 32_000  # of each replica: 4,000 blocks of 512 tokens
IN_FLIGHT: Final = 32  # of each replica, where capacity is measured
LOADS: Final = (60, 90)
REPLICAS: Final = (8, 32)
CONVERSATION, SESSIONS = "conversation", "agent-sessions"
TRACES: Final = (CONVERSATION, SESSIONS)
# Requests of each trace for eight replicas; with `--quick` so many.
REQUESTS: Final = {CONVERSATION: 800, SESSIONS: 300}
QUICK_REQUESTS: Final = {CONVERSATION: 400, SESSIONS: 100}
SLOW: Final = "vllm-router"  # takes longer than all others together; not with `--quick`
FIGURES: Final = {"mean": 1 / 0.80, "p50": None, "p95": 1 / 0.75}  # goals, over the best other router
OF_EXACT: Final = 1 / 1.15
CHOOSE_US: Final = {8: 100.0, 1000: 1000.0}
TOKENS: Final = 32_768


@dataclass(frozen=True)
class Case:
    trace: str
    load: int
    replicas: int

    @property
    def name(self) -> str:
        return f"{self.trace}.{self.load}.{self.replicas}"


class Bench:
    def __init__(self, folder: Path, timing: Timing, *, quick: bool, others: Sequence[str]) -> None:
        self._folder = folder
        self._timing = timing
        self._quick = quick
        self._others = others
        self._capacity: dict[tuple[str, int], float] = {}  # speeds

    def requests(self, trace: str, replicas: int) -> list[Asking]:
        """New ones for each run."""
        count = (QUICK_REQUESTS if self._quick else REQUESTS)[trace]
        if trace == CONVERSATION:
            return conversation(self._folder, count * (1 if replicas <= 8 else 2))
        return agent_sessions(self._folder, count * replicas // 8, copies=replicas)

    def fleet(self, replicas: int) -> Fleet:
        return Fleet(self._timing, replicas, COLUMNS, [keys.org for keys in orgs()])

    def speed(self, case: Case) -> float:
        """How many times as fast as the trace requests have to come for this load."""
        key = case.trace, case.replicas
        if key not in self._capacity:
            progress(f"capacity: {case.trace}, {case.replicas} replicas")
            requests = self.requests(*key)
            lasts = requests[-1].at - requests[0].at
            at_once = IN_FLIGHT * case.replicas
            result = self.play(case, Exact(), 1.0, at_once)
            self._capacity[key] = lasts / result.ended
        return self._capacity[key] * case.load / 100

    def play(self, case: Case, router: Router, speed: float, at_once: int | None = None) -> Result:
        requests = self.requests(case.trace, case.replicas)
        fleet = self.fleet(case.replicas)

        async def run() -> Result:
            try:
                return await fleet.play(requests, router, speed, at_once)
            finally:
                await router.finish()

        gc.collect()
        gc.disable()  # nothing here makes cycles, and to look for some among all columns takes long
        try:
            return asyncio.run(run())
        finally:
            gc.enable()

    def routers(self) -> Iterator[tuple[str, Router]]:
        yield from (
            ("ours", Ours()),
            ("exact", Exact()),
            ("least-loaded", LeastLoaded()),
            ("round-robin", RoundRobin()),
        )
        for name in self._others:
            yield name, peers.make(name, COLUMNS)

    def measure(self, case: Case) -> Iterator[Row]:
        speed, results = self.speed(case), {}
        for name, router in self.routers():
            progress(f"{case.name}: {name}")
            try:
                results[name] = self.play(case, router, speed)
            except Unavailable as error:
                progress(f"{case.name}: {name} is left out: {error}")
            if isinstance(router, Ours):
                ours = router
        results["floor"] = floor(self._timing, self.requests(case.trace, case.replicas))
        yield from rows_of(case, results, ours)


def rows_of(case: Case, results: dict[str, Result], ours: Ours) -> Iterator[Row]:
    best_other = [name for name in results if name in peers.NAMES]
    for figure, goal in FIGURES.items():
        values = {name: value_of(result, figure) for name, result in results.items()}
        best = min(best_other, key=values.__getitem__, default="")
        for name, value in values.items():
            more = {"hit %": 100 * results[name].hit_rate}
            against, ratio, held = "", None, None
            if name == "ours" and best:
                against, ratio, held = best, values[best] / value, goal
            yield Row(f"ttft.{figure}.{case.name}.{name}", 1e3 * value, "ms", against, ratio, held, more)
        if figure != "p50":
            ratio = values["exact"] / values["ours"]
            value = 1e3 * values["ours"]
            yield Row(f"ttft.{figure}.{case.name}.of_exact", value, "ms", "exact", ratio, OF_EXACT)
    yield Row(f"estimate.error.{case.name}", 100 * ours.rates.error.share, "%")


def value_of(result: Result, figure: str) -> float:
    return result.mean if figure == "mean" else result.at(int(figure[1:]) / 100)


def choose_rows(rounds: int) -> Iterator[Row]:
    """The decision alone, with all that belongs to it but keys and maps; in processor time, which other
    work on the machine hardly changes."""
    rng, rates = random.Random(0), ModelRates()
    for count, limit in CHOOSE_US.items():
        names = sorted(f"replica-{index}" for index in range(count))
        hits = np.array([rng.choice([0, 0, 0, 4096, 30_000]) for _ in names])
        recalled = np.array([rng.choice([0, 0, 2048]) for _ in names])
        every, lent, flights = np.arange(count), np.zeros(count, np.int64), Flights()
        guesses = np.zeros(count, bool)
        for name in names:  # each has a prompt to compute
            tokens = rng.randint(1, 20_000)
            sent = choose(Asked(tokens), [Candidate(name, rates.of(name))], 0.0, rng)
            flights.begin(name, sent, 0.0)

        def made(
            number: int,
            names: Sequence[str] = names,
            hits: Integers = hits,
            recalled: Integers = recalled,
            flights: Flights = flights,
        ) -> Candidate:
            of, hit, more = names[number], int(hits[number]), int(recalled[number])
            return Candidate(of, rates.of(of), hit, more, BytesPath.RAIL, flights.load(of, 0.0))

        asked, seconds = Asked(TOKENS, b"prefix"), []
        for _ in range(rounds):
            began = time.thread_time()
            columns, queues = rates.columns(names), partial(flights.queues, names, 0.0)
            many = Many(every, hits, recalled, lent, guesses, queues, columns, made)
            choose(asked, many, 0.0, rng)
            seconds.append(time.thread_time() - began)
        p50, p99 = (1e6 * percentile(seconds, share) for share in (0.5, 0.99))
        judged = p50 if count < 100 else p99
        which = "p50" if count < 100 else "p99"
        yield limited(f"choose.32k.{count}", judged, f"µs ({which})", limit, {"p50": p50, "p99": p99})


def main() -> None:
    to_tell = parser(__doc__)
    add_traces(to_tell)
    to_tell.add_argument("--trace", choices=TRACES, action="append", help="only this one")
    to_tell.add_argument("--load", type=int, choices=LOADS, action="append", help="only this one")
    to_tell.add_argument("--replicas", type=int, choices=REPLICAS, action="append", help="only so many")
    to_tell.add_argument(
        "--router", choices=peers.NAMES, action="append", help="of others, only this one"
    )
    options = to_tell.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    folder = options.traces
    if not (folder / "conversation.jsonl").exists():
        to_tell.exit(
            66, f"There are no traces in {folder}. Say where they are: --traces or TRACES_DIR.\n"
        )
    others = options.router or [one for one in peers.NAMES if not (options.quick and one == SLOW)]
    rows = list(choose_rows(300 if options.quick else 2000))
    bench = Bench(folder, served(), quick=options.quick, others=others)
    for replicas in options.replicas or (REPLICAS[:1] if options.quick else REPLICAS):
        for trace in options.trace or TRACES:
            for load in options.load or (LOADS[1:] if options.quick else LOADS):
                rows += bench.measure(Case(trace, load, replicas))
    show("Routing", rows, options.json)


if __name__ == "__main__":
    main()
