"""What a policy would do, foretold and tried: previews beside replays under the policy.

Each trace is replayed once with room for all, and an hour to live; from the sample that the driver has
then, other policies are foretold. Then each is replayed. Also what sampling costs a driver, how long a
preview takes, and how long until a hundred drivers have what was saved. Traces come from --traces or
TRACES_DIR; without them only that is measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import msgspec

from benchmarks.harness import QUICK_HELP, Row, add_traces, limited, parser, percentile, progress, show
from benchmarks.push import push_rows
from swdriver_shim.adapters.wafer import Emulator, LedgerCache, Wafer, wafer_layout
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Tally
from swdriver_shim.cache.reuse.preview import Preview, Traffic, preview
from swdriver_shim.cache.reuse.sample import Recorder, Sample
from swdriver_shim.policy import OrgPolicies, Policy
from swdriver_shim.replay.emulator import (
    Orgs,
    TraceClock,
    output_tokens,
    prompt_tokens,
    replay,
    run_housekeeping,
)
from swdriver_shim.replay.traces import Malformed, Request, read

BYTES_PER_TOKEN = 1024
SLOTS = 4_000_000  # room for all
WAFER = Wafer(wafer_layout(1, BYTES_PER_TOKEN))
COLUMN_BYTES = WAFER.layout.groups[0].column_bytes
NOW = Policy()
PARTS = ("conversation", "sessions", "overhead", "push")
ERROR_PP, P95_MS, OVERHEAD = 2.0, 300.0, 1.0
OVERHEAD_REQUESTS = 4000
PREVIEWS = 3  # of each case, to tell how long they take
TIMES = ("", ".cpu", ".again", ".again.cpu")  # a first preview, and one of an edit after others


@dataclass(frozen=True)
class Case:
    """A policy, with a quota in columns of all orgs together. `slots`: of the pool, that all share."""

    first_s: int | None = None
    last_s: int | None = None
    quota: int | None = None
    displacement: str = "default"
    slots: int = SLOTS

    def policy(self, orgs: int) -> Policy:
        return Policy(
            ttl_first_use_seconds=self.first_s,
            ttl_last_use_seconds=self.last_s,
            dram_bytes_max=None if self.quota is None else self.quota // orgs * COLUMN_BYTES,
            displacement=self.displacement,  # type: ignore[arg-type]  # a name that is there
        )

    def __str__(self) -> str:
        parts = [
            self.first_s and f"first {self.first_s} s",
            self.last_s and f"last {self.last_s} s",
            self.quota and f"quota {self.quota:,}",
            self.slots < SLOTS and f"pool {self.slots:,}",
            self.displacement != "default" and self.displacement,
        ]
        return ", ".join(part for part in parts if part)


TTLS = (
    Case(last_s=60),
    Case(last_s=300),
    Case(first_s=60),
    Case(first_s=900),
    Case(first_s=900, last_s=120),
)
SIZES = {"conversation": (8_000, 40_000, 80_000, 240_000), "sessions": (4_000, 8_000, 16_000, 32_000)}


def cases(trace: str, orgs: int, *, quick: bool) -> Sequence[Case]:
    hour, sizes = NOW.ttl_last_use_seconds, SIZES[trace]
    quotas = [Case(last_s=hour, quota=size) for size in sizes]
    both = [Case(last_s=300, quota=sizes[2]), Case(first_s=900, quota=sizes[3])]
    if quick:
        return [TTLS[1], quotas[2]] if orgs == 1 else []
    if orgs > 1:
        return [TTLS[1], TTLS[3], *quotas[2:], both[0]]
    return [*TTLS, *quotas, *both]


def served(requests: Sequence[Request], orgs: int, case: Case | None) -> tuple[Ledger, float]:
    """A driver that has served all of them, and what its clock says."""
    ledger, clock = Ledger(WAFER.layout), TraceClock()
    ledger.set_slot_limit(0, case.slots if case else SLOTS)
    who = Orgs(orgs, 0, WAFER.namespace)
    policy = case.policy(orgs) if case else NOW
    ledger.set_policies({name: OrgPolicies(policy=policy) for name in who.names}, 0)

    def before(request: Request) -> None:
        clock.pass_to(request.at_s)
        run_housekeeping(ledger, clock.now)

    replay(requests, Emulator(LedgerCache(ledger, WAFER, clock)), who, before)
    return ledger, clock.now


def hit_rates(requests: Sequence[Request], orgs: int, case: Case) -> dict[str, float]:
    """What each org really hits under that policy."""
    ledger, _ = served(requests, orgs, case)
    return {org: account.tally.hit_rate or 0.0 for org, account in ledger.accounts.items()}


@dataclass
class Told:
    """What was foretold of an org, and what it was."""

    preview: Preview
    hit_rate: float

    @property
    def error_pp(self) -> float:
        assert self.preview.proposed.hit_rate is not None
        return 100 * (self.preview.proposed.hit_rate - self.hit_rate)


def error_rows(trace: str, requests: Sequence[Request], *, quick: bool) -> Iterator[Row]:
    print(f"\n{trace}: {len(requests):,} requests\n")
    print("| orgs | policy | replayed | foretold | error, points | ± | worst org | preview |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    errors, times = list[float](), {kind: list[float]() for kind in TIMES}
    for orgs in (1, 4):
        todo = cases(trace, orgs, quick=quick)
        if not todo:
            continue
        with ProcessPoolExecutor() as pool:  # gone before anything is timed
            replayed = list(pool.map(partial(hit_rates, requests, orgs), todo))
        ledger, now = served(requests, orgs, None)
        raw = {org: msgspec.json.encode(ledger.reuse(org, now)) for org in ledger.accounts}
        del ledger
        edited = {org: Traffic.of(msgspec.json.decode(one, type=Sample)) for org, one in raw.items()}
        gc.collect()
        gc.freeze()  # as a web process does: a million requests are not looked through for garbage
        for case, rates in zip(todo, replayed, strict=True):
            told: dict[str, Told] = {}
            for org, rate in rates.items():
                for _ in range(PREVIEWS):
                    with timed(times, ""):
                        sample = msgspec.json.decode(raw[org], type=Sample)
                        made = preview([Traffic.of(sample)], NOW, case.policy(orgs))
                with timed(times, ".again"):
                    preview([edited[org]], NOW, case.policy(orgs))
                told[org] = Told(made, rate)
            errors += print_case(orgs, case, told, times[""][-1])
    yield limited(f"preview.error_pp.{trace}", max(errors), "points", ERROR_PP)
    for kind, taken in times.items():
        p95 = 1e3 * percentile(taken, 0.95)
        yield limited(f"preview.p95{kind}.{trace}", p95, "ms", P95_MS)


@contextmanager
def timed(times: Mapping[str, list[float]], kind: str) -> Iterator[None]:
    """What a caller waits, and its own time."""
    began, began_cpu = time.perf_counter(), time.process_time()
    yield
    times[kind].append(time.perf_counter() - began)
    times[f"{kind}.cpu"].append(time.process_time() - began_cpu)


def print_case(orgs: int, case: Case, told: dict[str, Told], seconds: float) -> list[float]:
    """Its line in the table. The errors of all orgs."""
    worst = max(told.values(), key=lambda one: abs(one.error_pp))
    of_all = list(told.values())
    real, foretold, error = (
        sum(each) / len(of_all)
        for each in (
            [100 * one.hit_rate for one in of_all],
            [100 * (one.preview.proposed.hit_rate or 0) for one in of_all],
            [100 * one.preview.proposed.error for one in of_all],
        )
    )
    print(
        f"| {orgs} | {case} | {real:.2f} | {foretold:.2f} | {foretold - real:+.2f} | {error:.2f} | "
        f"{worst.error_pp:+.2f} | {1e3 * seconds:.0f} ms |",
        flush=True,
    )
    return [abs(one.error_pp) for one in of_all]


def overhead_rows(name: str, requests: Sequence[Request]) -> Iterator[Row]:
    """What a second recorder takes that is told the same, beside the requests it is told of."""
    ledger, clock = Ledger(WAFER.layout), TraceClock()
    ledger.set_slot_limit(0, SLOTS)
    (keys,) = Orgs(1, 0, WAFER.namespace)._keys  # noqa: SLF001 - the one there is
    recorder, tally = Recorder(), Tally()
    hashing, deciding, sampling = list[float](), list[float](), list[float]()
    for number, request in enumerate(requests):
        clock.pass_to(request.at_s)
        tokens, output = prompt_tokens(request, number), output_tokens(request, number)
        times = [time.perf_counter()]
        prompt = keys.prompt(tokens)
        times.append(time.perf_counter())
        match = ledger.match(prompt, clock.now)
        ledger.release(match)
        times.append(time.perf_counter())
        prompt.extend(output)
        times.append(time.perf_counter())
        ledger.finish_store(ledger.begin_store(prompt, prompt.tokens, clock.now), clock.now)
        times.append(time.perf_counter())
        recorder.matched(match.keys, match.tokens, tally, clock.now)
        recorder.stored(prompt, prompt.tokens, clock.now)
        times.append(time.perf_counter())
        steps = [after - before for before, after in pairwise(times)]
        hashing.append(steps[0] + steps[2])
        deciding.append(steps[1] + steps[3] - steps[4])  # which does that, too
        sampling.append(steps[4])
    half = len(requests) // 2
    for suffix, of in (("", slice(half, None)), (".from_the_start", slice(None))):
        asked, decided, sampled = (sum(each[of]) for each in (hashing, deciding, sampling))
        share = 100 * sampled / (asked + decided)
        us = 1e6 * sampled / len(sampling[of])
        more = {"µs a request": us, "of deciding alone, ‰": 1000 * sampled / decided}
        yield limited(f"driver.overhead.{name}{suffix}", share, "%", OVERHEAD, more)


def trace_rows(asked: argparse.Namespace, only: Sequence[str]) -> list[Row]:
    """Raises OSError or Malformed where there are no traces."""
    traces = {
        "conversation": list(read(asked.traces / "conversation.jsonl")),
        "sessions": list(read(asked.traces / "agent-sessions")),
    }
    rows: list[Row] = []
    for name, requests in traces.items():
        if "overhead" in only:
            progress(f"overhead of sampling, {name}")
            rows += overhead_rows(name, requests[:OVERHEAD_REQUESTS])
    for name, requests in traces.items():
        if name in only and not (asked.quick and name == "conversation"):
            progress(f"previews compared with replays, {name}")
            rows += error_rows(name, requests, quick=asked.quick)
    return rows


def main() -> int:
    to_tell = parser(__doc__, f"{QUICK_HELP}; few policies")
    add_traces(to_tell)
    to_tell.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    asked = to_tell.parse_args()
    only = asked.only
    rows: list[Row] = []
    if "push" in only:
        progress("a policy on its way to a hundred drivers")
        rows += push_rows(quick=asked.quick)
    if set(only) - {"push"}:
        try:
            rows += trace_rows(asked, only)
        except (OSError, Malformed) as error:
            print(f"No traces: {error}. Say where they are: --traces or TRACES_DIR.", file=sys.stderr)
            if not rows:
                return 1
    show("Policies", rows, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
