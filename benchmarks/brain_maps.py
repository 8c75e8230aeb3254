"""Cache maps: what they take in a brain, how fast a prompt is looked up, how soon a change is known, how
long a brain that was restarted needs for all of them, and what reporting costs a driver.

    make bench NAME=brain_maps ARGS="--quick"

Maps are those of drivers with a million columns each, in conversations of about 100 columns that share a
system prompt. With `--quick` there are 20 drivers instead of 100.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.driver import LAYOUT, MILLION, PROMPT_COLUMNS, Million, keys, tokens
from benchmarks.harness import Row, limited, options, percentile, progress, show, timed
from console.stack import redis as redis_server
from inference_brain.maps import CacheMaps, DriverPlace
from inference_brain.maps.reader import MapReader
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache_map.codec import (
    CHUNK,
    FIELD,
    NAME_BYTES,
    PREFIX,
    SPACE_BYTES,
    VERSION,
    Message,
    Section,
    entry,
    in_parts,
    pack_values,
)
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.publisher import MapPublisher
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from telemetry.records import MAP_STREAM
from tests.embedded import running

MODEL = ModelSpec(
    name="bench", revision="1", kv_dtype="bf16", layout="full",
    groups=tuple(GroupSpec.of(one) for one in LAYOUT.groups),
)  # fmt: skip
SYSTEM_COLUMNS = 16
CONVERSATION_COLUMNS = 100
CHANGES = 40
DRIVER_ROUNDS = 3
MAKER = keys("acme", MODEL.namespace())
SPACE = MAKER.tag + MAKER.namespace.digest()[:SPACE_BYTES]


def messages(number: int, prompts: Sequence[Prompt], columns: int) -> list[bytes]:
    """The snapshot of a driver: these prompts, and conversations of nobody in particular."""
    chance, now = random.Random(number), time.time()
    names: dict[bytes, None] = {}
    for prompt in prompts:
        ends = [*range(CHUNK - 1, len(prompt.keys), CHUNK), len(prompt.keys) - 1]
        names.update((prompt.keys[end][:NAME_BYTES], None) for end in ends)
    # Of each conversation its chunks, an end within a chunk, and a tail.
    count = (columns - sum(len(prompt.keys) for prompt in prompts)) // CONVERSATION_COLUMNS
    each = (CONVERSATION_COLUMNS - SYSTEM_COLUMNS) // CHUNK + 2
    filled = chance.randbytes(NAME_BYTES * count * each)
    joined = b"".join(names) + filled
    size = len(joined) // NAME_BYTES
    base = int(now)
    kinds = [entry(now + chance.uniform(1200, 7200), 0) for _ in range(1000)]
    values = pack_values((kinds * (size // 1000 + 1))[:size], base)
    parts = in_parts([Section(SPACE, PREFIX, joined, values)])
    life = os.urandom(8)
    return [
        Message(
            VERSION, life, at + 1, now, base, True, at, len(parts), size, False, tuple(part)
        ).encode()
        for at, part in enumerate(parts)
    ]


def names_of(count: int) -> list[str]:
    return [f"job{number}" for number in range(count)]


def followed(names: Sequence[str]) -> CacheMaps:
    maps = CacheMaps()
    maps.follow({name: DriverPlace(f"driver:{name}", MODEL) for name in names})
    return maps


def prompt_of(seed: int, columns: int = PROMPT_COLUMNS) -> Prompt:
    system = [7] * (SYSTEM_COLUMNS * COLUMN_TOKENS)
    return MAKER.prompt([*system, *tokens(seed, columns - SYSTEM_COLUMNS)])


# In memory


def memory_rows(drivers: int) -> list[Row]:
    """Maps of drivers with a million columns each: how long they take to apply, and how much memory."""
    names = names_of(drivers)
    maps = followed(names)
    took = cpu = 0.0
    for number, name in enumerate(names):
        mirror, snapshot = maps.mirror(name), messages(number, [prompt_of(number)], MILLION)
        assert mirror
        began, cpu_began = time.perf_counter(), time.thread_time()
        for raw in snapshot:
            mirror.read(raw, time.monotonic())
        took += time.perf_counter() - began
        cpu += time.thread_time() - cpu_began
    size = maps.table.bytes / (drivers * MILLION)
    return [
        limited("map.bytes_per_column", size, "bytes", 6),
        limited("map.apply", took * 100 / drivers, "s for 100 drivers", 10),
        Row("map.apply.cpu", cpu * 100 / drivers, "s for 100 drivers"),
        *look_up_rows("lookup.32k.8", maps, names[:8], drivers, 100e-6),
    ]


def look_up_rows(
    name: str, maps: CacheMaps, drivers: Sequence[str], known: int, limit: float, rounds: int = 1000
) -> list[Row]:
    """Prompts of 32k tokens: half are stored at one of the drivers, the others share the beginning."""
    asked = [{MODEL: prompt_of(seed)} for seed in range(2 * min(known, 40))]
    seconds, processor = [], []
    gc.collect()
    for turn in range(rounds):
        prompts = asked[turn % len(asked)]
        began, cpu_began = time.perf_counter(), time.thread_time()
        hits = maps.hits(drivers, prompts, time.time())
        processor.append(time.thread_time() - cpu_began)
        seconds.append(time.perf_counter() - began)
        assert any(hit and hit.tokens >= SYSTEM_COLUMNS * COLUMN_TOKENS for hit in hits)
    unit, scale = ("µs", 1e6) if limit < 1e-3 else ("ms", 1e3)
    p99 = percentile(seconds, 0.99) * scale
    middle = statistics.median(seconds) * scale
    cpu = Row(f"{name}.cpu", statistics.median(processor) * scale, unit)
    if limit < 1e-3:
        return [limited(name, middle, unit, limit * scale), Row(f"{name}.p99", p99, unit), cpu]
    return [Row(name, middle, unit), limited(f"{name}.p99", p99, unit, limit * scale), cpu]


def many_rows() -> list[Row]:
    """A thousand replicas, all of which have the system prompt and some conversations."""
    names = names_of(1000)
    maps = followed(names)
    for number, name in enumerate(names):
        mirror = maps.mirror(name)
        assert mirror
        for raw in messages(number, [prompt_of(number % 100)], 20_000):
            mirror.read(raw, time.monotonic())
    rows = look_up_rows("lookup.32k.1000", maps, names, 1000, 1e-3)
    everywhere = prompt_of(5000)
    for number, name in enumerate(names):
        mirror = maps.mirror(name)
        assert mirror
        for raw in messages(number, [everywhere], 1000):
            mirror.read(raw, time.monotonic())
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        hits = maps.hits(names, {MODEL: everywhere}, time.time())
        seconds.append(time.perf_counter() - began)
        assert all(hit and hit.tokens == PROMPT_COLUMNS * COLUMN_TOKENS for hit in hits)
    return [*rows, Row("lookup.32k.1000.all_hit", statistics.median(seconds) * 1e3, "ms")]


# Over Redis


@contextmanager
def a_redis() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        made = redis_server.prepare(Path(folder) / "redis", durable=False)
        with running(made, Path(folder) / "log"):
            client = redis.Redis.from_url(made.url)
            client.config_set("maxmemory", "2gb")
            yield made.url
            client.close()


def restart_rows(url: str, drivers: int) -> list[Row]:
    """A brain that starts reads all maps."""
    client = redis.Redis.from_url(url)
    names = names_of(drivers)
    size = 0
    for number, name in enumerate(names):
        for raw in messages(number, [prompt_of(number)], MILLION):
            client.xadd(f"{MAP_STREAM}driver:{name}", {FIELD: raw})
            size += len(raw)

    async def read() -> float:
        maps = followed(names)
        began = time.perf_counter()
        task = asyncio.create_task(MapReader(maps, url).run())
        while any(maps.age(name, time.monotonic()) is None for name in names):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        took = time.perf_counter() - began
        task.cancel()
        return took

    took = asyncio.run(read())
    client.flushall()
    return [
        limited("map.restart", took * 100 / drivers, "s for 100 drivers", 10),
        Row("map.bytes.redis", size / (drivers * MILLION), "bytes a column"),
    ]


def lag_rows(url: str) -> list[Row]:
    """From a store until the brain knows."""
    ledger, lock = Ledger(LAYOUT, "bench"), FairLock()
    ledger.set_slot_limit(0, 100_000)
    follower = Follower(LAYOUT, ledger.accounts, lock, lambda: ledger.is_reachable)
    ledger.add_listener(follower)
    publisher = MapPublisher(url, "driver:job0", lambda: follower).start()

    async def run() -> list[float]:
        maps, seconds = followed(["job0"]), []
        task = asyncio.create_task(MapReader(maps, url).run())
        for seed in range(CHANGES):
            prompt = prompt_of(seed, 64)
            await asyncio.sleep(random.random())
            with lock:
                now = time.monotonic()
                ledger.finish_store(ledger.begin_store(prompt, prompt.tokens, now), now)
            began = time.perf_counter()
            while not is_known(maps, prompt):  # noqa: ASYNC110 - what is measured is when it is
                await asyncio.sleep(0.002)
            seconds.append(time.perf_counter() - began)
        task.cancel()
        return seconds

    seconds = asyncio.run(run())
    publisher.stop()
    return [
        Row("map.lag.p50", statistics.median(seconds), "s"),
        limited("map.lag.p99", percentile(seconds, 0.99), "s", 1.0),
    ]


def is_known(maps: CacheMaps, prompt: Prompt) -> bool:
    [hit] = maps.hits(["job0"], {MODEL: prompt}, time.time())
    return hit is not None and hit.tokens == prompt.tokens


# In the driver


def driver_rows() -> list[Row]:
    """What a ledger of a million columns does, with and without somebody who follows it."""
    big = Million()
    store_and_match(big)
    follower = Follower(LAYOUT, big.ledger.accounts, FairLock(), lambda: True)
    wall = time.time()  # the ledger's time stands still as well
    first = timed(lambda: follower.follow(big.now, wall))
    snapshot = timed(lambda: follower.everything(int(wall)))
    size, seconds = follower.size, []
    alone, beside = (math.inf, math.inf), (math.inf, math.inf)
    for _ in range(DRIVER_ROUNDS):  # in turns, and the fastest of each
        alone = fastest(alone, store_and_match(big))
        big.ledger.add_listener(follower)
        beside = fastest(beside, store_and_match(big))
        seconds.append(timed(lambda: follower.follow(big.now, wall)))
        big.ledger.remove_listener(follower)
    second = min(seconds)
    changed = 2 * 100 * PROMPT_COLUMNS  # stored, and deleted again
    return [
        Row("driver.store.column", beside[0] * 1e6, "µs", "not followed", alone[0] / beside[0]),
        Row("driver.match.32k", beside[1] * 1e6, "µs", "not followed", alone[1] / beside[1]),
        Row("driver.follow.column", second / changed * 1e6, "µs"),
        Row("driver.follow.million", first, "s"),
        Row("driver.snapshot.million", snapshot, "s"),
        Row("driver.entries_per_column", size / MILLION, "entries"),
    ]


def fastest(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), min(one[1], other[1])


def store_and_match(big: Million) -> tuple[float, float]:
    """Medians of seconds: to store a column, and to match 512."""
    maker, stores, matches = keys("other"), [], []
    for seed in range(100):
        prompt = maker.prompt(tokens(10_000_000 + seed * PROMPT_COLUMNS, PROMPT_COLUMNS))
        stores.append(timed(lambda: big.store(prompt)) / PROMPT_COLUMNS)  # noqa: B023
        matches.append(timed(lambda: big.match(prompt)))  # noqa: B023
    for seed in range(100):
        prompt = maker.prompt(tokens(10_000_000 + seed * PROMPT_COLUMNS, PROMPT_COLUMNS))
        big.ledger.delete(prompt, shared=True)
    while clears := big.ledger.take_clears(1 << 16):
        big.ledger.finish_clears(clears, is_done=True)
    return statistics.median(stores), statistics.median(matches)


def main() -> None:
    given = options(__doc__)
    drivers = 20 if given.quick else 100
    rows = []
    progress("a driver of a million columns")
    rows += driver_rows()
    gc.collect()
    progress(f"maps of {drivers} drivers")
    rows += memory_rows(drivers)
    progress("maps of a thousand drivers")
    rows += many_rows()
    with a_redis() as url:
        progress("a brain that starts")
        rows += restart_rows(url, drivers)
        progress("changes")
        rows += lag_rows(url)
    show("Cache maps", rows, given.json)


if __name__ == "__main__":
    main()
