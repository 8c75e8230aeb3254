"""How soon first tokens come where replicas borrow from each other. Part of `benchmarks.sharing`.

Four emulated replicas get the conversation trace by the brain's choice, at 60 and 90 % of capacity, with
and without borrowing. A borrowed token takes what 160 KiB (the KV of a model of 70 billion parameters in
8 bits) take at a quarter of 400 Gbit/s; `tier2` is the same at 3.1 GB/s, a shared disk. Compared are
requests with themselves in the run without. What this machine does meanwhile changes
nothing, and each run has the same figures. But one request that goes elsewhere sends many after it
elsewhere: of some fifty requests the ratio is 0.7 at one speed and 2.6 at another one near it, and any
change of the brain's choice deals them anew. So each load is played at many speeds near it, the requests
of all of them are compared, and fewer than `JUDGED_FROM` are judged by no goal. `draws` are what 95 of
100 draws of as many of these speeds have.

Which ones? A request borrows where the replica that has its prompt is busy, and in the other run that
replica is busy as often as ever. So those that have borrowed were sooner in the run without than they
would be if it had the same queues; and those that `would` have borrowed there, had they been allowed to,
are later there for the same reason. `either` has both: if borrowing changed nothing, the two runs could
change places, and its ratio would be 1.

`by_itself` is what each borrow brings by itself: the run with borrowing is played again, and at each
request that borrows it goes on without that one borrow, until the first token of that request. The brain
chooses anew, among the queues of that moment.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import struct
from collections.abc import Container, Iterator, Sequence
from statistics import fmean
from typing import Final

from benchmarks.harness import Row, percentile, progress, traces_folder
from benchmarks.routing.fleet import Fleet, Result, Router, Transfers
from benchmarks.routing.policies import Exact, Sharing, WouldBorrow
from benchmarks.routing.timing import served
from benchmarks.routing.traffic import Asking, conversation, orgs
from inference_brain.choice.candidates import Candidate

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
DRAWS: Final = 500
_SECONDS: Final = struct.Struct("d")
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
        without = [WouldBorrow() for _ in speeds]
        alone = [_play(count, one, speed, 0.0) for one, speed in zip(without, speeds, strict=True)]
        for way, rate in WAYS.items():
            progress(f"conversation at {load} %, {way}")
            shared = [_play(count, Sharing(), speed, TOKEN_BYTES / rate) for speed in speeds]
            pairs = list(zip(alone, shared, [one.which for one in without], strict=True))
            goal = GOAL if way == "memory" else None
            yield from rows(f"{load}.{way}", pairs, goal)
            progress(f"conversation at {load} %, {way}, each borrow by itself")
            alone_of = [
                (one, _left_out(count, one, speed, TOKEN_BYTES / rate))
                for speed, one in zip(speeds, shared, strict=True)
            ]
            yield from by_itself(f"{load}.{way}", alone_of, goal)


def _requests(count: int) -> list[Asking]:
    return conversation(traces_folder(), count)


def _play(
    count: int, router: Router, speed: float, token_seconds: float, at_once: int | None = None
) -> Result:
    transfers = Transfers(WAIT_SECONDS, token_seconds)
    fleet = Fleet(served(), REPLICAS, COLUMNS, [keys.org for keys in orgs()], transfers)
    gc.collect()
    return asyncio.run(fleet.play(_requests(count), router, speed, at_once))


class LeavingOut(Sharing):
    """Borrows, and finds out what each of some borrows has brought: before such a request is placed, a
    copy of this process plays on without the borrow, and ends with the first token of that request."""

    def __init__(self, which: Container[int]) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}  # to the first token, without the borrow
        self._which = which
        self._copy_of: int | None = None  # the request that this process, a copy, is for
        self._borrows = True
        self._answer = -1
        self._request_seconds = 0.0

    async def begin(self, fleet: Fleet) -> None:
        await super().begin(fleet)
        self._request_seconds = fleet.timing.request

    async def place(self, asking: Asking, now: float) -> int:
        if asking.number in self._which and self._copy_of is None:
            self._fork(asking.number)
        self._borrows = asking.number != self._copy_of
        return await super().place(asking, now)

    def _fork(self, number: int) -> None:
        question, self._answer = os.pipe()
        if copy := os.fork():
            os.close(self._answer)
            [self.seconds[number]] = _SECONDS.unpack(os.read(question, _SECONDS.size))
            os.close(question)
            os.waitpid(copy, 0)
        else:
            self._copy_of = number

    def _with_siblings(self, candidates: list[Candidate], hits: Sequence[int]) -> list[Candidate]:
        return super()._with_siblings(candidates, hits) if self._borrows else candidates

    async def first_token(self, asking: Asking, cached: int, now: float) -> None:
        if asking.number == self._copy_of:
            os.write(self._answer, _SECONDS.pack(now - asking.sent + self._request_seconds))
            os._exit(0)
        await super().first_token(asking, cached, now)


def _left_out(count: int, shared: Result, speed: float, token_seconds: float) -> dict[int, float]:
    """To the first token of each request that borrowed in this run, had it alone not borrowed."""
    router, process = LeavingOut(shared.borrowed), os.getpid()
    try:
        _play(count, router, speed, token_seconds)
    finally:
        if os.getpid() != process:  # a copy that has failed: whoever waits for it finds no answer
            os._exit(1)
    return router.seconds


def by_itself(
    name: str, pairs: Sequence[tuple[Result, dict[int, float]]], goal: float | None
) -> Iterator[Row]:
    """Of runs with borrowing, and what their requests took where one of them did not borrow."""
    speeds = [
        (list(left_out.values()), [shared.by_request[number] for number in left_out])
        for shared, left_out in pairs
    ]
    yield from _compared(f"p2p.ttft.p50.{name}.by_itself", "without it", speeds, goal)


def rows(
    name: str, runs: Sequence[tuple[Result, Result, Container[int]]], goal: float | None
) -> Iterator[Row]:
    """Of runs without borrowing and with it, and which requests of the former would have borrowed."""
    selected: dict[str, list[Compared]] = {"": [], ".would": [], ".either": []}
    for alone, shared, would in runs:
        both = sorted(alone.by_request.keys() & shared.by_request.keys())
        borrowed = [one for one in both if one in shared.borrowed]
        would_borrow = [one for one in both if one in would]
        either = [one for one in both if one in shared.borrowed or one in would]
        for suffix, which in (("", borrowed), (".would", would_borrow), (".either", either)):
            before, after = alone.by_request, shared.by_request
            selected[suffix].append(([before[one] for one in which], [after[one] for one in which]))
    for suffix, speeds in selected.items():
        judged = None if suffix == ".would" else goal
        yield from _compared(f"p2p.ttft.p50.{name}{suffix}", "without", speeds, judged)
    alone_mean = fmean(alone.mean for alone, _, _ in runs)
    shared_mean = fmean(shared.mean for _, shared, _ in runs)
    hits = {
        "hit %": 100 * fmean(shared.hit_rate for _, shared, _ in runs),
        "alone hit %": 100 * fmean(alone.hit_rate for alone, _, _ in runs),
    }
    row, ratio = f"p2p.ttft.mean.{name}.of_all", alone_mean / shared_mean
    yield Row(row, 1e3 * shared_mean, "ms", "without", ratio, more=hits)


Compared = tuple[list[float], list[float]]  # of a speed: seconds without and with, by request


def _compared(row: str, against: str, given: Sequence[Compared], goal: float | None) -> Iterator[Row]:
    """Medians of the requests of all speeds, if any has borrowed, and how much they differ by speeds."""
    if not (speeds := [one for one in given if one[0]]):
        return
    before, after = _joined(speeds)
    rng = random.Random(0)
    draws = [_ratio(*_joined(rng.choices(speeds, k=len(speeds)))) for _ in range(DRAWS)]
    ratios = [_ratio(*one) for one in speeds]
    more = {
        "requests": len(after),
        "least ratio %": 100 * min(ratios),
        "largest ratio %": 100 * max(ratios),
        "draws from %": 100 * percentile(draws, 0.025),
        "draws to %": 100 * percentile(draws, 0.975),
        "later with it": sum(one < other for one, other in zip(before, after, strict=True)),
    }
    judged = goal if len(after) >= JUDGED_FROM else None
    yield Row(row, 1e3 * percentile(after, 0.5), "ms", against, _ratio(before, after), judged, more)


def _joined(speeds: Sequence[Compared]) -> Compared:
    return [one for before, _ in speeds for one in before], [one for _, after in speeds for one in after]


def _ratio(before: Sequence[float], after: Sequence[float]) -> float:
    return percentile(before, 0.5) / percentile(after, 0.5)
