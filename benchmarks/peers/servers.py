"""Servers of peers that engines talk to themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.environment import Environment, Unavailable
from benchmarks.peers.protocol import accepts, free_ports

START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 10.0
CHUNK_TOKENS = 256  # its default
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "ERROR"}


@contextlib.contextmanager
def lmcache_server(environment: Environment, scratch: Path) -> Iterator[int]:
    """LMCache's multiprocess server with a pool in shared memory; the port for engines."""
    port, web = free_ports(2)
    shared = f"tidegate-bench-engine-{os.getpid()}"
    command = [
        *(environment.python.parent / "lmcache", "server"),
        *("--host", "127.0.0.1", "--port", port, "--http-host", "127.0.0.1", "--http-port", web),
        *("--chunk-size", CHUNK_TOKENS, "--supported-transfer-mode", "engine_driven"),
        *("--shm-name", shared, "--l1-size-gb", 1, "--no-l1-use-lazy"),
        *("--eviction-policy", "LRU", "--disable-observability"),
    ]
    with (scratch / "lmcache.log").open("w") as log:
        server = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **QUIET, **environment.variables},
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + START_SECONDS_MAX
        while not accepts(web):
            if server.poll() is not None or time.monotonic() > until:
                raise Unavailable("LMCache's server did not start")
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for left in Path("/dev/shm").glob(f"*{shared}*"):  # noqa: S108 - where it is
            left.unlink(missing_ok=True)
