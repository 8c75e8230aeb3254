"""LMCache's multiprocess server with its pool in shared memory, the worker copying (`engine_driven`).

A column is one chunk of CHUNK_TOKENS tokens in a single-plane layout. A put is what a worker sends
(prepare, copy, commit), a get what the scheduler and the worker send for a request that hits (look up,
prepare, copy, commit, end). A copy by NumPy straight into the pool beats LMCache's own gather, requests
over ZeroMQ beat gRPC, and one worker thread beats four. Token counts make little difference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Adapter, accepts, free_ports, run

CHUNK_TOKENS = 16
POOL_GB = 2
SECONDS_MAX = 30.0
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


class LMCache(Adapter):
    def start(self) -> None:
        os.environ.update(QUIET)
        port, web = free_ports(2)
        self.shared = f"tidegate-bench-{os.getpid()}"
        self.serve(
            [
                *(Path(sys.executable).parent / "lmcache", "server"),
                *("--host", "127.0.0.1", "--port", port),
                *("--http-host", "127.0.0.1", "--http-port", web),
                *("--chunk-size", CHUNK_TOKENS),
                *("--supported-transfer-mode", "engine_driven", "--shm-name", self.shared),
                *("--l1-size-gb", POOL_GB, "--no-l1-use-lazy", "--eviction-policy", "LRU"),
                "--disable-observability",
            ]
        )
        import numpy as np
        from lmcache.v1.multiprocess import (  # type: ignore[import-not-found]
            custom_types,
            transfer_context,
        )
        from lmcache.v1.multiprocess.transport.factory import (  # type: ignore[import-not-found]
            RequestClientFactory,
        )

        self.np, self.types, self.contexts = np, custom_types, transfer_context
        self.wait_until(lambda: accepts(web))
        self.client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        if self.client.get_chunk_size().result(timeout=SECONDS_MAX) != CHUNK_TOKENS:
            raise RuntimeError("the server answers something else")
        self.context: Any = None
        self.instance = self.generation = 0

    def open(self, size: int, count: int) -> memoryview:
        import torch

        self.release()
        self.size, self.count = size, count
        self.instance += 1
        self.model = f"columns of {size} bytes, {self.instance}"
        shape = (2 * count, CHUNK_TOKENS, size // CHUNK_TOKENS)
        cache = {"layer": torch.zeros(shape, dtype=torch.uint8)}
        self.context = self.contexts.EngineDrivenTransferContext(self.instance, self.client)
        self.context.register(cache, self.model, 1, 1, SECONDS_MAX, layout_hints={"kv_layout": "NHD"})
        self.pool = self.context.engine_driven_context
        if type(self.pool).__name__ != "EngineDrivenContextShm":
            raise RuntimeError("LMCache did not get its shared memory")
        columns = cache["layer"].numpy().reshape(2 * count, size)
        self.sources, self.targets = columns[:count], columns[count:]
        self.keys: dict[tuple[int, int], Any] = {}
        return memoryview(self.sources.reshape(-1))

    def put(self, first: int, n: int) -> None:
        key = self.keys[first, n]
        slots, columns = self.pool.prepare_store(key, self.instance)
        if len(slots) != n:
            raise RuntimeError("no room for a column")
        for column, slot in zip(columns, slots, strict=True):
            self.np.copyto(slot.numpy().reshape(-1), self.sources[first + column])
        if not self.pool.commit_store(key, self.instance, []):
            raise RuntimeError("a column was not stored")

    def get(self, first: int, n: int) -> None:
        key = self.keys[first, n]
        self.client.lookup(key.no_worker_id_version(), 1).result(timeout=SECONDS_MAX)
        found = self.client.wait_prefetch_status(key.request_id, SECONDS_MAX).result(timeout=SECONDS_MAX)
        slots = self.pool.prepare_retrieve(key, self.instance) if found == n else None
        if slots is None:
            raise RuntimeError("a column was not there")
        for target, slot in zip(self.targets[first : first + n], slots, strict=True):
            self.np.copyto(target, slot.numpy().reshape(-1))
        if not self.pool.commit_retrieve(key, self.instance):
            raise RuntimeError("a column was not let go")
        self.client.end_session(key.request_id)

    def got(self, first: int, n: int) -> Sequence[Any]:
        return [memoryview(target) for target in self.targets[first : first + n]]

    def forget(self, first: int, n: int, batch: int) -> None:
        # A value never changes here, and a batch is a prompt: its keys are chained.
        self.client.clear(True).result(timeout=SECONDS_MAX)
        self.keys.clear()
        for start in range(first, first + n, batch):
            self.generation += 1
            tokens = batch * CHUNK_TOKENS
            self.keys[start, batch] = self.types.IPCCacheServerKey(
                model_name=self.model,
                world_size=1,
                worker_id=0,
                num_kv_readers=1,
                token_ids=(self.generation, *range(1, tokens)),
                start=0,
                end=tokens,
                request_id=f"request-{self.generation}",
            )

    def release(self) -> None:
        if getattr(self, "context", None) is None:
            return
        self.client.clear(True).result(timeout=SECONDS_MAX)
        self.context.unregister().result(timeout=SECONDS_MAX)
        self.context.close()
        self.context = None

    def close(self) -> None:
        super().close()
        for left in Path("/dev/shm").glob(f"*{self.shared}*"):  # noqa: S108 # where it is
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    run(LMCache)
