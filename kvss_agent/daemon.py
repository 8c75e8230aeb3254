"""What daemons do to be good ones: listen early, stop when told to, say so to who watches."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import uvicorn
from starlette.applications import Starlette

from telemetry.deltas import Collect
from telemetry.emitter import Emitter
from telemetry.metrics import LabelLimits
from telemetry.notify import notify

EX_CONFIG: Final = 78
WATCHDOG_SECONDS: Final = 1.0


class _Server(uvicorn.Server):
    """Leaves the signals to us: it still answers while we stop."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@contextlib.asynccontextmanager
async def serving(application: Starlette, listener: socket.socket) -> AsyncIterator[None]:
    """Answer HTTP for as long as this lasts."""
    server = _Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )
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
async def telling(
    redis_url: str | None, kind: str, name: str, collect: Collect, limits: LabelLimits
) -> AsyncIterator[None]:
    """Tell our numbers to the stream for as long as this lasts, and at the end what is left of them.
    Without an address nobody is told."""
    if redis_url is None:
        yield
        return
    emitter = Emitter(redis_url, kind, software(), name=name, collect=collect, limits=limits).start()
    try:
        yield
    finally:
        await asyncio.to_thread(emitter.stop)


def listen(place: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    # Named as TCP: otherwise asyncio does not switch Nagle's algorithm off, and an answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen(128)  # from here on nobody is refused; whoever is early waits
    return listener


def software() -> str:
    try:
        return f"tidegate {version('tidegate')}"
    except PackageNotFoundError:  # run from a checkout
        return "tidegate"


def use_all_descriptors() -> None:
    """A shard takes up to four and each connection one; the usual soft limit is a few hundred."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
