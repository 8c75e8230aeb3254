"""Servers of peers that engines talk to themselves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
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
    with _running(command, {**QUIET, **environment.variables}, scratch / "lmcache.log", web):
        yield port
    for left in Path("/dev/shm").glob(f"*{shared}*"):  # noqa: S108 - where it is
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def mooncake_master(environment: Environment, scratch: Path) -> Iterator[int]:
    """Mooncake's master; its port. The memory is the engine's own."""
    port, metrics = free_ports(2)
    command = [
        environment.packages / "mooncake" / "mooncake_master",
        *(f"--rpc_port={port}", "--rpc_address=127.0.0.1"),
        *(f"--metrics_port={metrics}", "--metrics_host=127.0.0.1", "--enable_metric_reporting=false"),
    ]
    with _running(command, environment.variables, scratch / "mooncake.log", port):
        yield port


@contextlib.contextmanager
def _running(
    command: Sequence[object], variables: Mapping[str, str], log: Path, port: int
) -> Iterator[None]:
    """A server, as soon as it listens. Raises Unavailable."""
    with log.open("w") as said:
        server = subprocess.Popen(
            [str(part) for part in command], env={**os.environ, **variables}, stdout=said, stderr=said
        )
    try:
        until = time.monotonic() + START_SECONDS_MAX
        while not accepts(port):
            if server.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"{Path(str(command[0])).name} did not start")
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
