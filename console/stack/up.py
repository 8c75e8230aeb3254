"""`up`: prepare, start everything, stay until told to stop, stop everything."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from console.demo import places
from console.environment import Environment, Mode, env_file
from console.stack import elsewhere, keys, lock, postgres, redis
from console.stack.display import Display
from console.stack.errors import sentences
from console.stack.folders import Folders
from console.stack.listening import address, listening_socket
from console.stack.logs import Logs
from console.stack.remembered import Remembered
from console.stack.services import Service, console_services, demo_services, server
from console.stack.supervisor import Supervisor

# What others on this machine need to work beside the running stack.
WRITTEN = (
    "DATABASE_URL",
    "REDIS_URL",
    "TIDEGATE_DEMO",
    "TIDEGATE_MODE",
    "TIDEGATE_SECRET_KEY",
    "TIDEGATE_STATIC_DIR",
)


def up() -> int:
    """Start everything, stay until told to stop, stop everything."""
    began = time.monotonic()
    given = {name: value for name, value in os.environ.items() if value}
    _settings(given)  # nothing is touched on the disk for settings that are wrong
    folders = Folders.given(given)
    folders.make()
    try:
        with lock.held(folders.state) as held:
            return _up(began, given, folders, held)
    except lock.HeldError as error:
        where = error.holder.get("address", "it is still starting")
        since = error.holder.get("since")
        when = f", since {time.strftime('%H:%M:%S', time.localtime(since))}" if since else ""
        print(f"Tidegate is already running: {where} (process {error.holder.get('pid')}{when}).")
        print("`make down` stops it.")
        return os.EX_OK


def _up(began: float, given: Mapping[str, str], folders: Folders, held: lock.Held) -> int:
    # What a killed supervisor left runs over the same files: first of all it has to go.
    left = Remembered(folders.run).stop_all()
    notes = [f"Stopped what a former start had left running: {', '.join(left)}."] if left else []
    servers = _servers(given, folders)
    environment = {
        "TIDEGATE_MODE": Mode.EMBEDDED.value,
        "TIDEGATE_SECRET_KEY": keys.kept(folders.state / "secret_key"),
        "TIDEGATE_STATIC_DIR": str(folders.state / "static"),
        "TIDEGATE_STATE_DIR": str(folders.state),
        "TIDEGATE_DEMO": "true",
        "PYTHONUNBUFFERED": "1",
        **servers.urls,
        **given,
    }
    settings = Environment.read(environment)
    made_ready = time.monotonic() - began
    with listening_socket(settings.host, settings.port) as web_socket:
        where = address(settings.host, web_socket)
        port = web_socket.getsockname()[1]
        if port != settings.port:
            notes.append(f"Port {settings.port} is taken, so this is port {port}.")
        names = tuple(service.name for service in servers.started)
        ours = console_services(names, folders.state, settings.worker_processes)
        if settings.demo and places.fits(folders.state):
            ours += demo_services(where)
            notes.append("A fleet with traffic of its own runs along; TIDEGATE_DEMO=0 leaves it out.")
        elif settings.demo:
            notes.append("There is no demo: its sockets would have paths that are too long.")
        services = [*servers.started, *ours]
        with sentences("say how to reach the stack", env_file(folders.state)):
            written = "".join(f"{name}={environment[name]}\n" for name in WRITTEN)
            keys.write_private(env_file(folders.state), written)
        held.describe(address=where)
        versions = {service.name: service.version for service in services}
        notes += servers.notes
        logs = Logs(folders.logs)
        try:
            with Display(versions, began=began, address=where, notes=notes) as display:
                display.stage("files", made_ready)
                asyncio.run(_supervise(services, environment, folders, logs, display, web_socket))
                display.say("Stopped. Nothing is left running; the data is kept.")
        finally:
            logs.close()
            env_file(folders.state).unlink(missing_ok=True)
            folders.status.unlink(missing_ok=True)
    return os.EX_OK


@dataclass(frozen=True)
class _Servers:
    started: list[Service]
    urls: dict[str, str]
    notes: list[str]


def _servers(given: Mapping[str, str], folders: Folders) -> _Servers:
    """The servers to start, or those that the settings name, looked up."""
    found = _Servers([], {}, [])
    if "DATABASE_URL" in given:
        found.notes.append(elsewhere.check_postgres(given["DATABASE_URL"]))
    else:
        run = postgres.prepare(folders.state / "postgres")
        found.started.append(server("postgres", run, f"PostgreSQL {run.version}"))
        found.urls["DATABASE_URL"] = run.url
    if "REDIS_URL" in given:
        found.notes.append(elsewhere.check_redis(given["REDIS_URL"]))
    else:
        run_redis = redis.prepare(folders.state / "redis")
        found.started.append(server("redis", run_redis, f"Redis {run_redis.version}"))
        found.urls["REDIS_URL"] = run_redis.url
    return found


def _settings(given: Mapping[str, str]) -> Environment:
    """The settings as far as they are known before anything is made."""
    made_later = {
        "DATABASE_URL": "postgresql://made-later/",
        "REDIS_URL": "redis://made-later/",
        "TIDEGATE_SECRET_KEY": "made-later-" * 10,
        "TIDEGATE_MODE": Mode.EMBEDDED.value,
    }
    return Environment.read({**made_later, **given})


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
        status_file=folders.status,
        logs=logs,
        watcher=display,
        web_socket=web_socket,
    )
    await supervisor.run()
