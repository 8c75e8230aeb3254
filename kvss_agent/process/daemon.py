"""What all daemons need: logs, early listening, stop signals, and readiness for the service manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
import uvicorn

from kvss_agent import native
from kvss_agent.http.server import HttpPolicy, QuietServer
from kvss_agent.process.options import WrongSettings
from kvss_agent.process.settings import ProcessSettings
from telemetry.credentials import own_url
from telemetry.emit.deltas import Collect
from telemetry.emit.reporter import Reporter
from telemetry.emit.transfers import TakeSlowest
from telemetry.metrics import LabelLimits
from telemetry.notify import notify
from telemetry.version import tidegate_version

if TYPE_CHECKING:
    from starlette.applications import Starlette  # of those that have a control API

    from kvss_agent.process.membership import MembershipStatus  # of those who join, which takes a while

log = logging.getLogger(__name__)

EX_CONFIG: Final = 78
WATCHDOG_SECONDS: Final = 1.0
EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared with


class LogSettings(Protocol):
    """What logs need of a daemon's settings."""

    @property
    def name(self) -> str: ...
    @property
    def log_format(self) -> str: ...


S = TypeVar("S", bound=LogSettings)


class Stoppable(Protocol):
    def stop(self) -> None: ...


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
    settings: ProcessSettings,
    kind: str,
    topic: str,
    collect: Collect,
    limits: LabelLimits,
    status: MembershipStatus,
    slowest: TakeSlowest | None = None,
    beside: Callable[[str], Stoppable] | None = None,
) -> AsyncIterator[None]:
    """Report telemetry for as long as this lasts, and at the end what is left of it.

    Where the settings do not say where to, the console does, once this process has joined (`status`);
    without either, and without a collector, nobody is told. `topic`: whose user opens the address.
    `beside` starts what else this process reports to the same Redis, for that address.
    """
    reporters: list[Stoppable] = []

    def report(redis_url: str | None, otlp_url: str | None) -> None:
        address = own_url(redis_url, topic, settings.token) if redis_url else None
        more: dict[str, Any] = {"collect": collect, "limits": limits, "slowest": slowest}
        reporters.append(Reporter(address, otlp_url, kind, software(), name=settings.name, **more))
        if beside and address:
            reporters.append(beside(address))

    async def follow_console() -> None:
        while True:
            await status.has_telemetry.wait()
            try:
                report(status.telemetry_url, None)
            except ValueError as error:
                log.warning("The console names an address for telemetry that can't be used: %s", error)
                status.has_telemetry.clear()  # it may name another one later
            else:
                return

    report(settings.telemetry, settings.otlp)
    asks_console = settings.console and not settings.telemetry
    following = asyncio.create_task(follow_console()) if asks_console else None
    try:
        yield
    finally:
        if following:
            following.cancel()
        for one in reporters:
            await asyncio.to_thread(one.stop)


def listen(place: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    # Named as TCP: otherwise asyncio does not switch Nagle's algorithm off, and an answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)  # from here on nobody is refused; whoever is early waits
    except OSError:
        listener.close()
        raise
    return listener


def url_of(
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    own_address: Callable[[], str | None] = socket.gethostname,
) -> str:
    """Where others reach what listens here: where that is all addresses of the machine, at the one that
    `own_address` says, if it knows one."""
    host, port = listener.getsockname()[:2]
    if host in EVERYWHERE:
        host = own_address() or socket.gethostname()
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def host_for_others(host: str) -> str:
    """The address that is listened on; for all of them, the machine's name."""
    return socket.gethostname() if host in EVERYWHERE else host


def software() -> str:
    return f"tidegate {tidegate_version()}"


def use_all_descriptors() -> None:
    """A shard takes up to four and each connection one; the usual soft limit is a few hundred."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(
    what: str,
    parse: Callable[[Sequence[str], Mapping[str, str]], S],
    serve: Callable[[S], Coroutine[Any, Any, int]],
    arguments: Sequence[str],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """A daemon, from its arguments and environment to its exit status. `loop_factory`: of another event
    loop than asyncio's."""
    try:
        settings = parse(arguments, os.environ)
    except WrongSettings as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    set_up_logs(settings)
    use_all_descriptors()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(serve(settings))
    except (OSError, ValueError, native.Unavailable) as error:
        # A port that is taken, a broken certificate, no compiled mover where it is required.
        sys.stderr.write(f"{what} cannot start: {error}\n")
        return 1


def set_up_logs(settings: LogSettings | None = None) -> None:
    """Log to standard error, one line a record: as `text`, which is the default, or as `json` with the
    name of the process in every record. Nothing could forge a second line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Text())
    if settings and settings.log_format == "json":
        handler.setFormatter(_Json(settings.name))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # a line for each request helps nobody


class _Text(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("{asctime} {levelname:<7} {name}: {message}", style="{")
        self.default_time_format = "%Y-%m-%dT%H:%M:%S"
        self.default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


class _Json(logging.Formatter):
    def __init__(self, agent: str) -> None:
        super().__init__()
        self._agent = agent

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "agent": self._agent,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()
