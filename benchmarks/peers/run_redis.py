"""Redis by redis-py with hiredis, as fast as it was seen to be.

TCP on the loopback beats its Unix socket; redis-py's own packer beats the one of hiredis, which copies
every value once more; 64 KiB a read is the best; MSET pays until values are large, pipelined SET then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Adapter, free_ports, run

READ_BYTES = 64 << 10
MSET_BYTES_MAX = 1 << 20


class Redis(Adapter):
    def start(self) -> None:
        import redis
        from redis.connection import PythonRespSerializer

        (port,) = free_ports(1)
        self.serve(
            [
                os.environ["PEER_SERVER"],
                *("--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no"),
            ]
        )
        pool = redis.ConnectionPool(
            host="127.0.0.1", port=port, socket_read_size=READ_BYTES, socket_timeout=None
        )
        self.client = redis.Redis(connection_pool=pool)

        def ready() -> bool:
            try:
                return bool(self.client.ping())
            except redis.exceptions.ConnectionError:
                return False

        self.wait_until(ready)
        connection = pool.get_connection()
        packer = PythonRespSerializer(connection._buffer_cutoff, connection.encoder.encode)  # noqa: SLF001
        connection._command_packer = packer  # noqa: SLF001
        pool.release(connection)

    def open(self, size: int, count: int) -> memoryview:
        self.client.flushall()
        source = memoryview(bytearray(size * count))
        self.size = size
        self.keys = [f"column:{column}" for column in range(count)]
        self.values = [source[at : at + size] for at in range(0, size * count, size)]
        self.latest: list[Any] = []
        return source

    def put(self, first: int, n: int) -> None:
        if n == 1:
            self.client.set(self.keys[first], self.values[first])
            return
        columns = slice(first, first + n)
        pairs = dict(zip(self.keys[columns], self.values[columns], strict=True))
        if self.size <= MSET_BYTES_MAX:
            self.client.mset(pairs)
            return
        with self.client.pipeline(transaction=False) as pipeline:
            for key, value in pairs.items():
                pipeline.set(key, value)
            pipeline.execute()

    def get(self, first: int, n: int) -> None:
        if n == 1:
            self.latest = [self.client.get(self.keys[first])]
        else:
            self.latest = self.client.mget(self.keys[first : first + n])

    def got(self, first: int, n: int) -> Sequence[Any]:  # noqa: ARG002
        return self.latest


if __name__ == "__main__":
    run(Redis)
