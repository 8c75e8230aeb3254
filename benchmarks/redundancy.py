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
from kvss_agent.redundancy.stores import BESIDE_BYTES_PER_SECOND
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES
from tests.live import wait_until

MIB: Final = 1 << 20
ENCODE_GOALS: Final = {(4, 1): 12.0, (8, 2): 10.0}  # GB/s
DATA, PARITY = 4, 1
PAYLOAD: Final = MIB - HEADER_BYTES  # so that a slot has 1 MiB
COLUMNS, QUICK_COLUMNS = 64, 24
ROUNDS, QUICK_ROUNDS = 9, 3
TURNS, QUICK_TURNS = 7, 5  # of evicts alone and evicts beside a repair
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
PART: Final = "full.0"


def redundancy(*, quick: bool) -> list[Row]:
    rows = []
    for (data, parity), goal in ENCODE_GOALS.items():
        progress(f"encoding {data}+{parity}")
        rows += [_encoding(data, parity, size, goal, quick=quick) for size in (MIB, 4 * MIB)]
    return [*rows, *_agents(quick=quick)]


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


def _evicts(client: ShardClient, memory: Memory, count: int) -> list[float]:
    def evict(number: int) -> None:
        slot = number % COLUMNS
        last = client.evict(slot, _key(slot), TAG, 64, memory.sources[slot])
        client.wait_applied(last, 60)

    return [timed(lambda: evict(number)) for number in range(count)]  # noqa: B023


def _repair(
    home: Agent,
    holders: Sequence[Agent],
    client: ShardClient,
    memory: Memory,
    alone_seconds: float,
) -> tuple[dict[str, float], dict[str, float]]:
    """One turn: evicts beside the repair of what the first holder lacks, to its end, and evicts alone,
    half of them before it and half after it. Seconds of some percentiles, alone and beside. The agent is
    asked how far it is in both: that takes some of its time as well."""

    def measured(goes_on: Callable[[], bool]) -> list[float]:
        took: list[float] = []
        while goes_on():
            took += _evicts(client, memory, 25)
        return took

    def percentiles(took: Sequence[float]) -> dict[str, float]:
        return {name: percentile(took, share) for name, share in PERCENTILES.items()}

    def alone() -> list[float]:
        until = time.monotonic() + alone_seconds / 2
        return measured(lambda: bool(_redundancy(home)) and time.monotonic() < until)

    before = alone()
    _be_holder(holders[0], 0)
    _tell(home, holders, 64 * MIB)
    _wait("repair has begun", lambda: _redundancy(home).get("repaired", 0) > 0)
    beside = measured(lambda: bool(_redundancy(home)["incomplete"]))
    return percentiles([*before, *alone()]), percentiles(beside)


def _repairs(
    home: Agent,
    holders: Sequence[Agent],
    spares: Iterator[Agent],
    client: ShardClient,
    memory: Memory,
    count: int,
    turns: int,
) -> tuple[Row, Agent]:
    """Turns of evicts alone and beside a repair, each about as long, and who is the first holder then.
    What else happens on the machine makes the p99 of one turn twice that of another one. So each is
    compared with the one beside it, and the median of all turns counts."""
    seconds = count * PAYLOAD / BESIDE_BYTES_PER_SECOND
    took, first = [], holders[0]
    for _ in range(turns):
        first.process.kill()
        first = next(spares)
        took.append(_repair(home, [first, *holders[1:]], client, memory, seconds))
    more = {
        f"{name} {share} ms": 1e3 * statistics.median(turn[at][share] for turn in took)
        for at, name in enumerate(("alone", "beside"))
        for share in PERCENTILES
    }
    ratios = [alone["p99"] / beside["p99"] for alone, beside in took]
    more |= {"least ratio": min(ratios), "greatest ratio": max(ratios)}
    p99, ratio = more["beside p99 ms"], statistics.median(ratios)
    return Row("redundancy.repair.evict.p99", p99, "ms", "evicts alone", ratio, 1 / 1.2, more), first


def _agents(*, quick: bool) -> list[Row]:
    count = QUICK_COLUMNS if quick else COLUMNS
    rounds, turns = (QUICK_ROUNDS, QUICK_TURNS) if quick else (ROUNDS, TURNS)
    memory, mover = Memory(PAYLOAD), native.current()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(running(tier2=True))
        holders = [stack.enter_context(running(tier2=True)) for _ in range(DATA + PARITY)]
        spares = (stack.enter_context(running(tier2=True)) for _ in itertools.count())
        heir = next(spares)
        for place, one in enumerate(holders):
            _be_holder(one, place)
        _tell(home, holders)
        _wait("redundancy is ready", lambda: _redundancy(home)["state"] == "ready")
        client = stack.enter_context(home.client("tcp", "s", mover))
        other = stack.enter_context(home.client("tcp", "other", mover))

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

        progress("evicts, alone and while columns are repaired")
        row, first = _repairs(home, holders, spares, other, memory, count, turns)
        rows.append(row)

        progress("the node of a shard dies")
        rows += _dead_node(home, heir, [first, *holders[1:]], client, memory, count)
    return rows


def main() -> None:
    given = options(__doc__)
    native.best(build=True)
    show("Redundancy", redundancy(quick=given.quick), given.json)


if __name__ == "__main__":
    main()
