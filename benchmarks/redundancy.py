"""What it costs to store columns as fragments on several agents. Part of `benchmarks.sharing`.

    python -m benchmarks.redundancy --quick

Encoding is on memory as it is, compared with its goal in GB/s of data, and with memcpy of the same data.
The rest is of real agents with their stores on one disk, which is what they share here and would not
elsewhere: written bytes compared with (k+m)/k, what recalls wait longer for an agent that stands still,
columns that are recalled with one agent dead compared with all alive, evicts to another shard while
columns are repaired compared with evicts alone, and the columns of a node that has died with its memory
and disk: how many are hits at the next one, and how fast they get to the driver compared with the memory
that they were in before.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.dataplane import KEY, TAG, Agent, Memory, running
from benchmarks.harness import Row, options, percentile, progress, show, timed
from kvss_agent import native
from kvss_agent.client import Column, Miss, ShardClient, TierAnswer, Wanted
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES
from tests.hostile.machines import on
from tests.live import wait_until

MIB: Final = 1 << 20
ENCODE_GOALS: Final = {(4, 1): 12.0, (8, 2): 10.0}  # GB/s
DATA, PARITY = 4, 1
PAYLOAD: Final = MIB - HEADER_BYTES  # so that a slot has 1 MiB
COLUMNS, QUICK_COLUMNS = 64, 24
ROUNDS, QUICK_ROUNDS = 9, 3
TURNS, QUICK_TURNS = 48, 16  # of evicts beside a repair and evicts alone
TURN_COLUMNS: Final = 8  # that are repaired in one
TURN_SECONDS: Final = 2.5  # that takes about as long
LOOK_SECONDS: Final = 0.1  # between looks whether a repair goes on
DRAWS: Final = 400  # of turns, for an interval
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
PART: Final = "full.0"

Turn = tuple[list[float], list[float]]  # seconds of evicts alone, and beside a repair


def redundancy(*, quick: bool) -> list[Row]:
    rows = []
    for (data, parity), goal in ENCODE_GOALS.items():
        progress(f"encoding {data}+{parity}")
        rows += [_encoding(data, parity, size, goal, quick=quick) for size in (MIB, 4 * MIB)]
    rows += _agents(quick=quick)
    progress("evicts, alone and while columns are repaired")
    return [*rows, _beside_repair(QUICK_TURNS if quick else TURNS)]


def _encoding(data: int, parity: int, size: int, goal: float, *, quick: bool) -> Row:
    """Columns one after the other, so many that none is in the processor's cache."""
    count, rounds = (256 * MIB) // size, 3 if quick else 9
    memory = mmap.mmap(-1, count * size)
    block = secrets.token_bytes(MIB)
    for at in range(0, count * size, MIB):
        memory[at : at + MIB] = block
    view, step = memoryview(memory), size // data
    columns = [
        [view[at + place * step : at + (place + 1) * step] for place in range(data)]
        for at in range(0, count * size, size)
    ]
    into = [memoryview(bytearray(step)) for _ in range(parity)]
    code = ErasureCode(data, parity)
    copy = (ctypes.c_char * size)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def encode() -> None:
        for column in columns:
            code.encode(column, into)

    def copied() -> None:
        for at in range(count):
            ctypes.memmove(copy, start + at * size, size)

    encode()
    copied()
    took = [(timed(encode), timed(copied)) for _ in range(rounds)]
    ours, limit = (statistics.median(each) for each in zip(*took, strict=True))
    speed, memcpy = count * size / ours / 1e9, count * size / limit / 1e9
    name = f"redundancy.encode.{data}+{parity}.{size // MIB}MiB"
    return Row(name, speed, "GB/s", f"{goal:g} GB/s", speed / goal, 1.0, {"memcpy GB/s": memcpy})


def _fragment_shards(place: int) -> dict[str, dict[str, Any]]:
    part = fragment_part(PART, place, DATA, PARITY)
    size = fragment_slot_bytes(slot_bytes_for(PAYLOAD), DATA)
    return {f"f{place}": {"part": part, "slot_bytes": size, "slots": SLOTS}}


def _tell(home: Agent, holders: Sequence[Agent], bytes_per_second: int | None = None) -> None:
    """The home's shard `s` is stored by these; `other` is for evicts that have nothing to do with it."""
    named = [
        {"address": f"tcp:127.0.0.1:{one.tcp}", "shard": f"f{place}"}
        for place, one in enumerate(holders)
    ]
    redundancy = {
        "data": DATA,
        "parity": PARITY,
        "holders": named,
        "bytes_per_second": bytes_per_second,
    }
    more = {"s": {"part": PART, "redundancy": redundancy}}
    home.be(more, s=(COLUMNS, PAYLOAD), other=(COLUMNS, PAYLOAD))


def _be_holder(one: Agent, place: int) -> None:
    one.be(_fragment_shards(place), **{f"f{place}": (SLOTS, PAYLOAD // DATA)})


_wait = partial(wait_until, seconds=300.0)


def _redundancy(home: Agent) -> dict[str, Any]:
    shards = {one["name"]: one for one in home.http.get("/v1/observed").json()["shards"]}
    found: dict[str, Any] = shards["s"].get("redundancy", {"state": ""})
    return found


def _key(slot: int) -> bytes:
    return slot.to_bytes(2) + KEY[2:]


def _stored(client: ShardClient, memory: Memory, count: int) -> None:
    wanted = []
    for slot in range(count):
        number = client.evict(slot, _key(slot), TAG, 64, memory.sources[slot])
        wanted.append(Wanted(slot, Column(_key(slot), TAG, number)))
    answers = client.spill(wanted, redundant=True, wait_seconds=60)
    if set(answers) != {TierAnswer.DONE}:
        raise RuntimeError(f"columns were not stored: {set(answers)}")


def _recalled(client: ShardClient, count: int) -> float:
    client.delete(range(count))
    wanted = [Wanted(slot, Column(_key(slot), TAG, 0)) for slot in range(count)]
    began = time.perf_counter()
    found = client.recall(wanted)
    took = time.perf_counter() - began
    if missed := [one for one in found if isinstance(one, Miss)]:
        raise RuntimeError(f"columns were not recalled: {missed}")
    return took


def _received(client: ShardClient, memory: Memory, wanted: Sequence[Wanted]) -> float:
    """Refill these, which are there, and check every byte."""
    places = [memory.places[one.slot] for one in wanted]
    began = time.perf_counter()
    found = client.refill(wanted, places)
    took = time.perf_counter() - began
    if missed := [one for one in found if isinstance(one, Miss)]:
        raise RuntimeError(f"columns were not refilled: {missed}")
    if any(place != memory.sources[one.slot] for one, place in zip(wanted, places, strict=True)):
        raise RuntimeError("a column came back with other bytes")
    return took


def _hits(client: ShardClient, count: int) -> list[Wanted]:
    """Recall all columns: those that are there, and can be refilled."""
    asked = [Wanted(slot, Column(_key(slot), TAG, 0)) for slot in range(count)]
    return [
        Wanted(one.slot, one.column._replace(sequence=found.number))
        for one, found in zip(asked, client.recall(asked), strict=True)
        if not isinstance(found, Miss)
    ]


def _dead_node(
    home: Agent, heir: Agent, holders: Sequence[Agent], client: ShardClient, memory: Memory, count: int
) -> list[Row]:
    """The columns are in the holders' tier 2 and in the home's memory when the home dies."""
    there = _hits(client, count)
    _received(client, memory, there)
    before = statistics.median(_received(client, memory, there) for _ in range(QUICK_ROUNDS))
    home.process.kill()
    _tell(heir, holders)
    _wait("the next home is ready", lambda: _redundancy(heir)["state"] == "ready")
    with heir.client("tcp", "s", native.current()) as other:
        began = time.perf_counter()
        hits = _hits(other, count)
        took = time.perf_counter() - began + _received(other, memory, hits)
    share, size = len(hits) / count, PAYLOAD / 1e9
    speed, in_memory = len(hits) * size / took, len(there) * size / before
    more = {"memory GB/s": in_memory}
    return [
        Row("redundancy.dead_node.hits", 100 * share, "%", "all", share, 1.0),
        Row("redundancy.dead_node.recall", speed, "GB/s", "memory", speed / in_memory, None, more),
    ]


def _stopped_holder(holder: Agent, client: ShardClient, count: int, healthy: float) -> list[Row]:
    """What a recall of all columns takes longer while an agent with a fragment of each stands still: the
    first, which finds out, and the one after it."""
    holder.process.suspend()
    try:
        first, second = (_recalled(client, count) for _ in range(2))
    finally:
        holder.process.resume()
    more = {"healthy s": healthy}
    return [
        Row("redundancy.stopped_holder.first", first - healthy, "s", more=more),
        Row("redundancy.stopped_holder.next", second - healthy, "s", more=more),
    ]


def _evicts(
    client: ShardClient, memory: Memory, numbers: Iterator[int], goes_on: Callable[[], bool]
) -> list[float]:
    """Evicts that never pause: the seconds of each. Whether to go on is asked each LOOK_SECONDS."""

    def evict() -> None:
        slot = next(numbers) % COLUMNS
        last = client.evict(slot, _key(slot), TAG, 64, memory.sources[slot])
        client.wait_applied(last, 60)

    took: list[float] = []
    while goes_on():
        until = time.monotonic() + LOOK_SECONDS
        while time.monotonic() < until:
            took.append(timed(evict))
    return took


class _Repairs:
    """Of columns whose fragments a holder has lost, again and again, and evicts meanwhile."""

    def __init__(
        self, home: Agent, holder: Agent, client: ShardClient, other: ShardClient, memory: Memory
    ) -> None:
        """`client`: of the shard that is repaired; `other`: of the one that is evicted to."""
        self._home, self._holder, self._client = home, holder, client
        self._evicts = partial(_evicts, other, memory, itertools.count())
        self._columns, self._seconds = 0, 0.0  # that were repaired in turns, and of them
        self._took = TURN_SECONDS  # of the last repair

    def turn(self, *, alone_first: bool) -> Turn:
        """Evicts beside a repair, from when it has begun to its end, and as long evicts alone, before or
        after it. The agent is asked how far it is in both."""
        alone = self._alone(self._took) if alone_first else []
        before = self._repaired
        for path in (self._holder.directory / "files").glob("*/*/*/*"):
            path.unlink()
        _recalled(self._client, TURN_COLUMNS)
        if not self._goes_on() and self._repaired == before:
            raise RuntimeError("no column lacks a fragment")
        self._evicts(lambda: self._repaired == before)
        before, began = self._repaired, time.monotonic()
        beside = self._evicts(self._goes_on)
        self._took = time.monotonic() - began
        self._columns += self._repaired - before
        self._seconds += self._took
        return alone or self._alone(self._took), beside

    def _alone(self, seconds: float) -> list[float]:
        until = time.monotonic() + seconds
        return self._evicts(lambda: not self._goes_on() and time.monotonic() < until)

    @property
    def mib_per_second(self) -> float:
        return self._columns * PAYLOAD / MIB / self._seconds

    def _goes_on(self) -> bool:
        return bool(_redundancy(self._home)["incomplete"])

    @property
    def _repaired(self) -> int:
        return int(_redundancy(self._home)["repaired"])


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """In which the median is with 95 %, by the medians of as many that are drawn of these."""
    draw = random.Random(1)
    drawn = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS)]
    return percentile(drawn, 0.025), percentile(drawn, 0.975)


def _beside_repair(turns: int) -> Row:
    """Home and evicts have half of the processors, holders the others: they are other machines."""
    here = sorted(os.sched_getaffinity(0))
    half = len(here) // 2
    ours, theirs = (here[:half], here[half:]) if half else (here, here)
    memory, mover = Memory(PAYLOAD), native.current()
    with contextlib.ExitStack() as stack:
        with on(frozenset(theirs)):
            holders = [stack.enter_context(running(tier2=True)) for _ in range(DATA + PARITY)]
        stack.enter_context(on(frozenset(ours)))
        home = stack.enter_context(running(tier2=True))
        for place, one in enumerate(holders):
            _be_holder(one, place)
        _tell(home, holders)
        _wait("redundancy is ready", lambda: _redundancy(home)["state"] == "ready")
        client = stack.enter_context(home.client("tcp", "s", mover))
        other = stack.enter_context(home.client("tcp", "other", mover))
        _stored(client, memory, TURN_COLUMNS)
        return _compared(_Repairs(home, holders[0], client, other, memory), turns)


def _compared(repairs: _Repairs, turns: int) -> Row:
    """Turns are short, so that both halves of one find the machine alike, and the median of all counts,
    so that what else happens in a few of them does not. Every other one begins with evicts alone."""
    took = [repairs.turn(alone_first=bool(number % 2)) for number in range(turns)]
    ratios = [percentile(alone, 0.99) / percentile(beside, 0.99) for alone, beside in took]
    more = {
        f"{name} {label} ms": 1e3 * statistics.median(percentile(turn[at], share) for turn in took)
        for at, name in enumerate(("alone", "beside"))
        for label, share in PERCENTILES.items()
    }
    more["ratio from"], more["ratio to"] = _interval(ratios)
    more["repaired MiB/s"] = repairs.mib_per_second
    ratio, p99 = statistics.median(ratios), more["beside p99 ms"]
    return Row("redundancy.repair.evict.p99", p99, "ms", "evicts alone", ratio, 1 / 1.2, more)


def _agents(*, quick: bool) -> list[Row]:
    count = QUICK_COLUMNS if quick else COLUMNS
    rounds = QUICK_ROUNDS if quick else ROUNDS
    memory, mover = Memory(PAYLOAD), native.current()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(running(tier2=True))
        holders = [stack.enter_context(running(tier2=True)) for _ in range(DATA + PARITY)]
        spare, heir = (stack.enter_context(running(tier2=True)) for _ in range(2))
        for place, one in enumerate(holders):
            _be_holder(one, place)
        _tell(home, holders)
        _wait("redundancy is ready", lambda: _redundancy(home)["state"] == "ready")
        client = stack.enter_context(home.client("tcp", "s", mover))

        progress("columns are stored as fragments")
        _stored(client, memory, count)
        files = [path for one in holders for path in (one.directory / "files").glob("*/*/*/*")]
        written = sum(path.stat().st_size for path in files) / (count * slot_bytes_for(PAYLOAD))
        limit = (DATA + PARITY) / DATA
        rows = [Row("redundancy.write.amplification", written, "x", f"{limit:g}", limit / written, 0.98)]

        progress("columns are recalled, with all agents alive and with one dead")
        healthy = [_recalled(client, count) for _ in range(rounds)]
        rows += _stopped_holder(holders[0], client, count, statistics.median(healthy))
        holders[0].process.kill()
        _recalled(client, count)  # the first one finds out
        degraded = [_recalled(client, count) for _ in range(rounds)]
        size, ours = count * PAYLOAD, statistics.median(degraded)
        against = statistics.median(healthy)
        more, ratio = {"healthy GB/s": size / against / 1e9}, against / ours
        row = Row("redundancy.recall.degraded", size / ours / 1e9, "GB/s", "all alive", ratio, 0.5, more)
        rows.append(row)

        progress("what the dead one had is repaired")
        holders[0] = spare
        _be_holder(spare, 0)
        _tell(home, holders)
        _wait("all is repaired", lambda: _redundancy(home).get("repaired") == count)
        progress("the node of a shard dies")
        rows += _dead_node(home, heir, holders, client, memory, count)
    return rows


def main() -> None:
    given = options(__doc__)
    native.best(build=True)
    show("Redundancy", redundancy(quick=given.quick), given.json)


if __name__ == "__main__":
    main()
