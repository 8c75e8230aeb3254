"""Mooncake's store over shared memory: a master, a real client that owns the memory, a dummy client.

The dummy client's buffers lie in memory that the real client has mapped, so a value is copied once. Two
service threads are as many as are busy; more made no difference.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Adapter, accepts, free_ports, run

STORE_BYTES = 1 << 30
BUFFER_BYTES = 1 << 30  # half of it is source, half destination


class Mooncake(Adapter):
    def start(self) -> None:
        os.environ["GLOG_minloglevel"] = "2"  # noqa: SIM112 # as they spell it
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        programs = Path(sys.modules["mooncake"].__file__ or "").parent
        master, client, metrics = free_ports(3)
        self.serve(
            [
                programs / "mooncake_master",
                "--rpc_address=127.0.0.1",
                f"--rpc_port={master}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                "--enable_metric_reporting=false",
                "--default_kv_lease_ttl=10s",
            ]
        )
        self.wait_until(lambda: accepts(master))
        self.serve(
            [
                programs / "mooncake_client",
                "--host=127.0.0.1",
                f"--port={client}",
                f"--master_server_address=127.0.0.1:{master}",
                "--metadata_server=P2PHANDSHAKE",
                f"--global_segment_size={STORE_BYTES}",
                "--threads=2",
            ]
        )
        self.wait_until(lambda: accepts(client))
        self.store = MooncakeDistributedStore()
        if self.store.setup_dummy(BUFFER_BYTES, 64 << 20, f"127.0.0.1:{client}"):
            raise RuntimeError("the dummy client can't reach the real one")
        self.base = self.store.alloc_from_mem_pool(BUFFER_BYTES)
        if not self.base or self.store.register_buffer(self.base, BUFFER_BYTES):
            raise RuntimeError("no memory is shared with the real client")
        self.memory = memoryview((ctypes.c_uint8 * BUFFER_BYTES).from_address(self.base)).cast("B")
        self.stored: set[str] = set()

    def open(self, size: int, count: int) -> memoryview:
        self.remove(list(self.stored))
        self.size, total = size, size * count
        if 2 * total > BUFFER_BYTES:
            raise ValueError(f"{count} columns of {size} bytes are more than fit")
        self.memory[total : 2 * total] = bytes(total)
        self.keys = [f"{size}:{column}" for column in range(count)]
        self.sources = [self.base + column * size for column in range(count)]
        self.targets = [pointer + total for pointer in self.sources]
        self.sizes = [size] * count
        self.total = total
        return self.memory[:total]

    def put(self, first: int, n: int) -> None:
        if n == 1:
            failed = self.store.put_from(self.keys[first], self.sources[first], self.size)
        else:
            end = first + n
            codes = self.store.batch_put_from(
                self.keys[first:end], self.sources[first:end], self.sizes[first:end]
            )
            failed = any(codes)
        if failed:
            raise RuntimeError("a column was not stored")

    def get(self, first: int, n: int) -> None:
        if n == 1:
            complete = self.store.get_into(self.keys[first], self.targets[first], self.size) == self.size
        else:
            end = first + n
            sizes = self.sizes[first:end]
            complete = (
                self.store.batch_get_into(self.keys[first:end], self.targets[first:end], sizes) == sizes
            )
        if not complete:
            raise RuntimeError("a column was not there")

    def got(self, first: int, n: int) -> Sequence[Any]:
        start, size = self.total + first * self.size, self.size
        return [self.memory[at : at + size] for at in range(start, start + n * size, size)]

    def forget(self, first: int, n: int, batch: int) -> None:  # noqa: ARG002
        # A value never changes here: putting a key that exists would return at once.
        self.remove([key for key in self.keys[first : first + n] if key in self.stored])
        self.stored.update(self.keys[first : first + n])

    def remove(self, keys: list[str]) -> None:
        if keys and any(self.store.batch_remove(keys, True)):
            raise RuntimeError("a column could not be removed")
        self.stored.difference_update(keys)

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        super().close()


if __name__ == "__main__":
    run(Mooncake)
