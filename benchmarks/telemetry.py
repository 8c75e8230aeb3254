"""How much one ingest process takes in, what telling costs, how fast it can be asked, and what keeping
takes: on a PostgreSQL and a Redis of their own, with `manage.py ingest` and `rollup` as processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.children import cpu_seconds, running
from benchmarks.harness import Row, limited, parser, percentile, progress, show
from benchmarks.live import live_rows
from benchmarks.own_console import set_up
from console.environment import PROJECT
from telemetry.cells import Cells, add_cells
from telemetry.metrics import Kind, Metric
from telemetry.records import FIELD, SHAPE_KEY, STREAM, Record, decode
from telemetry.shapes import Series, Shape
from telemetry.store.merge import merge
from tests.embedded import Embedded, embedded_servers

AGENTS, COUNTERS, GAUGES, HISTOGRAMS = 1000, 130, 40, 30  # of each agent: 200 series
LAG_SECONDS = 2.0
HEATMAP_MS = 150.0
OVERHEAD = 0.01
ORGS = 20
TURNS = 200  # of a question: of so many its p99 is not the slowest
TURNS_QUICK = 20
PARTS = ("emit", "ingest", "history", "live")
SOAKING_AGENTS, SOAK_SECONDS = 300, 600


# A fleet that is made up


class Node:
    """One agent's records: counters that move, gauges that wander, histograms of some twenty buckets."""

    def __init__(self, number: int, randomness: random.Random) -> None:
        self.number = number
        self.random = randomness
        kinds = {
            Kind.COUNTER: ("bench_{}_total", COUNTERS),
            Kind.GAUGE: ("bench_{}", GAUGES),
            Kind.HISTOGRAM: ("bench_{}_seconds", HISTOGRAMS),
        }
        self.shape = Shape(
            Series(kind, name.format(place), (("shard", f"job{number}.{place % 4}"),))
            for kind, (name, count) in kinds.items()
            for place in range(count)
        )
        self.sequence = 0

    def record(self, at: float) -> bytes:
        self.sequence += 1
        draw = self.random.randrange
        cells = Cells(
            [draw(5000) if n % 3 else 0 for n in range(COUNTERS)],
            [(value, 1, value) for value in (draw(1 << 34) for _ in range(GAUGES))],
            [
                [self.random.random(), 30 + n % 5, *(draw(20) for _ in range(16))]
                for n in range(HISTOGRAMS)
            ],
        )
        return Record(
            source=f"agent@bench/{self.number}",
            sequence=self.sequence,
            kind="agent",
            name=f"ax-{self.number}",
            version="bench",
            host="bench",
            process_id=self.number,
            started_at=at - 60,
            at=at,
            shape=self.shape.digest,
            cells=cells,
        ).encode()


def load(redis_url: str, agents: int, seconds: float) -> None:
    """In a process of its own: one record a second of each, evenly over the second. Cells are made up
    beforehand: what is measured is not the making."""
    client = redis.Redis.from_url(redis_url)
    randomness = random.Random(1)
    nodes = [Node(number, randomness) for number in range(agents)]
    pipe = client.pipeline(transaction=False)
    for node in nodes:
        pipe.set(SHAPE_KEY + node.shape.digest.hex(), node.shape.encoded)
    pipe.execute()
    began, sent, slices = time.time(), 0, 50
    while time.time() < began + seconds:
        pipe = client.pipeline(transaction=False)
        for node in nodes[sent % slices :: slices]:
            pipe.xadd(STREAM, {FIELD: node.record(time.time())})
        pipe.execute()
        sent += 1
        time.sleep(max(0.0, began + sent / slices - time.time()))
    print(
        json.dumps(
            {"late_seconds": time.time() - began - sent / slices, "records": sent * agents / slices}
        )
    )


def _load_command(agents: int, seconds: float) -> list[str]:
    loading = ("--load", str(agents), "--seconds", str(seconds))
    return [sys.executable, "-m", "benchmarks.telemetry", *loading]


# Ingest


@contextlib.contextmanager
def ingest(directory: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Ingest and rollup."""
    with ours("ingest", directory) as reader, ours("rollup", directory) as rollup:
        yield reader, rollup


def ours(command: str, directory: Path) -> contextlib.AbstractContextManager[psutil.Process]:
    return running(["manage.py", command], directory / f"{command}.log")


def lag_rows(servers: Embedded, directory: Path, seconds: float) -> list[Row]:
    """A thousand agents: how long a record waits, as ingest itself counts it, and what that costs."""
    command = _load_command(AGENTS, seconds)
    with ingest(directory) as (process, rollup):
        time.sleep(2)
        client = redis.Redis.from_url(servers.redis_url)
        before, began = [cpu_seconds(one) for one in (process, rollup)], time.monotonic()
        postgres = postgres_cpu(servers)
        done = json.loads(
            subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
        )
        while client.xlen(STREAM):
            time.sleep(0.05)
        took = time.monotonic() - began
        cpu, cpu_of_rollup = cpu_seconds(process) - before[0], cpu_seconds(rollup) - before[1]
        memory = process.memory_info().rss
        postgres = postgres_cpu(servers) - postgres
    lags = _own("telemetry_ingest_lag_seconds")
    batches = _own("telemetry_ingest_batch_seconds")
    written = _own_counter("telemetry_ingest_records_total")
    waited = {
        "p50_ms": (lags.quantile(0.5) or 0) * 1e3,
        "batch_p50_ms": (batches.quantile(0.5) or 0) * 1e3,
        "batch_p99_ms": (batches.quantile(0.99) or 0) * 1e3,
        "agents": AGENTS,
        "series": AGENTS * (COUNTERS + GAUGES + HISTOGRAMS),
        "seconds": seconds,
    }
    used = {
        "records": written,
        "us_a_record": 1e6 * cpu / written,
        "rollup_percent": 100 * cpu_of_rollup / took,
        "postgres_percent": 100 * postgres / took,
        "MiB": memory / (1 << 20),
    }
    return [
        limited("ingest.lag_p99", lags.quantile(0.99) or 0.0, "s", LAG_SECONDS, waited),
        limited("ingest.cpu", cpu / took, "cores", 1.0, used),
        Row("ingest.load", done["late_seconds"], "s late"),
    ]


def soak_row(directory: Path, seconds: float) -> Row:
    """A smaller fleet for a while: whether the memory of ingest stays where it is after a minute."""
    command = _load_command(SOAKING_AGENTS, seconds)
    sizes: list[float] = []
    with ingest(directory) as each, subprocess.Popen(command, cwd=PROJECT) as sending:
        began = time.monotonic()
        while sending.poll() is None:
            time.sleep(1)
            if time.monotonic() > began + 60:
                sizes.append(sum(one.memory_info().rss for one in each) / (1 << 20))
    third = len(sizes) // 3
    early, late = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
    return Row(
        "ingest.soak",
        late - early,
        "MiB more",
        more={"agents": SOAKING_AGENTS, "seconds": seconds, "MiB": late, "most_MiB": max(sizes)},
    )


def postgres_cpu(servers: Embedded) -> float:
    """Of the postmaster and all its children, those that have ended included."""
    pid = int((servers.postgres.home / "data" / "postmaster.pid").read_text().split()[0])
    process = psutil.Process(pid)
    total = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])
    return total


def rate_row(servers: Embedded, directory: Path, batches: int) -> Row:
    """What waits already: how much of it one process writes in a second, with nothing to wait for."""
    client = redis.Redis.from_url(servers.redis_url)
    let_wait(client, batches)
    with ingest(directory) as (process, _):
        while not client.exists(STREAM) or client.xlen(STREAM) > AGENTS * batches * 0.95:
            time.sleep(0.01)
        left, began, cpu = client.xlen(STREAM), time.monotonic(), cpu_seconds(process)
        while client.xlen(STREAM) > AGENTS:
            time.sleep(0.01)
        took, cpu = time.monotonic() - began, cpu_seconds(process) - cpu
        rate = (left - client.xlen(STREAM)) / took
    series = COUNTERS + GAUGES + HISTOGRAMS
    more = {"series_a_second": rate * series, "cpu_percent": 100 * cpu / took}
    return Row("ingest.records", rate, "records/s", f"{AGENTS} records/s", rate / AGENTS, 1.0, more)


def let_wait(client: redis.Redis, batches: int) -> None:
    """So many seconds of what all agents tell, and nothing else."""
    client.flushdb()
    randomness = random.Random(2)
    nodes = [Node(10_000 + number, randomness) for number in range(AGENTS)]
    now = time.time() - batches
    pipe = client.pipeline(transaction=False)
    for node in nodes:
        pipe.set(SHAPE_KEY + node.shape.digest.hex(), node.shape.encoded)
    pipe.execute()
    for second in range(batches):
        pipe = client.pipeline(transaction=False)
        for node in nodes:
            pipe.xadd(STREAM, {FIELD: node.record(now + second)})
        pipe.execute()


def _own(name: str) -> Any:
    from telemetry.cells import histogram_of

    return histogram_of(cell for series, cell in _cells("ingest:%") if series.name == name)


def _own_counter(name: str) -> float:
    return sum(float(cell) for series, cell in _cells("ingest:%") if series.name == name)


def _cells(topic: str) -> Iterator[tuple[Series, Any]]:
    from django.db import connection

    from telemetry.store.storage import Shapes, cells_of

    shapes = Shapes()
    with connection.cursor() as cursor:
        for table in ("fresh", "10s"):
            cursor.execute(
                f"SELECT shape, cells FROM telemetry_{table} JOIN telemetry_topic ON id = topic "  # noqa: S608
                "WHERE name LIKE %s",
                [topic],
            )
            for shape, cells in cursor.fetchall():
                yield from shapes.of([shape])[shape].pairs(cells_of(cells))


# Telling


def overhead_row(turns: int, seconds: float) -> Row:
    """Evicts over shared memory, with and without an emitter beside them in the process that has all the
    numbers of 20 shards and 200 orgs: the worse of an agent's and a driver's look at itself."""
    from kvss_agent.mover import PYTHON
    from telemetry.emit.deltas import Deltas

    host = _Host()
    deltas = Deltas(host.collect)
    series = len(deltas.take(1)[0].series)
    source, slot = memoryview(bytearray(os.urandom(1 << 20))), memoryview(bytearray(1 << 20))

    def evicts(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            PYTHON.copy_in(slot, source)
            count += 1
        return count

    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns):
        for is_telling in (False, True):
            stop = threading.Event()
            thread = threading.Thread(target=_tell, args=(deltas, host, stop)) if is_telling else None
            if thread:
                thread.start()
            began = time.perf_counter()
            count = evicts(began + seconds)
            rates[is_telling].append(count / (time.perf_counter() - began))
            stop.set()
            if thread:
                thread.join()
    look = statistics.median(_timed(deltas, host) for _ in range(20))
    without, told = (statistics.median(rates[is_telling]) for is_telling in (False, True))
    more = {"series": series, "evicts_percent": 100 * (1 - told / without)}
    return limited("emit.overhead", 100 * look, "% of a core", 100 * OVERHEAD, more)


def _tell(deltas: Any, host: _Host, stop: threading.Event) -> None:
    while not stop.wait(1 - time.time() % 1):
        host.work()
        shape, cells = deltas.take(1)
        Record("bench", 1, "agent", "a", "1", "h", 1, 1.0, 1.0, shape.digest, cells).encode()


def _timed(deltas: Any, host: _Host) -> float:
    host.work()
    began = time.thread_time()
    shape, cells = deltas.take(1)
    Record("bench", 1, "agent", "a", "1", "h", 1, 1.0, 1.0, shape.digest, cells).encode()
    return time.thread_time() - began


class _Host:
    """Numbers as a busy agent has them."""

    def __init__(self) -> None:
        from telemetry.histogram import Histogram
        from telemetry.metrics import Catalog

        catalog = Catalog()
        self.counters = [catalog.counter(f"bench_{n}_total", "", "shard") for n in range(10)]
        self.gauges = [catalog.gauge(f"bench_{n}", "", "shard") for n in range(8)]
        self.histograms = [catalog.histogram(f"bench_{n}_seconds", "", "shard") for n in range(2)]
        self.shards = [f"job7.full.{n}" for n in range(10)]
        self.times = {shard: Histogram() for shard in self.shards}
        self.count = 0

    def work(self) -> None:
        self.count += 1
        for times in self.times.values():
            for power in range(20):
                times.record(1e-4 * 1.2**power, 50)

    def collect(self, into: Any) -> None:
        for counter in self.counters:
            into.put(counter, [({"shard": shard}, self.count) for shard in self.shards])
        for gauge in self.gauges:
            into.put(gauge, [({"shard": shard}, 7) for shard in self.shards])
        for histogram in self.histograms:
            into.put(histogram, [({"shard": shard}, times) for shard, times in self.times.items()])


# History: asking, and keeping


def history_rows(nodes: int, hours: int, turns: int) -> list[Row]:
    """So many nodes at ten seconds, and some orgs: written as ingest does, and asked."""
    from django.db import connection

    from telemetry.metrics import Catalog
    from telemetry.store.storage import Stored, copy_in, day_of, encoded, make_days

    now = time.time() // 3600 * 3600 - 86_400
    make_days("10s", {day_of(now - 3600 * hours), day_of(now)})
    randomness = random.Random(3)
    catalog = Catalog()
    refill = catalog.histogram("bench_refill_seconds", "Refills.")
    node_shape, node_cells = _bucket_of_a_node(randomness)
    org_shape, org_cells = _bucket_of_an_org(randomness)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(pg_total_relation_size(inhrelid)), 0) FROM pg_inherits "
            "WHERE inhparent = 'telemetry_10s'::regclass"
        )
        before = int(cursor.fetchone()[0])
        made_up = [*(f"node:history-{n}" for n in range(nodes)), *(f"org:{n}" for n in range(ORGS))]
        topics = learn_topics(made_up)
        numbers = _learn_shapes([node_shape, org_shape])
    as_stored = [encoded(cells) for cells in node_cells]
    of_orgs = [encoded(cells) for cells in org_cells]
    buckets = range(int(now - 3600 * hours), int(now), 10)

    def rows() -> Iterator[Stored]:
        for bucket in buckets:
            for place, topic in enumerate(topics[:nodes]):
                yield Stored(topic, numbers[0], bucket, as_stored[(place + bucket) % len(as_stored)])
            for place, topic in enumerate(topics[nodes:]):
                yield Stored(topic, numbers[1], bucket, of_orgs[(place + bucket) % len(of_orgs)])

    began = time.monotonic()
    copy_in("10s", rows())
    wrote = time.monotonic() - began
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE telemetry_10s")
        cursor.execute(
            "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits "
            "WHERE inhparent = 'telemetry_10s'::regclass"
        )
        size = int(cursor.fetchone()[0]) - before
        cursor.execute("UPDATE telemetry_watermark SET at = 0")
    minutes = encoded(merge([(org_shape, one) for one in org_cells[:6]]).parts[0][1])
    make_days("1m", {day_of(now - 3600 * hours), day_of(now)})
    by_minute = [
        Stored(topic, numbers[1], minute, minutes) for minute in buckets[::6] for topic in topics[nodes:]
    ]
    copy_in("1m", by_minute)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE telemetry_1m")
    asked = [_heat_map_row(refill, now, hours, level, turns) for level in ("10s", "1m")]
    node_day = size / nodes / hours * 24 / (1 + ORGS * len(of_orgs[0]) / nodes / len(as_stored[0]))
    minute, hour = _coarser(node_shape, node_cells)
    rows_in_all = len(buckets) * (nodes + ORGS)
    return [
        *(replace(one, more={**one.more, "nodes": nodes, "rows": rows_in_all}) for one in asked),
        Row(
            "storage.node_day",
            node_day / 1e6,
            "MB",
            more={
                "bytes_a_row": node_day / 8640,
                "of_minutes_MB": minute * 1440 / 1e6,
                "of_hours_kB": hour * 24 / 1e3,
                "rows_a_second": rows_in_all / wrote,
            },
        ),
    ]


def _heat_map_row(refill: Metric, now: float, hours: int, level: str, turns: int) -> Row:
    """As a chart asks, which takes minutes where they are there; or from what those were made of."""
    from django.db import connection

    from telemetry import queries

    with connection.cursor() as cursor:
        cursor.execute("UPDATE telemetry_watermark SET at = %s WHERE level = '1m'", [now])
    times = []
    # Each once before it counts: who reads a row first marks it as committed, and logs that. Of what
    # pages ask for, that was the roll-up.
    for turn in range(ORGS + turns):
        question = queries.Question(
            topic=f"org:{turn % ORGS}",
            metric=refill,
            fold=queries.Fold.HEATMAP,
            start=now - 3600 * hours,
            end=now,
            step=180,
            level=level,
        )
        began = time.perf_counter()
        [line] = queries.ask(question, now + 60).lines
        times.append(time.perf_counter() - began)
        assert sum(1 for value in line.values if value) == hours * 20
    p50, p99 = statistics.median(times[ORGS:]) * 1e3, percentile(times[ORGS:], 0.99) * 1e3
    name = f"query.heatmap_{hours}h" + (".minutes" if level == "1m" else "")
    return limited(name, p50, "ms", HEATMAP_MS, {"p99_ms": p99})


def _coarser(shape: Shape, cells: list[Cells]) -> tuple[float, float]:
    """Bytes of a row of a minute and of an hour: with what PostgreSQL adds to a row and its index."""
    from telemetry.store.storage import encoded

    minute = encoded(merge([(shape, one) for one in cells[:6]]).parts[0][1])
    hour = encoded(merge([(shape, cells[n % len(cells)]) for n in range(360)]).parts[0][1])
    return len(minute) + 64.0, len(hour) + 64.0


def _bucket_of_a_node(randomness: random.Random) -> tuple[Shape, list[Cells]]:
    node = Node(0, randomness)
    cells = [
        add_cells([decode({FIELD: node.record(100.0)}).cells for _ in range(10)]) for _ in range(30)
    ]
    return node.shape, cells


def _bucket_of_an_org(randomness: random.Random) -> tuple[Shape, list[Cells]]:
    series = [
        *(Series(Kind.COUNTER, f"bench_{n}_total") for n in range(12)),
        *(Series(Kind.GAUGE, f"bench_{n}") for n in range(2)),
        Series(Kind.HISTOGRAM, "bench_evict_seconds"),
        Series(Kind.HISTOGRAM, "bench_refill_seconds"),
    ]
    shape = Shape(series)
    return shape, [
        Cells(
            [randomness.randrange(1 << 20) for _ in range(12)],
            [(randomness.randrange(1 << 34), 10, 1 << 30) for _ in range(2)],
            [
                [randomness.random(), 25, *(randomness.randrange(300) for _ in range(30))]
                for _ in range(2)
            ],
        )
        for _ in range(30)
    ]


def learn_topics(names: list[str]) -> list[int]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO telemetry_topic (name, seen_on) SELECT unnest(%s::text[]), now()::date "
            "ON CONFLICT (name) DO UPDATE SET seen_on = EXCLUDED.seen_on RETURNING name, id",
            [names],
        )
        found = dict(cursor.fetchall())
    return [found[name] for name in names]


def _learn_shapes(shapes: list[Shape]) -> list[int]:
    from telemetry.store.storage import Names, day_of

    names = Names()
    names.learn_shapes(shapes, day_of(time.time()))
    return [names.number(shape) for shape in shapes]


def main() -> None:
    to_tell = parser("What telling, keeping and asking for numbers costs.")
    to_tell.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of it")
    to_tell.add_argument("--soak", action="store_true", help="ten minutes of ingest instead")
    to_tell.add_argument("--load", type=int, help=argparse.SUPPRESS)
    to_tell.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = to_tell.parse_args()
    if given.load:
        load(os.environ["REDIS_URL"], given.load, given.seconds)
        return
    only = given.only
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory,
        embedded_servers(Path(directory), durable=True) as servers,
    ):
        set_up(servers)
        if given.soak:
            only = ()
            rows.append(soak_row(Path(directory), SOAK_SECONDS))
        if "emit" in only:
            progress("emit")
            rows.append(overhead_row(3, 0.5) if given.quick else overhead_row(10, 2))
        if "ingest" in only:
            progress("ingest")
            rows += lag_rows(servers, Path(directory), 5 if given.quick else 60)
            rows.append(rate_row(servers, Path(directory), 5 if given.quick else 30))
        if "history" in only:
            progress("history")
            rows += history_rows(*((40, 3, TURNS_QUICK) if given.quick else (1000, 24, TURNS)))
        if "live" in only:
            progress("live")
            rows += live_rows(Path(directory), *(((100,), 3) if given.quick else ((100, 500), 40)))
        from django.db import connections

        connections.close_all()
    show("Telemetry", rows, given.json)


# As `benchmarks.costs` calls them in every version.
_set_up, _learn = set_up, learn_topics


if __name__ == "__main__":
    main()
