"""How fast columns go out and come back: against memcpy, sockets, the disk, and what others reach.

Agent and driver are two processes, as in use. Verification is on everywhere but in `shm.lease`. Every
figure stands beside its limit or peer, measured in turns with it in the same run: read the ratios.
Memory on both sides is far larger than any cache, so nothing is at hand that would not be in use.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
import secrets
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import peers
from benchmarks.children import cpu_percent
from benchmarks.harness import QUICK_HELP, Row, limited, parser, percentile, progress, show, timed
from benchmarks.socket_copy import Remote
from console.environment import PROJECT
from kvss_agent import native
from kvss_agent.client import Credentials, Evict, Miss, ShardClient, SharedClient, Wanted, connect
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard import seal
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import Column
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Leaving
from kvss_agent.tier2.posix import Posix
from swdriver_shim.data_plane.tier2 import SPILLS_AT_ONCE

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64KiB": 64 * KIB, "256KiB": 256 * KIB, "1MiB": MIB, "4MiB": 4 * MIB, "16MiB": 16 * MIB}
RING_BYTES = 512 * MIB
PARTS = ("shm", "stream", "tier2", "rest", "peers")
DRIVER, SECRET = "bench", secrets.token_bytes(32)
KEY, TAG = b"k" * 16, b"t" * 16
EVICTED = Column(KEY, TAG, 1)

EVICT_GOALS = {"64KiB": 0.80}
AS_FAST = 0.97  # medians of the same work differ by so much here
STREAM_GOALS = {"1MiB": 0.85, "4MiB": 0.85, "16MiB": 0.85}
PEER_GOALS = {
    ("mooncake", "one"): 3.0,
    ("mooncake", "batch"): 1.2,
    ("lmcache_mp", "one"): 10.0,
    ("lmcache_mp", "batch"): 2.0,
    ("redis", "one"): 5.0,
    ("redis", "batch"): 4.0,
    ("memcached", "one"): 3.0,
    ("memcached", "batch"): 3.0,
}


@dataclass
class Memory:
    """The driver's side: columns to evict, places to refill into, and raw addresses for memcpy."""

    size: int
    count: int = field(init=False)
    sources: list[memoryview] = field(init=False)
    places: list[memoryview] = field(init=False)

    def __post_init__(self) -> None:
        self.count = RING_BYTES // self.size
        self._from, self._to = mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES)
        block = secrets.token_bytes(MIB)
        for at in range(0, RING_BYTES, MIB):  # every page is there and is its own
            self._from[at : at + MIB] = block
            self._to[at : at + MIB] = block
        self.sources, self.places = self._cut(self._from), self._cut(self._to)
        self._source = ctypes.addressof(ctypes.c_char.from_buffer(self._from))
        self._place = ctypes.addressof(ctypes.c_char.from_buffer(self._to))

    def _cut(self, memory: mmap.mmap) -> list[memoryview]:
        view = memoryview(memory)
        return [view[at : at + self.size] for at in range(0, RING_BYTES, self.size)]

    def memcpy(self, index: int) -> float:
        """Seconds of C's memcpy of one column, from where nobody has just been."""
        index = (index + self.count // 2) % self.count
        to, source = self._place + index * self.size, self._source + index * self.size
        began = time.perf_counter()
        ctypes.memmove(to, source, self.size)
        return time.perf_counter() - began


def _spread(directory: Path) -> None:
    """Have ext4 put each directory made in here where it has room, as it does at its root.

    Without a journal it looks at each inode deleted nearby in the last minutes whenever it makes a file:
    up to 0.3 ms after another run, which is not what is to be measured.
    """
    get_flags, set_flags, top_directory = 0x80086601, 0x40086602, 0x20000
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # another file system, or not root
        (flags,) = struct.unpack("l", fcntl.ioctl(fd, get_flags, bytes(8)))
        fcntl.ioctl(fd, set_flags, struct.pack("l", flags | top_directory))
    os.close(fd)


class Agent:
    """A real agent, and what it takes to use it."""

    def __init__(self, *, tier2: bool, cap_bytes: int = 8 << 30) -> None:
        # On a real disk, not in memory: tier 2 is measured there.
        scratch = PROJECT / ".tidegate" / "bench"
        scratch.mkdir(parents=True, exist_ok=True)
        _spread(scratch)
        self.directory = Path(tempfile.mkdtemp(prefix="agent-", dir=scratch))
        self._generation = 0
        self._tier2 = {"kind": "posix", "path": str(self.directory / "files"), "cap_bytes": cap_bytes}
        self._with_tier2 = tier2
        self.socket = Path(tempfile.mkdtemp(prefix="kvss-")) / "data.sock"
        options = ["--state-dir", str(self.directory), "--unix", str(self.socket)]
        options += ["--tcp", "127.0.0.1:0", "--plain-tcp", "yes", "--control", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvss_agent", *options],
            cwd=PROJECT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr
        for line in self._process.stderr:
            if "Listening" in line:
                _, tcp, control = line.rsplit("127.0.0.1:", 2)
                self.tcp, port = int(tcp.split(",")[0]), int(control)
                break
        else:
            raise RuntimeError("the agent did not start")
        token = (self.directory / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def be(
        self, more: Mapping[str, Mapping[str, Any]] | None = None, /, **shards: tuple[int, int]
    ) -> float:
        """Have these shards, of (slots, payload bytes); the seconds that took. `more`: what else the
        document says of each."""
        self._generation += 1
        specs = [
            {
                "name": name,
                "slots": slots,
                "slot_bytes": slot_bytes_for(payload),
                "driver": DRIVER,
                "part": name.lower(),
                **(more or {}).get(name, {}),
            }
            for name, (slots, payload) in shards.items()
        ]
        told = {
            "generation": self._generation,
            "shards": specs,
            "peers": [{"name": DRIVER, "secret": base64.b64encode(SECRET).decode()}],
            "tier2": self._tier2 if self._with_tier2 else None,
        }
        began = time.perf_counter()
        self.http.put("/v1/desired", json=told).raise_for_status()
        while (seen := self.http.get("/v1/observed").json())["observed_generation"] != self._generation:
            time.sleep(0.005)
        if not seen["ready"]:
            raise RuntimeError(f"the agent is not ready: {json.dumps(seen)}")
        return time.perf_counter() - began

    def client(self, kind: str, shard: str, mover: Mover = PYTHON) -> ShardClient:
        address = f"tcp:127.0.0.1:{self.tcp}" if kind == "tcp" else f"unix:{self.socket}"
        return connect(
            address,
            shard,
            Credentials(DRIVER, SECRET),
            transport="shm" if kind == "shm" else "stream",
            mover=mover,
        )

    def close(self) -> None:
        self.http.close()
        self._process.terminate()
        self._process.wait()
        assert self._process.stderr
        self._process.stderr.close()
        shutil.rmtree(self.directory)
        shutil.rmtree(self.socket.parent)


@contextlib.contextmanager
def running(*, tier2: bool = False, cap_bytes: int = 8 << 30) -> Iterator[Agent]:
    agent = Agent(tier2=tier2, cap_bytes=cap_bytes)
    try:
        yield agent
    finally:
        agent.close()


def row(
    name: str,
    size: int,
    ours: Sequence[float],
    limit: Sequence[float],
    against: str,
    goal: float | None = None,
    columns: int = 1,
    extra: str = "",
) -> Row:
    """`ours` are seconds of operations on so many columns each; `limit` those of one column."""
    middle = statistics.median(ours)
    return Row(
        f"{name}{extra}",
        columns * size / middle / 1e9,
        "GB/s",
        against,
        statistics.median(limit) * columns / middle,
        goal,
        _rates(columns, ours),
    )


def _rates(columns: int, seconds: Sequence[float]) -> dict[str, float]:
    middle, p99 = statistics.median(seconds), percentile(seconds, 0.99)
    return {"columns/s": columns / middle, "p50 µs": middle * 1e6, "p99 µs": p99 * 1e6}


def in_turns(
    limit: Callable[[], object], ours: Callable[[], object], *, first: int
) -> tuple[float, float]:
    """Seconds of each; ours goes first where `first` says so."""
    if first:
        took = timed(ours)
        return timed(limit), took
    return timed(limit), timed(ours)


def in_turn(turn: int, *calls: Callable[[], object]) -> list[float]:
    """Seconds of each, of which another one goes first each turn."""
    took = [0.0] * len(calls)
    for at in range(turn, turn + len(calls)):
        took[at % len(calls)] = timed(calls[at % len(calls)])
    return took


# Shared memory


def shm(agent: Agent, label: str, memory: Memory, mover: Mover, effort: int) -> list[Row]:
    size, count = memory.size, memory.count
    agent.be(shm=(count, size))
    extra = "" if mover is PYTHON else ".native"
    goal_evict = 1.0 if extra else EVICT_GOALS.get(label, 0.85)
    goal_refill = 1.0 if extra else 0.72
    operations = min(count, 200 * effort)
    batch = min(64, max(2, 64 * MIB // size))
    batches = max(3, min(20, operations // batch))
    rows: list[Row] = []
    with agent.client("shm", "shm", mover) as shard:
        assert isinstance(shard, SharedClient)
        for index in range(count):  # fill, and warm up
            shard.evict(index, KEY, TAG, 64, memory.sources[index])
        ours, limit = [], []
        for n in range(operations):
            index = n % count
            source = memory.sources[index]
            limit.append(memory.memcpy(index))
            began = time.perf_counter()
            shard.evict(index, KEY, TAG, 64, source)
            ours.append(time.perf_counter() - began)
        rows.append(row(f"shm.evict.{label}", size, ours, limit, "memcpy", goal_evict, extra=extra))
        single = ours
        last = shard.applied
        for n in range(count):  # so that every slot has a number that is known
            last = shard.evict(n, KEY, TAG, 64, memory.sources[n])
        first = last - count + 1

        def wanted(index: int) -> Wanted:
            return Wanted(index, Column(KEY, TAG, first + index))

        ours, limit = [], []
        for n in range(operations):
            index = n % count
            one, place = [wanted(index)], [memory.places[index]]
            limit.append(memory.memcpy(index))
            began = time.perf_counter()
            [found] = shard.refill(one, place)
            ours.append(time.perf_counter() - began)
            check(found)
        rows.append(
            row(f"shm.refill_copy.{label}", size, ours, limit, "memcpy", goal_refill, extra=extra)
        )
        ours, limit = [], []
        for n in range(operations):
            index = n % count
            one = [wanted(index)]
            limit.append(memory.memcpy(index))
            began = time.perf_counter()
            views = shard.view(one)
            ours.append(time.perf_counter() - began)
            check(views.columns[0])
            views.release()
        rows.append(row(f"shm.refill_view.{label}", size, ours, limit, "memcpy", 1.3, extra=extra))

        ours, alone = [], []
        for n in range(batches):
            start = n * batch % (count - batch + 1)
            run = [Evict(i, KEY, TAG, 64, memory.sources[i]) for i in range(start, start + batch)]
            half = (start + count // 2) % (count - batch + 1)
            for i in range(half, half + min(batch, 8)):
                source = memory.sources[i]
                alone.append(timed(lambda: shard.evict(i, KEY, TAG, 64, source)))  # noqa: B023
            ours.append(timed(lambda: shard.evict_batch(run)))  # noqa: B023
        rows.append(
            row(f"shm.evict_batch.{label}", size, ours, alone, "one at a time", AS_FAST, batch, extra)
        )
        last = shard.applied
        for n in range(count):
            last = shard.evict(n, KEY, TAG, 64, memory.sources[n])
        first = last - count + 1

        ours, alone = [], []
        for n in range(batches):
            start = n * batch % (count - batch + 1)
            many = [wanted(index) for index in range(start, start + batch)]
            into = memory.places[start : start + batch]
            half = (start + count // 2) % (count - batch + 1)
            for index in range(half, half + min(batch, 8)):
                one, place = [wanted(index)], [memory.places[index]]
                alone.append(timed(lambda: shard.refill(one, place)))  # noqa: B023
            ours.append(timed(lambda: shard.refill(many, into)))  # noqa: B023
        rows.append(
            row(f"shm.refill_batch.{label}", size, ours, alone, "one at a time", AS_FAST, batch, extra)
        )
        if label == "64KiB" and not extra:
            slots = list(range(64))
            times = [timed(lambda: shard.lease(slots).release()) for _ in range(2000)]
            rate = 64 / statistics.median(times)
            rows.append(Row("shm.lease", rate, "columns/s", "1,000,000 columns/s", rate / 1e6, 1.0))
        if label == "1MiB" and not extra:
            for name, share, goal in (("p50", 0.5, 75), ("p99", 0.99, 140)):
                value = percentile(single, share) * 1e6
                rows.append(Row(f"shm.evict.1MiB.{name}", value, "µs", f"{goal} µs", goal / value, 1.0))
    return rows


def check(found: object) -> None:
    if isinstance(found, Miss):
        raise RuntimeError(f"a column came back as {found}")  # noqa: TRY004 - the measurement is void


# Streams


@contextlib.contextmanager
def limit_of(kind: str) -> Iterator[Remote]:
    path = str(Path(tempfile.mkdtemp(prefix="kvss-")) / "copy.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.socket_copy", kind, path],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    port = int(process.stdout.readline())
    remote = Remote(kind, path if kind == "unix" else ("127.0.0.1", port))
    try:
        yield remote
    finally:
        remote.close()
        process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(Path(path).parent)


def stream(agent: Agent, kind: str, label: str, memory: Memory, mover: Mover, effort: int) -> list[Row]:
    size, count = memory.size, memory.count
    agent.be(stream=(count, size))
    extra = "" if mover is PYTHON else ".native"
    goal = STREAM_GOALS.get(label)
    each = max(4, min(32, 32 * MIB // size))
    rounds = 4 * effort
    ours_put, limit_put, ours_get, limit_get, alone = [], [], [], [], []
    with agent.client(kind, "stream", mover) as shard, limit_of(kind) as remote:
        for n in range(-1, rounds):
            start = n % (count // each // 2) * each
            sources = memory.sources[start : start + each]
            other = memory.sources[start + count // 2 : start + count // 2 + each]
            places = memory.places[start : start + each]
            elsewhere = memory.places[start + count // 2 : start + count // 2 + each]
            took_limit = timed(lambda: remote.put(other))  # noqa: B023
            began = time.perf_counter()
            for index, source in enumerate(sources):
                last = shard.evict(start + index, KEY, TAG, 64, source)
            shard.wait_applied(last, 60)
            took = time.perf_counter() - began
            first = last - each + 1
            wanted = [Wanted(start + i, Column(KEY, TAG, first + i)) for i in range(each)]
            took_limit_get = timed(lambda: remote.get(elsewhere))  # noqa: B023
            began = time.perf_counter()
            found = shard.refill(wanted, places)
            took_get = time.perf_counter() - began
            check(found[-1])
            for one, place in zip(wanted[:4], places[:4], strict=True):
                alone.append(timed(lambda: shard.refill([one], [place])))  # noqa: B023
            if n >= 0:  # the first round warms up
                ours_put.append(took / each)
                limit_put.append(took_limit / each)
                ours_get.append(took_get / each)
                limit_get.append(took_limit_get / each)
    against = f"{kind} socket copy"
    return [
        row(f"{kind}.evict.{label}", size, ours_put, limit_put, against, goal, extra=extra),
        row(f"{kind}.refill.{label}", size, ours_get, limit_get, against, goal, extra=extra),
        row(f"{kind}.refill_one.{label}", size, alone, limit_get, against, extra=extra),
    ]


def two_clients(agent: Agent, kind: str, effort: int) -> list[Row]:
    """The same work by one driver and by two at once, each a process with a shard of its own."""
    count = 256
    agent.be(one=(count, MIB), two=(count, MIB))
    place = f"tcp:127.0.0.1:{agent.tcp}" if kind == "tcp" else f"unix:{agent.socket}"
    seconds = 0.6 * effort

    def start(shard: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stream_driver", place, shard, DRIVER, SECRET.hex()],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(drivers: Sequence[subprocess.Popen[str]], what: str) -> float:
        for driver in drivers:
            assert driver.stdin
            driver.stdin.write(f"{what} {seconds}\n")
            driver.stdin.flush()
        return sum(float(driver.stdout.readline()) for driver in drivers if driver.stdout)

    drivers = [start("one"), start("two")]
    rows = []
    try:
        for what in ("evict", "refill"):
            alone, together = [], []
            for _ in range(1 + effort):
                alone.append(rate(drivers[:1], what))
                together.append(rate(drivers, what))
            both, one = statistics.median(together), statistics.median(alone)
            rows.append(
                Row(f"{kind}.two.{what}.1MiB", both / 1e9, "GB/s", "one client", both / one, 1.5)
            )
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()
    return rows


# Tier 2


def tier2(agent: Agent, label: str, memory: Memory, effort: int) -> list[Row]:
    size = memory.size
    each = max(2, min(64, 64 * MIB // size))
    rounds = 4 * effort
    slots = slot_bytes_for(size)
    agent.be(tier=(each, size))
    raw = RawDisk(agent.directory / f"raw-{label}", slots, each)
    alone = Files(agent.directory / f"files-{label}", size, each)
    ours_put, limit_put, files_put, ours_get, limit_get = [], [], [], [], []
    with agent.client("shm", "tier") as shard:
        for n in range(-1, rounds):
            wanted = evicted_columns(shard, label, n, memory.sources[:each])
            answers: list[object] = []
            recalled: list[object] = []

            def spill(into: list[object] = answers, wanted: list[Wanted] = wanted) -> None:
                into += shard.spill(wanted, wait_seconds=30)

            def recall(into: list[object] = recalled, wanted: list[Wanted] = wanted) -> None:
                into += shard.recall(wanted, wait_seconds=30)

            # Who comes second finds the disk busy with what the first has left: they take turns.
            took_limit, took, took_files = in_turn(n, raw.write, spill, alone.store)
            if any(answer != 0 for answer in answers):
                raise RuntimeError(f"spilled: {answers}")
            took_limit_get, took_get = in_turns(raw.read, recall, first=n % 2)
            for one in recalled:
                check(one)
            raw.go_on()
            if n >= 0:
                ours_put.append(took / each)
                limit_put.append(took_limit / each)
                files_put.append(took_files / each)
                ours_get.append(took_get / each)
                limit_get.append(took_limit_get / each)
    raw.close()
    alone.close()
    return [
        row(f"tier2.spill.{label}", size, ours_put, limit_put, "raw O_DIRECT write", 0.80),
        row(f"tier2.files.{label}", size, files_put, limit_put, "raw O_DIRECT write"),
        row(f"tier2.recall.{label}", size, ours_get, limit_get, "raw O_DIRECT read", 0.80),
    ]


def two_batches(agent: Agent, label: str, memory: Memory, effort: int) -> list[Row]:
    """As many batches of spills at once as a driver has under way, and as many bare writes."""
    size, each = memory.size, max(2, min(64, 64 * MIB // memory.size))
    count = SPILLS_AT_ONCE * each
    agent.be(two=(count, size))
    raw = RawDisk(agent.directory / f"raw-two-{label}", slot_bytes_for(size), count)
    ours, limit = [], []
    with agent.client("shm", "two") as shard, ThreadPoolExecutor(SPILLS_AT_ONCE) as threads:
        for n in range(-1, 4 * effort):
            wanted = evicted_columns(shard, f"2x{label}", n, memory.sources[:count])
            answers: list[object] = []

            def spill(into: list[object] = answers, wanted: list[Wanted] = wanted) -> None:
                batches = [wanted[start : start + each] for start in range(0, count, each)]
                for found in threads.map(partial(shard.spill, wait_seconds=30), batches):
                    into += found

            took_limit, took = in_turns(raw.write, spill, first=n % 2)
            if any(answer != 0 for answer in answers):
                raise RuntimeError(f"spilled: {answers}")
            raw.go_on()
            if n >= 0:
                ours.append(took / count)
                limit.append(took_limit / count)
    raw.close()
    return [row(f"tier2.spill.two.{label}", size, ours, limit, "raw O_DIRECT write")]


def displacing(label: str, memory: Memory, effort: int) -> list[Row]:
    """Spills to a store that is full: each column displaces another."""
    size = memory.size
    each, slots = max(2, min(64, 64 * MIB // size)), slot_bytes_for(size)
    stores = 4  # batches, until it is full
    ours, limit = [], []
    with running(tier2=True, cap_bytes=stores * each * slots) as agent:
        agent.be(tier=(each, size))
        raw = RawDisk(agent.directory / "raw", slots, each)
        with agent.client("shm", "tier") as shard:
            for n in range(-stores - 1, 4 * effort):
                wanted = evicted_columns(shard, label, n, memory.sources[:each])
                answers: list[object] = []

                def spill(into: list[object] = answers, wanted: list[Wanted] = wanted) -> None:
                    into += shard.spill(wanted, wait_seconds=30)

                took_limit, took = in_turns(raw.write, spill, first=n % 2)
                if any(answer != 0 for answer in answers):
                    raise RuntimeError(f"spilled: {answers}")
                raw.go_on()
                if n >= 0:
                    ours.append(took / each)
                    limit.append(took_limit / each)
        raw.close()
    return [row(f"tier2.displace.{label}", size, ours, limit, "raw O_DIRECT write")]


def evicted_columns(
    shard: ShardClient, label: str, turn: int, payloads: Sequence[memoryview]
) -> list[Wanted]:
    """One in each slot, with keys of this turn's own."""
    keys = [f"{label}-{turn}-{index}".encode().ljust(16, b".") for index in range(len(payloads))]
    for index, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
        last = shard.evict(index, key, TAG, 64, payload)
    first = last - len(keys) + 1
    return [Wanted(index, Column(key, TAG, first + index)) for index, key in enumerate(keys)]


def _shared_memory(size: int) -> mmap.mmap:
    fd = os.memfd_create("raw")
    os.posix_fallocate(fd, 0, size)
    made = mmap.mmap(fd, size)
    os.close(fd)
    return made


class RawDisk:
    """The limit of tier 2: as many files with the same bytes, O_DIRECT, by nothing but system calls.

    For each column open, pwrite and close of a new file; then open, preadv and close. From as many
    threads as tier 2 has, each with its part of the columns. No rename, no lock, no checks, no index.
    It removes nothing before the end, and neither does the agent, but where its store is full.
    The memory is shared, as an arena is, and its pages are as scattered: direct I/O of adjacent pages is
    up to twice as fast, and by how much another run differs from this one is a matter of their luck.
    """

    THREADS = 8

    def __init__(self, directory: Path, size: int, count: int) -> None:
        self._directory = directory
        directory.mkdir()
        self._memory = _shared_memory(size * count)
        self._memory[:] = secrets.token_bytes(size) * count
        view = memoryview(self._memory)
        columns = [
            (f"{directory}/{index}-", view[index * size : (index + 1) * size]) for index in range(count)
        ]
        self._round = 0
        self._parts = [columns[thread :: self.THREADS] for thread in range(self.THREADS)]
        self._pool = ThreadPoolExecutor(self.THREADS)

    def write(self) -> None:
        list(self._pool.map(self._write, self._parts))

    def read(self) -> None:
        list(self._pool.map(self._read, self._parts))

    def go_on(self) -> None:
        """The next files are new ones."""
        self._round += 1

    def _write(self, part: list[tuple[str, memoryview]]) -> None:
        for path, bytes_ in part:
            fd = os.open(f"{path}{self._round}", os.O_CREAT | os.O_DIRECT | os.O_WRONLY, 0o600)
            os.pwrite(fd, bytes_, 0)
            os.close(fd)

    def _read(self, part: list[tuple[str, memoryview]]) -> None:
        for path, bytes_ in part:
            fd = os.open(f"{path}{self._round}", os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, [bytes_], 0)
            os.close(fd)

    def close(self) -> None:
        """The room is given back, and the inodes are not."""
        self._pool.shutdown()
        for path in self._directory.iterdir():
            os.truncate(path, 0)


class Files:
    """What tier 2 does for the files of spills and nothing else: no request, no index. From as many
    threads as it has, in memory as that of `RawDisk`, and none is removed before the end."""

    def __init__(self, directory: Path, payload: int, count: int) -> None:
        step, mover = slot_bytes_for(payload), native.current()
        self._directory = directory
        self._backend = Posix(directory, mover=mover)
        self._backend.open()
        self._memory, content = _shared_memory(step * count), memoryview(secrets.token_bytes(payload))
        view = memoryview(self._memory)
        self._slots = [view[at * step : (at + 1) * step] for at in range(count)]
        for slot in self._slots:
            seal.write(slot, EVICTED, 64, content, mover)
        header = seal.read(view[: seal.HEADER_BYTES])
        assert not isinstance(header, Miss)
        self._header = header
        self._round = 0
        self._pool = ThreadPoolExecutor(RawDisk.THREADS)

    def store(self) -> None:
        self._round += 1
        each = -(-len(self._slots) // RawDisk.THREADS)
        runs = [range(start, start + each) for start in range(0, len(self._slots), each)]
        found = [one for run in self._pool.map(self._store, runs) for one in run]
        if any(one is not None for one in found):
            raise RuntimeError(f"not stored: {found}")

    def _store(self, run: range) -> list[Miss | Failed | None]:
        leaving = []
        for at in run[: len(self._slots) - run.start]:
            key = f"{self._round}-{at}".encode().ljust(16, b".")
            address = Address(bytes(16), TAG, key, "alone")
            filed = address.column(0)
            leaving.append(Leaving(address.name, self._slots[at], EVICTED, self._header, filed))
        return self._backend.store_columns(leaving)

    def close(self) -> None:
        self._pool.shutdown()
        self._backend.close()
        for path in self._directory.rglob("*.alone"):
            os.truncate(path, 0)


# Peers


def against_peer(agent: Agent, name: str, effort: int, mover: Mover) -> list[Row]:
    """Ours over shared memory and theirs at their best, in turns, with as many columns each."""
    rows: list[Row] = []
    with peers.Peer(name) as peer:
        for size in peers.SIZES:
            label = f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB"
            memory = Memory(size)
            count = peers.columns(size)
            agent.be(peer=(count, size))
            with agent.client("shm", "peer", mover) as shard:
                for kind, batch in (("one", 1), ("batch", peers.batch_of(size))):
                    rows += _duel(shard, peer, memory, label, kind, batch, count, effort)
    return rows


def _duel(
    shard: ShardClient,
    peer: peers.Peer,
    memory: Memory,
    label: str,
    kind: str,
    batch: int,
    count: int,
    effort: int,
) -> list[Row]:
    theirs_put, theirs_get, ours_put, ours_get = [], [], [], []
    for n in range(1 + effort):
        samples = peer.measure(memory.size, batch)
        theirs_put += samples.put
        theirs_get += samples.get
        operations = len(samples.put)
        starts = [(n * operations + k) * batch % (count - batch + 1) for k in range(operations)]
        for start in starts:
            run = [
                Evict(i, KEY, TAG, 64, memory.sources[i % memory.count])
                for i in range(start, start + batch)
            ]
            began = time.perf_counter()
            last = shard.evict_batch(run)
            ours_put.append(time.perf_counter() - began)
            wanted = [Wanted(start + k, Column(KEY, TAG, last - batch + 1 + k)) for k in range(batch)]
            into = [memory.places[(start + k + count // 2) % memory.count] for k in range(batch)]
            began = time.perf_counter()
            found = shard.refill(wanted, into)
            ours_get.append(time.perf_counter() - began)
            check(found[-1])
    goal = 1.0 if label == "16MiB" and kind == "batch" else PEER_GOALS[peer.name, kind]
    rows = []
    for verb, theirs, ours in (("put", theirs_put, ours_put), ("get", theirs_get, ours_get)):
        slow, fast = statistics.median(theirs), statistics.median(ours)
        rows.append(
            Row(
                f"peer.{peer.name}.{label}.{kind}.{verb}",
                batch * memory.size / slow / 1e9,
                "GB/s",
                f"ours {batch * memory.size / fast / 1e9:.2f}",
                slow / fast,
                goal,
                _rates(batch, theirs),
            )
        )
    return rows


# The rest


def the_rest(agent: Agent, effort: int) -> list[Row]:
    rows = []
    agent.be(small=(8, 64 * KIB))
    times = [timed(lambda: agent.http.get("/v1/observed")) for _ in range(60 * effort)]
    rows.append(
        Row(
            "control.roundtrip",
            statistics.median(times) * 1e3,
            "ms",
            more={"p50 µs": statistics.median(times) * 1e6, "p99 µs": percentile(times, 0.99) * 1e6},
        )
    )
    size = 1 << 30
    agent.be()
    seconds = agent.be(grant=(size // (MIB + 4096), MIB))
    rows.append(Row("agent.prefault", size / seconds / 1e9, "GB/s"))
    agent.be(**{f"s{index}": (4, 64 * KIB) for index in range(64)})
    clients = [agent.client("shm" if index % 2 else "unix", f"s{index}") for index in range(64)]
    time.sleep(1)
    share = cpu_percent(agent.process, 4 * effort)
    for client in clients:
        client.close()
    return [*rows, limited("agent.idle_cpu", share, "% of a core", 1.0, {"shards in use": 64})]


def main() -> None:
    to_tell = parser(__doc__, f"{QUICK_HELP}; peers only if they are named")
    to_tell.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of it")
    to_tell.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    to_tell.add_argument("--peers", nargs="*", choices=peers.NAMES, metavar="NAME", help="which peers")
    given = to_tell.parse_args()
    parts = given.only
    named = peers.NAMES if given.peers is None and not given.quick else given.peers or ()
    movers: list[Mover] = [PYTHON]
    try:
        movers.append(native.require(build=True))
    except native.Unavailable as reason:
        print(f"Without the native mover: {reason}")
    effort = 1 if given.quick else 5
    gc.disable()  # as a driver's hot path would have it; nothing here makes cycles
    every: list[Row] = []

    def tell(title: str, rows: list[Row]) -> None:
        every.extend(rows)
        show(title, rows, None)

    with running(tier2=True) as agent:
        for label in given.sizes:
            progress(f"columns of {label}")
            memory = Memory(SIZES[label])
            rows: list[Row] = []
            for mover in movers:
                if "shm" in parts:
                    rows += shm(agent, label, memory, mover, effort)
                if "stream" in parts:
                    for kind in ("unix", "tcp"):
                        rows += stream(agent, kind, label, memory, mover, effort)
            if "tier2" in parts:
                rows += tier2(agent, label, memory, effort)
                if memory.size < MIB:
                    rows += two_batches(agent, label, memory, effort)
                rows += displacing(label, memory, effort)
            if rows:
                tell(f"Columns of {label}", rows)
        if "stream" in parts:
            progress("two drivers at once")
            tell(
                "Two drivers at once",
                [r for k in ("unix", "tcp") for r in two_clients(agent, k, effort)],
            )
        if "rest" in parts:
            progress("the agent")
            tell("The agent", the_rest(agent, effort))
    with running() as agent:
        for name in named if "peers" in parts else ():
            progress(f"against {name}")
            try:
                tell(f"Against {name}", against_peer(agent, name, effort, movers[-1]))
            except peers.Unavailable as reason:
                print(f"\n{name} is left out: {reason}")
    if given.json:
        show("All", every, given.json)


if __name__ == "__main__":
    main()
