"""Processor time of single operations, measured a turn at a time: what `benchmarks.versions` asks of two
checkouts by turns. Run by itself, it measures whatever packages are in its path, so that the same lines
measure another version too; it uses only what both have.

    PYTHONPATH=CHECKOUT CHECKOUT/.venv/bin/python -P benchmarks/costs.py telemetry

Each line that it reads is a turn, answered by one of JSON: microseconds of each operation. Processor
time does not count what others have of the machine; what they take from its caches and memory, it does.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

Costs = dict[str, float]
Turn = Callable[[], Costs]

SOURCES: Final = 500  # that tell
RECORDS_EACH: Final = 4
COLUMNS, TIMES = 256, 2  # that are carried, and how often in a turn
IDLE_SECONDS: Final = 1.0
QUERIES: Final = 4
KIB: Final = 1 << 10


def of(call: Callable[[], object], operations: int, *others: int) -> float:
    """Microseconds of each of so many operations, those of other processes that take part included."""
    began = _spent(others)
    call()
    return (_spent(others) - began) / operations * 1e6


def _spent(others: tuple[int, ...]) -> float:
    # The clock of another process, as clock_getcpuclockid(3) makes it of its id: all its threads.
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in others)


# Telemetry


@contextlib.contextmanager
def telemetry() -> Iterator[Turn]:
    from benchmarks import telemetry as benchmark
    from tests.embedded import embedded_servers

    with (
        tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory,
        embedded_servers(Path(directory)) as servers,
    ):
        benchmark._set_up(servers)  # noqa: SLF001 - as other versions call it
        from django.db import connections

        told, asked, emitted = Told(servers.redis_url), Asked(), Emitted()
        yield lambda: {**emitted.turn(), **told.turn(), **asked.turn()}
        connections.close_all()


class Emitted:
    """What a process spends to tell numbers of 200 series, each second."""

    def __init__(self) -> None:
        from benchmarks.telemetry import _Host, _timed
        from telemetry.emit.deltas import Deltas

        self._host, self._timed = _Host(), _timed
        self._deltas = Deltas(self._host.collect)

    def turn(self) -> Costs:
        times = [self._timed(self._deltas, self._host) for _ in range(100)]
        return {"telemetry.emit": sum(times) / len(times) * 1e6}


class Told:
    """Records in Redis, and ingest in this process: from a stream that many share, and, where the
    version has them, from streams of their own."""

    def __init__(self, redis_url: str) -> None:
        import random

        import msgspec
        import redis

        from benchmarks.telemetry import Node
        from telemetry import records
        from telemetry.ingest.service import Ingest

        self._client = redis.Redis.from_url(redis_url)
        self._ingest = Ingest(self._client, "costs")
        self._own = getattr(records, "OWN_STREAM", None)
        randomness = random.Random(1)
        self._nodes = [Node(number, randomness) for number in range(SOURCES)]
        self._records = [msgspec.msgpack.decode(one.record(time.time())) for one in self._nodes]
        for node in self._nodes:
            self._client.set(records.SHAPE_KEY + node.shape.digest.hex(), node.shape.encoded)
        if self._own:
            for node in self._nodes:
                self._client.xadd(
                    f"{self._own}node:ax-{node.number}",
                    {"shape": node.shape.encoded, "record": self._next(node.number)},
                )
        self._ingest.join()
        if self._own:
            self._read(SOURCES)
        self.turn()  # what is learned once has been learned

    def _next(self, number: int) -> bytes:
        import msgspec

        record = self._records[number]
        record[1] += 1
        record[8] = time.time()
        return msgspec.msgpack.encode(record)

    def _tell(self, streams: list[str]) -> None:
        for _ in range(RECORDS_EACH):
            pipe = self._client.pipeline(transaction=False)
            for number, stream in enumerate(streams):
                pipe.xadd(stream, {"record": self._next(number)})
            pipe.execute()

    def _read(self, left: int) -> None:
        """So many records, as `manage.py ingest` does it."""
        from telemetry.store.rounds import run_rounds

        def one_round() -> float:
            nonlocal left
            left -= self._ingest.step()
            if left <= 0:
                signal.raise_signal(signal.SIGTERM)
            return 0.0

        thresholds = gc.get_threshold()
        run_rounds(one_round)
        gc.set_threshold(*thresholds)  # what else is measured here is not done by ingest

    def _row(self, streams: list[str]) -> float:
        from telemetry.models import Source

        self._tell(streams)
        records = SOURCES * RECORDS_EACH
        cost = of(lambda: self._read(records), records)
        assert Source.objects.filter(sequence=self._records[0][1]).count() == SOURCES, (
            "not all is written"
        )
        return cost

    def turn(self) -> Costs:
        from telemetry.records import FIELD, STREAM, decode

        fields = [{FIELD: self._next(number)} for number in range(SOURCES)]
        for record in self._records:
            record[1] -= 1

        def decode_all() -> None:
            gc.disable()  # ingest searches for garbage at other times
            for one in fields:
                decode(one)
            gc.enable()

        made = {
            "telemetry.decode": of(decode_all, SOURCES),
            "telemetry.ingest": self._row([STREAM] * SOURCES),
        }
        if self._own:
            made["telemetry.ingest.own"] = self._row(
                [f"{self._own}node:ax-{number}" for number in range(SOURCES)]
            )
        return made


class Asked:
    """A heat map of six hours of an org, from rows of ten seconds."""

    HOURS: Final = 6

    def __init__(self) -> None:
        import random

        from benchmarks.telemetry import _bucket_of_an_org, _learn, _learn_shapes
        from telemetry.store.storage import Stored, copy_in, day_of, encoded, make_days

        self._end = time.time() // 3600 * 3600 - 86_400
        start = self._end - 3600 * self.HOURS
        make_days("10s", {day_of(start), day_of(self._end)})
        shape, cells = _bucket_of_an_org(random.Random(3))
        [topic], [number] = _learn(["org:costs"]), _learn_shapes([shape])
        stored = [encoded(one) for one in cells]
        buckets = range(int(start), int(self._end), 10)
        copy_in(
            "10s",
            [Stored(topic, number, bucket, stored[bucket // 10 % len(stored)]) for bucket in buckets],
        )

    def turn(self) -> Costs:
        from telemetry import queries
        from telemetry.metrics import Catalog

        question = queries.Question(
            topic="org:costs",
            metric=Catalog().histogram("bench_refill_seconds", "Refills."),
            fold=queries.Fold.HEATMAP,
            start=self._end - 3600 * self.HOURS,
            end=self._end,
            step=180,
            level="10s",
        )
        return {
            "telemetry.heatmap": of(
                lambda: [queries.ask(question, self._end + 60) for _ in range(QUERIES)], QUERIES
            )
        }


# Driver


@contextlib.contextmanager
def driver() -> Iterator[Turn]:
    from benchmarks import driver as benchmark
    from swdriver_shim.adapters.wafer import wafer_layout

    benchmark.MILLION, benchmark.PURGED = 150_000, 30_000  # so that a turn is short
    decided = Decided()
    layout = wafer_layout(1, Moved.TOKEN_BYTES)
    fleet = benchmark.fleet  # type: ignore[attr-defined]  # its module has moved between versions
    with fleet.started(layout, 4096, 2) as agents, Moved(agents) as moved:
        yield lambda: {**decided.turn(), **moved.turn()}


class Decided:
    """A ledger of many columns, and no bytes."""

    def __init__(self) -> None:
        from benchmarks.driver import Million

        self._big = Million()

    def turn(self) -> Costs:
        from benchmarks import driver as benchmark

        big, maker = self._big, benchmark.keys("globex")
        columns = benchmark.PROMPT_COLUMNS
        asked = [benchmark.tokens(turn * columns, columns) for turn in range(20)]
        more = [benchmark.tokens(turn, 16) for turn in range(20)]
        prompts: list[Any] = []

        def cold() -> None:
            for tokens in asked:
                prompts.append(maker.prompt(tokens))
                assert big.match(prompts[-1]) == len(tokens)

        def continued() -> None:
            for prompt, tokens in zip(prompts, more, strict=True):
                prompt.extend(tokens)
                big.match(prompt)

        def purge() -> None:
            big.ledger.purge("acme")
            for piece in benchmark.pieces(big):
                piece()

        return {
            "driver.match": of(cold, 20),
            "driver.match.continued": of(continued, 20),
            "driver.purge": of(purge, benchmark.PURGED),
            "driver.store": of(lambda: big.fill("acme", benchmark.PURGED), benchmark.PURGED),
        }


class Moved:
    """A driver on real agents: columns of 256 KiB in four parts, and the agents' own time."""

    TOKEN_BYTES: Final = 4096
    PROMPTS: Final = 8
    PROMPT_COLUMNS: Final = 32

    def __init__(self, agents: Any) -> None:
        from benchmarks.driver import keys
        from swdriver_shim.adapters.wafer import wafer_layout
        from swdriver_shim.driver import Driver

        self._layout = wafer_layout(1, self.TOKEN_BYTES)
        self._parts: dict[int, memoryview] = {}
        self._driver = Driver(self._layout, "bench", agents.shards())
        self._maker = keys("acme")
        self._agents = _children()
        self._seeds = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.close()

    def _part(self, group: int, shard: int, depth: int, tokens: int) -> memoryview:  # noqa: ARG002
        size = self._layout.groups[group].bytes_per_token[shard] * tokens
        if size not in self._parts:
            self._parts[size] = memoryview(bytearray(os.urandom(size)))
        return self._parts[size]

    def turn(self) -> Costs:
        from benchmarks.driver import tokens

        columns = self.PROMPTS * self.PROMPT_COLUMNS
        made = [
            self._maker.prompt(tokens(next(self._seeds) * self.PROMPT_COLUMNS, self.PROMPT_COLUMNS))
            for _ in range(self.PROMPTS)
        ]

        def store() -> None:
            for prompt in made:
                assert self._driver.store(prompt, prompt.tokens, self._part).columns

        def load() -> None:
            for prompt in made:
                assert self._driver.load(prompt, self._part).tokens == prompt.tokens

        return {
            "driver.moves.store": of(store, columns, *self._agents),
            "driver.moves.load": of(load, columns, *self._agents),
        }


# Data plane


@contextlib.contextmanager
def dataplane() -> Iterator[Turn]:
    from benchmarks import dataplane as benchmark
    from kvss_agent import native

    benchmark.RING_BYTES = COLUMNS * 64 * KIB
    with benchmark.running() as agent:
        agent.be(shm=(COLUMNS, 64 * KIB), unix=(COLUMNS, 64 * KIB), tcp=(COLUMNS, 64 * KIB))
        memory = benchmark.Memory(64 * KIB)
        with (
            Carried(agent, "shm", memory, native.require(build=True)) as by_native,
            Carried(agent, "unix", memory) as by_unix,
            Carried(agent, "tcp", memory) as by_tcp,
        ):
            yield lambda: {
                **by_native.turn(),
                **by_unix.turn(),
                **by_tcp.turn(),
                "dataplane.control": of(lambda: _observed(agent, 100), 100, agent.process.pid),
                # Microseconds of a second, with three drivers that are silent.
                "dataplane.idle": of(lambda: time.sleep(IDLE_SECONDS), 1, agent.process.pid)
                / IDLE_SECONDS,
            }


def _observed(agent: Any, times: int) -> None:
    for _ in range(times):
        agent.http.get("/v1/observed").raise_for_status()


class Carried:
    """Columns of 64 KiB, with what the agent does for them. So small, since what can change is what
    comes with a column, and not the copying."""

    def __init__(self, agent: Any, kind: str, memory: Any, mover: Any = None) -> None:
        from kvss_agent.mover import PYTHON

        self._kind, self._memory = kind, memory
        # Over shared memory it does nothing but what it does when it is idle.
        self._others = () if kind == "shm" else (agent.process.pid,)
        self._shard = agent.client(kind, kind, mover or PYTHON)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shard.close()

    def turn(self) -> Costs:
        from benchmarks.dataplane import KEY, TAG
        from kvss_agent.client import Wanted
        from kvss_agent.shard.seal import Column

        shard, sources, places = self._shard, self._memory.sources, self._memory.places
        last = 0

        def evict() -> None:
            nonlocal last
            for slot in range(COLUMNS):
                last = shard.evict(slot, KEY, TAG, 64, sources[slot])
            shard.wait_applied(last, 60)

        def evict_often() -> None:
            for _ in range(TIMES):
                evict()

        made = {"evict": of(evict_often, TIMES * COLUMNS, *self._others)}
        first = last - COLUMNS + 1
        wanted = [Wanted(slot, Column(KEY, TAG, first + slot)) for slot in range(COLUMNS)]

        def refill() -> None:
            for _ in range(TIMES):
                for one, place in zip(wanted, places, strict=True):
                    [found] = shard.refill([one], [place])
                    assert found is not None

        def refill_many() -> None:
            for _ in range(TIMES):
                for at in range(0, COLUMNS, 32):
                    shard.refill(wanted[at : at + 32], places[at : at + 32])

        made |= {
            "refill": of(refill_many, TIMES * COLUMNS, *self._others),
            "refill_one": of(refill, TIMES * COLUMNS, *self._others),
        }
        return {f"dataplane.{self._kind}.{what}": cost for what, cost in made.items()}


def _children() -> tuple[int, ...]:
    import psutil

    return tuple(one.pid for one in psutil.Process().children())


SUBJECTS: Final = {"dataplane": dataplane, "driver": driver, "telemetry": telemetry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    with SUBJECTS[parser.parse_args().subject]() as turn:
        print("ready", flush=True)
        for _ in sys.stdin:
            gc.collect()
            print(json.dumps(turn()), flush=True)


if __name__ == "__main__":
    main()
