"""The verbs of the command line. Each returns an exit code and says what it did."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from console.environment import PROJECT, Environment, Mode, env_file
from console.stack import keys, lock, postgres, redis
from console.stack.core import State
from console.stack.display import Display
from console.stack.errors import StackError, sentences
from console.stack.logs import Logs
from console.stack.processes import Remembered, stop_leftovers
from console.stack.services import Service, console_services, server
from console.stack.supervisor import Supervisor

PORTS_TRIED = 100
DOWN_SECONDS_MAX = 90.0
PAUSE_SECONDS = 0.1
BACKLOG = 512


@dataclass(frozen=True)
class Folders:
    """Where a stack keeps what is its own."""

    state: Path

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def make(self) -> None:
        for path in (self.state, self.run, self.logs):
            with sentences("make a directory", path):
                path.mkdir(parents=True, exist_ok=True)
        with sentences("write into a directory", self.run):
            probe = self.run / ".probe"
            probe.write_bytes(b"0" * 4096)
            probe.unlink()


def up() -> int:
    """Start everything, stay until told to stop, stop everything."""
    began = time.monotonic()
    given = {name: value for name, value in os.environ.items() if value}
    folders = Folders(_state_dir(given))
    folders.make()
    try:
        with lock.held(folders.state) as held:
            return _up(began, given, folders, held)
    except lock.HeldError as error:
        where = error.holder.get("address", "it is still starting")
        print(f"Tidegate is already running: {where} (process {error.holder.get('pid')}).")
        print("`make down` stops it.")
        return os.EX_OK


def _up(began: float, given: Mapping[str, str], folders: Folders, held: lock.Held) -> int:
    # What a killed supervisor left runs over the same files: first of all it has to go.
    left = stop_leftovers(Remembered(folders.run))
    notes = [f"Stopped what a former start had left running: {', '.join(left)}."] if left else []
    servers: list[Service] = []
    urls = {}
    if "DATABASE_URL" not in given:
        run = postgres.prepare(folders.state / "postgres")
        servers.append(server("postgres", run, f"PostgreSQL {run.version}"))
        urls["DATABASE_URL"] = run.url
    if "REDIS_URL" not in given:
        run_redis = redis.prepare(folders.state / "redis")
        servers.append(server("redis", run_redis, f"Redis {run_redis.version}"))
        urls["REDIS_URL"] = run_redis.url
    environment = {
        "TIDEGATE_MODE": Mode.EMBEDDED.value,
        "TIDEGATE_SECRET_KEY": keys.kept(folders.state / "secret_key"),
        "TIDEGATE_STATIC_DIR": str(folders.state / "static"),
        "PYTHONUNBUFFERED": "1",
        **urls,
        **given,
    }
    settings = Environment.read(environment)
    web_socket = listening_socket(settings.host, settings.port)
    port = web_socket.getsockname()[1]
    if port != settings.port:
        notes.append(f"Port {settings.port} is taken, so this is port {port}.")
    address = f"http://{settings.host}:{port}"
    services = [
        *servers,
        *console_services(
            tuple(service.name for service in servers), folders.state, settings.worker_processes
        ),
    ]
    written = {name: environment[name] for name in _WRITTEN}
    keys.write_private(env_file(folders.state), _as_lines(written))
    held.describe(address=address)
    logs = Logs(folders.logs)
    try:
        with Display([s.name for s in services], began=began, notes=notes) as display:
            display.stage("servers made ready", time.monotonic() - began)
            display.address = address
            display.versions = {service.name: service.version for service in services}
            asyncio.run(_supervise(services, environment, folders, logs, display, web_socket))
            display.console.print("Stopped. Nothing is left running; the data is kept.")
    finally:
        web_socket.close()
        logs.close()
        env_file(folders.state).unlink(missing_ok=True)
    return os.EX_OK


async def _supervise(
    services: list[Service],
    environment: Mapping[str, str],
    folders: Folders,
    logs: Logs,
    display: Display,
    web_socket: socket.socket,
) -> None:
    supervisor = Supervisor(
        services,
        environment=environment,
        run_directory=folders.run,
        logs=logs,
        watcher=display,
        web_socket=web_socket,
    )
    await supervisor.run()


_WRITTEN = (
    "DATABASE_URL",
    "REDIS_URL",
    "TIDEGATE_MODE",
    "TIDEGATE_SECRET_KEY",
    "TIDEGATE_STATIC_DIR",
)


def _as_lines(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _state_dir(given: Mapping[str, str]) -> Path:
    return PROJECT / given.get("TIDEGATE_STATE_DIR", ".tidegate")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket on the first free port from `port` on. It stays open while the web process changes."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    problem: OSError | None = None
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bare, candidate))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            problem = error
            continue
        return listener
    raise StackError(
        f"No port from {port} to {port + PORTS_TRIED - 1} on {host} can be listened on: "
        f"{problem.strerror if problem else 'none is left'}. Set TIDEGATE_HOST or TIDEGATE_PORT.",
        exit_code=os.EX_UNAVAILABLE,
    )


def down() -> int:
    """Stop the running stack, or what is left of one."""
    folders = Folders(_state_dir(os.environ))
    holder = lock.holder(folders.state)
    if holder is None:
        left = stop_leftovers(Remembered(folders.run)) if folders.run.is_dir() else []
        if left:
            print(f"Its supervisor was gone; stopped what it had left: {', '.join(left)}.")
        else:
            print("Tidegate is not running.")
        return os.EX_OK
    pid = holder.get("pid")
    if not isinstance(pid, int):
        raise StackError(
            "Tidegate is only just starting. Try again in a moment.", exit_code=os.EX_TEMPFAIL
        )
    print(f"Stopping Tidegate (process {pid}) …")
    began = time.monotonic()
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise StackError(f"Process {pid} belongs to another user.", exit_code=os.EX_NOPERM) from None
    while lock.holder(folders.state) is not None:
        if time.monotonic() - began > DOWN_SECONDS_MAX:
            raise StackError(f"Process {pid} has not stopped after {DOWN_SECONDS_MAX:.0f} s.")
        time.sleep(PAUSE_SECONDS)
    print(f"Stopped after {time.monotonic() - began:.1f} s. The data is kept.")
    return os.EX_OK


def status() -> int:
    """A line per process, and where the console is. The exit code says whether it runs."""
    folders = Folders(_state_dir(os.environ))
    holder = lock.holder(folders.state)
    if holder is None:
        print("Tidegate is not running. `make up` starts it.")
        return 3  # as init scripts say it
    table = Table("service", "state", "pid", "up for", "memory", box=None)
    for name, process in Remembered(folders.run).alive().items():
        minutes, seconds = divmod(int(time.time() - process.create_time()), 60)
        try:
            memory = f"{process.memory_info().rss / 1e6:.0f} MB"
            frozen = process.status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            continue
        state = "stopped by a signal" if frozen else State.READY.value
        table.add_row(name, state, str(process.pid), f"{minutes} min {seconds:02} s", memory)
    console = Console()
    console.print(table)
    console.print(f"{holder.get('address', 'starting')} (supervisor: process {holder.get('pid')})")
    return os.EX_OK


def logs(service: str | None, lines: int) -> int:
    """The last lines of a service's log."""
    folder = Folders(_state_dir(os.environ)).logs
    names = sorted(path.stem for path in folder.glob("*.log"))
    if service is None:
        print("\n".join(names) if names else "Nothing has been logged yet.")
        return os.EX_OK
    if service not in names:
        known = f"There are: {', '.join(names)}." if names else "Nothing has been logged yet."
        raise StackError(f"There is no log of “{service}”. {known}", exit_code=os.EX_USAGE)
    with (folder / f"{service}.log").open(encoding="utf-8", errors="replace") as file:
        print("".join(deque(file, maxlen=max(1, lines))), end="")
    return os.EX_OK
