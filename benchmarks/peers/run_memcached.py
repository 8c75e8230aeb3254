"""memcached by pymemcache over a Unix socket.

Every put is acknowledged, a batch by the answer to its last value: a connection works in order. One set
after the other beats `set_many`, which joins all values to one string first. pymemcache reads 4 KiB at
a time, which is slow; it gets more here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Adapter, run

MEMORY_MIB = 2048
VALUE_MAX = "64m"
READ_BYTES_MIN, READ_BYTES_MAX = 64 << 10, 1 << 20


class Memcached(Adapter):
    def start(self) -> None:
        from pymemcache.client import base  # type: ignore[import-not-found]

        path = self.scratch / "memcached.sock"
        path.unlink(missing_ok=True)
        user = ["-u", "root"] if os.geteuid() == 0 else []
        memory = ["-m", str(MEMORY_MIB), "-I", VALUE_MAX]
        self.serve([os.environ["PEER_SERVER"], "-s", path, *memory, *user])
        self.wait_until(path.exists)
        self.library = base
        self.client = base.Client(str(path), default_noreply=False)

    def open(self, size: int, count: int) -> memoryview:
        self.client.flush_all()
        self.library.RECV_SIZE = max(READ_BYTES_MIN, min(size, READ_BYTES_MAX))
        self.source = memoryview(bytearray(size * count))
        self.size, self.count = size, count
        self.keys = [f"column:{column}" for column in range(count)]
        self.values: list[bytes] = []
        self.latest: list[Any] = []
        return self.source

    def forget(self, first: int, n: int, batch: int) -> None:  # noqa: ARG002 # nothing to forget
        if not self.values:  # it takes nothing but bytes, and converts the rest
            ends = range(0, self.count * self.size, self.size)
            self.values = [bytes(self.source[at : at + self.size]) for at in ends]

    def put(self, first: int, n: int) -> None:
        last = first + n - 1
        for column in range(first, last):
            self.client.set(self.keys[column], self.values[column], noreply=True)
        if not self.client.set(self.keys[last], self.values[last]):
            raise RuntimeError("a column was not stored")

    def get(self, first: int, n: int) -> None:
        if n == 1:
            self.latest = [self.client.get(self.keys[first])]
        else:
            found = self.client.get_many(self.keys[first : first + n])
            self.latest = list(found.values())
        if len(self.latest) != n:
            raise RuntimeError("a column was not there")

    def got(self, first: int, n: int) -> Sequence[Any]:  # noqa: ARG002
        return self.latest


if __name__ == "__main__":
    run(Memcached)
