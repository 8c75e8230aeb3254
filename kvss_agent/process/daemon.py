"""What all daemons need: early listening, stop signals, and readiness for the service manager."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette

from kvss_agent.http.server import HttpPolicy, QuietServer
from telemetry.emit.deltas import Collect
from telemetry.emit.reporter import Reporter
from telemetry.emit.transfers import TakeSlowest
from telemetry.metrics import LabelLimits
from telemetry.notify import notify

EX_CONFIG: Final = 78
WATCHDOG_SECONDS: Final = 1.0


@contextlib.asynccontextmanager
async def http_server(
    application: Starlette,
    listener: socket.socket,
    policy: HttpPolicy | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Answer HTTP for as long as this lasts; with `tls`, nothing else. `policy`: its bounds, which
    count what hits them."""
    config = uvicorn.Config(
        application,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who asks, and whether over TLS, is what the connection says
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = QuietServer(config, policy or HttpPolicy(), tls)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def stop_signal() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Tell whoever supervises that we are ready, and for as long as this lasts that we are alive."""
    beating = asyncio.create_task(_beat()) if notify("READY=1") else None
    try:
        yield
    finally:
        if beating:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating


async def _beat() -> None:
    while True:
        await asyncio.sleep(WATCHDOG_SECONDS)
        notify("WATCHDOG=1")


@contextlib.asynccontextmanager
async def reporting(
    redis_url: str | None,
    otlp_url: str | None,
    kind: str,
    name: str,
    collect: Collect,
    limits: LabelLimits,
    slowest: TakeSlowest | None = None,
) -> AsyncIterator[None]:
    """Tell our numbers for as long as this lasts, and at the end what is left of them. Without an
    address nobody is told."""
    made = Reporter(
        redis_url,
        otlp_url,
        kind,
        software(),
        name=name,
        collect=collect,
        limits=limits,
        slowest=slowest,
    )
    try:
        yield
    finally:
        await asyncio.to_thread(made.stop)


def listen(place: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    # Named as TCP: otherwise asyncio does not switch Nagle's algorithm off, and an answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen(128)  # from here on nobody is refused; whoever is early waits
    return listener


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """Where others reach what listens here."""
    host, port = listener.getsockname()[:2]
    host = host_for_others(host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def host_for_others(host: str) -> str:
    """The address that is listened on; for all of them, the machine's name."""
    return socket.gethostname() if host in ("", "0.0.0.0", "::") else host  # noqa: S104 - compared with


def software() -> str:
    return f"tidegate {version()}".rstrip()


def version() -> str:
    """Of what is installed; or, where it runs from its folder, of that. Empty if neither says."""
    try:
        return metadata("tidegate")["version"]
    except PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        if not project.is_file():
            return ""
        return str(tomllib.loads(project.read_text())["project"]["version"])


def use_all_descriptors() -> None:
    """A shard takes up to four and each connection one; the usual soft limit is a few hundred."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
