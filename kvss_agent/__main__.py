"""`python -m kvss_agent`: one agent, until SIGTERM. See `--help`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

import uvicorn

from kvss_agent.agent import Agent
from kvss_agent.control import Control
from kvss_agent.logs import set_up
from kvss_agent.settings import Settings, WrongSettings, parse
from telemetry.notify import notify

log = logging.getLogger("kvss_agent")
EX_CONFIG = 78
WATCHDOG_SECONDS = 1.0


def main() -> int:
    try:
        settings = parse(sys.argv[1:], os.environ)
    except WrongSettings as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    set_up(settings.log_format, settings.name)
    _use_all_descriptors()
    try:
        return asyncio.run(_serve(settings))
    except (OSError, ValueError) as error:  # a port or path that is taken, a certificate that is none
        sys.stderr.write(f"The agent cannot start: {error}\n")
        return 1


async def _serve(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    control = _listen(settings.control)
    agent = Agent(settings, _software())
    await agent.start()
    server = _Server(
        uvicorn.Config(
            Control(agent).application(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[control]))
    log.info(
        "Listening: drivers on %s%s, control on %s:%s",
        settings.unix,
        f" and {settings.tcp[0]}:{agent.tcp_port}" if settings.tcp else "",
        *control.getsockname()[:2],
    )
    watchdog = asyncio.create_task(_watchdog()) if notify("READY=1") else None
    await stop.wait()
    notify("STOPPING=1")
    log.info("Draining, at most %g s", settings.drain_seconds)
    gone = await agent.stop(settings.drain_seconds)
    server.should_exit = True
    await serving
    if watchdog:
        watchdog.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watchdog
    log.info("Stopped; %s", "everybody had left" if gone else "some connections were closed")
    return 0


class _Server(uvicorn.Server):
    """Leaves the signals to us: the data plane drains while this still answers."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _use_all_descriptors() -> None:
    """A shard takes up to four and each connection one; the usual soft limit is a few hundred."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _watchdog() -> None:
    while True:
        await asyncio.sleep(WATCHDOG_SECONDS)
        notify("WATCHDOG=1")


def _listen(place: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    # Named as TCP: otherwise asyncio does not switch Nagle's algorithm off, and an answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(place)
    listener.listen(128)  # from here on nobody is refused; whoever is early waits
    return listener


def _software() -> str:
    try:
        return f"tidegate {version('tidegate')}"
    except PackageNotFoundError:  # run from a checkout
        return "tidegate"


if __name__ == "__main__":
    sys.exit(main())
