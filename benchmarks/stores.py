"""LMCache's own client at our `lm://` front and at LMCache's own server, in turns.

    .tidegate/engines/bin/python -m benchmarks.stores --quick

A round puts some chunks, asks for the last one, since a PUT is not answered, and gets them all. What
comes back is compared. Both servers are processes of their own; behind ours are a driver and an agent,
another process. The fastest round of each counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final

import torch

from benchmarks.harness import Row, options, progress, show
from kvss_agent import native
from kvss_agent.process import daemon
from swdriver_shim.adapters.lmcache_frames import SHAPE_BYTES
from swdriver_shim.adapters.lmcache_server import LmcacheServer
from swdriver_shim.driver import Driver
from swdriver_shim.keys import Keys
from swdriver_shim.objects import LocalObjects, object_model
from swdriver_shim.policy import OrgPolicies, Policy
from swdriver_shim.replay import fleet

KIB: Final = (256, 1024, 4096, 16384)
ROUND_BYTES: Final = 64 << 20
ROUNDS, QUICK_ROUNDS = 15, 5
START_SECONDS_MAX: Final = 60.0
SERVER: Final = "--serve"  # this process is the front, for chunks of so many bytes


def serve(chunk_bytes: int) -> None:
    """A front with a driver and an agent behind it, until standard input ends."""
    native.best(build=True)
    model = object_model("bench", chunk_bytes + SHAPE_BYTES)
    layout = model.shape()
    slots = 3 * max(4, ROUND_BYTES // chunk_bytes)
    with fleet.started(layout, slots, 1) as agents:
        driver = Driver(layout, "bench", agents.shards())
        # What was got once is not wanted again here, which the usual policy would learn.
        driver.set_policies({"bench": OrgPolicies(policy=Policy(displacement="lru"))})
        objects = LocalObjects(driver, Keys("bench", bytes(32), model.namespace()))
        listener = daemon.listen(("127.0.0.1", 0))
        front = LmcacheServer(listener, lambda: objects)
        print(json.dumps(listener.getsockname()[1]), flush=True)
        sys.stdin.read()
        front.stop()
        driver.close()


@contextlib.contextmanager
def ours(chunk_bytes: int) -> Iterator[int]:
    """Its port."""
    command = [sys.executable, "-m", "benchmarks.stores", SERVER, str(chunk_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate(timeout=START_SECONDS_MAX)


@contextlib.contextmanager
def theirs(_chunk_bytes: int) -> Iterator[int]:
    with daemon.listen(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        process.kill()
        process.wait()


class Client:
    """LMCache's connector, with what of LMCache is around it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, chunk_bytes: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.connector import CreateConnector
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self._loop = loop
        self._shape = torch.Size([2, 4, 256, chunk_bytes // (2 * 4 * 256 * 2)])
        config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0.5)
        metadata = LMCacheMetadata(
            "bench", 1, 1, 0, 0, torch.bfloat16, (4, 2, 256, 1, self._shape[3]), chunk_size=256
        )
        self._memory = LocalCPUBackend(config, metadata, "cpu")
        make = partial(CreateConnector, f"lm://127.0.0.1:{port}", loop, self._memory, config, metadata)
        self._connector = _patiently(make)
        self._kept = self._memory.allocate(self._shape, torch.bfloat16)
        self._kept.tensor.copy_(torch.randn(self._shape).to(torch.bfloat16))

    def close(self) -> None:
        self._run(self._connector.close())
        self._memory.memory_allocator.close()

    def put(self, keys: list[Any]) -> float:
        began = time.perf_counter()
        for key in keys:
            self._kept.ref_count_up()  # which a put gives back
            self._run(self._connector.put(key, self._kept))
        assert self._run(self._connector.exists(keys[-1]))
        return time.perf_counter() - began

    def get(self, keys: list[Any]) -> float:
        seconds = 0.0
        for key in keys:
            began = time.perf_counter()
            got = self._run(self._connector.get(key))
            seconds += time.perf_counter() - began
            assert got is not None
            assert torch.equal(got.tensor, self._kept.tensor), "wrong bytes"
            got.ref_count_down()
        return seconds

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


def _patiently(make: Callable[[], Any]) -> Any:
    until = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            return make()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def rows_of(loop: asyncio.AbstractEventLoop, kib: int, rounds: int) -> list[Row]:
    from lmcache.utils import CacheEngineKey

    size = kib << 10
    count = max(4, ROUND_BYTES // size)
    took: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, server in (("ours", ours), ("theirs", theirs)):
            port = stack.enter_context(server(size))
            clients[name] = Client(loop, port, size)
            stack.callback(clients[name].close)
        for turn in range(rounds + 1):
            keys = [
                CacheEngineKey("bench", 1, 0, turn * count + number, torch.bfloat16)
                for number in range(count)
            ]
            for name, client in clients.items():
                put, get = client.put(keys), client.get(keys)
                if turn:  # the first is for warming up
                    took.setdefault((name, "put"), []).append(put)
                    took.setdefault((name, "get"), []).append(get)
    rows = []
    for verb in ("put", "get"):
        mine, others = (count * size / min(took[who, verb]) for who in ("ours", "theirs"))
        rows.append(Row(f"lm.{verb}.{kib}KiB", mine / 1e9, "GB/s", "lmcache.v1.server", mine / others))
    return rows


def main() -> None:
    given = options(__doc__)
    logging.disable(logging.INFO)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    rows: list[Row] = []
    for kib in KIB:
        progress(f"chunks of {kib} KiB")
        rows += rows_of(loop, kib, QUICK_ROUNDS if given.quick else ROUNDS)
    show("LMCache's client", rows, given.json)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVER]:
        serve(int(sys.argv[2]))
    else:
        main()
