"""`up`: prepare, start everything, stay until told to stop, stop everything."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from console.demo import places
from console.environment import Environment, Mode, command, env_file
from console.stack import cluster, elsewhere, engines, keys, lock, postgres, redis, redis_users
from console.stack.display import Display
from console.stack.endpoint import LOOPBACK, address, first_free_port, listening_socket
from console.stack.errors import sentences
from console.stack.folders import Folders
from console.stack.logs import Logs
from console.stack.remembered import Remembered
from console.stack.services import (
    Service,
    console_services,
    demo_services,
    orchestrator_service,
    server,
    workload_services,
)
from console.stack.supervisor import Supervisor
from telemetry.credentials import CONSOLE, OWN
from telemetry.stop import ends_clean

# What others on this machine need to work beside the running stack.
WRITTEN = (
    "DATABASE_URL",
    "REDIS_URL",
    "TIDEGATE_CLUSTER_URL",
    "TIDEGATE_DEMO",
    "TIDEGATE_INGEST_URL",
    "TIDEGATE_MODE",
    "TIDEGATE_OWN_TELEMETRY_URL",
    "TIDEGATE_PUBLIC_URL",
    "TIDEGATE_SECRET_KEY",
    "TIDEGATE_STATIC_DIR",
    "TIDEGATE_TELEMETRY_URL",
)


# Who asks for work or does it, and who only has to know that the broker is there. All others are of the
# demo: agents and drivers, which reach telemetry and nothing else.
ASKING = ("prepare", "web", "worker", "beat", "orchestrator", "demo")
READING = ("ingest", "rollup")
ANY_OTHER = "*"
BRAIN_AFTER = 40  # its port, after the console's
PORT_LAST = 65_000
ASKING_ORG = "lighthouse"  # of the demo
DEMO = "true"  # unless it is turned off
NEEDED_BY_BRAINS = ("granian", "tokenizers", "jinja2")


def brain_address(web_socket: socket.socket) -> str:
    """Of the demo's brain: after the port that the console has got. So two starts choose two, though
    neither brain listens yet."""
    port: int = web_socket.getsockname()[1]
    return f"{LOOPBACK}:{first_free_port(min(port + BRAIN_AFTER, PORT_LAST))}"


def up(engine: str = "") -> int:
    """Start everything, stay until told to stop, stop everything. `engine`: a real one, beside those of
    the demo."""
    began = time.monotonic()
    given = {name: value for name, value in os.environ.items() if value}
    settings = _settings(given)  # nothing is touched on the disk for settings that are wrong
    if engine:
        engines.check(given, settings)
    folders = Folders.given(given)
    folders.make()
    try:
        with ends_clean(), lock.held(folders.state) as held:
            return _up(began, given, folders, held, engine)
    except lock.HeldError as error:
        where = error.holder.get("address", "it is still starting")
        since = error.holder.get("since")
        when = f", since {time.strftime('%H:%M:%S', time.localtime(since))}" if since else ""
        print(f"Tidegate is already running: {where} (process {error.holder.get('pid')}{when}).")
        print(f"`{command('down')}` stops it.")
        return os.EX_OK


def _up(began: float, given: Mapping[str, str], folders: Folders, held: lock.Held, engine: str) -> int:
    # What a killed supervisor left runs over the same files: first of all it has to go.
    left = [*Remembered(folders.run).stop_all(), *cluster.end_leftovers(folders.state)]
    notes = [f"Stopped processes of an earlier start: {', '.join(left)}."] if left else []
    for written_before in folders.state.glob("beat-schedule*"):  # pickles, which nobody reads any more
        written_before.unlink()
    servers = _servers(given, folders)
    environment = {
        "TIDEGATE_MODE": Mode.EMBEDDED.value,
        "TIDEGATE_SECRET_KEY": keys.kept(folders.state / "secret_key"),
        "TIDEGATE_STATIC_DIR": str(folders.state / "static"),
        "TIDEGATE_DEMO": DEMO,
        "PYTHONUNBUFFERED": "1",
        **servers.urls,
        **given,
    }
    settings = Environment.read(environment)
    # Whole, since processes run in another directory where Tidegate is installed.
    environment["TIDEGATE_STATE_DIR"] = str(folders.state)
    environment["TIDEGATE_STATIC_DIR"] = str(settings.static_dir)
    made_ready = time.monotonic() - began
    with listening_socket(settings.host, settings.port) as web_socket:
        where = address(settings.host, web_socket)
        environment.setdefault("TIDEGATE_PUBLIC_URL", where)  # drivers of workloads reach it there
        port = web_socket.getsockname()[1]
        if port != settings.port:
            notes.append(f"Port {settings.port} is in use; using port {port}.")
        names = tuple(service.name for service in servers.started)
        ours = console_services(names, settings.worker_processes)
        if "TIDEGATE_CLUSTER_URL" in given:
            ours.append(orchestrator_service())
        elif cluster_url := cluster.url(folders.state):
            environment["TIDEGATE_CLUSTER_URL"] = cluster_url
            ours += workload_services(folders.state, engines.environment(given))
        else:
            notes.append("Workloads are off: the path of the Cluster Server's socket can't be used.")
        brain = curl = ""
        if settings.demo and (why_not := _why_no_demo(folders)):
            notes.append(f"The demo is off: {why_not}")
        elif settings.demo:
            brain = brain_address(web_socket)
            ours += demo_services(where, brain, engine)
            notes.append("A demo fleet with traffic is running; TIDEGATE_DEMO=0 turns it off.")
            if engine:
                curl = _curl(folders, brain)
                notes.append(
                    f"A real vLLM serves {places.VLLM_MODEL} in a minute or two. It is small and random."
                )
        services = [*servers.started, *map(servers.with_urls, ours)]
        with sentences("say how to reach the stack", env_file(folders.state)):
            known = [name for name in WRITTEN if name in environment]
            written = "".join(f"{name}={environment[name]}\n" for name in known)
            keys.write_private(env_file(folders.state), written)
        held.describe(address=where)
        versions = {service.name: service.version for service in services}
        notes += servers.notes
        logs = Logs(folders.logs)
        try:
            with Display(
                versions, began=began, address=where, notes=notes, brain=brain, curl=curl
            ) as display:
                display.stage("files", made_ready)
                asyncio.run(
                    Supervisor(
                        services,
                        environment=servers.without_urls(environment, given),
                        run_directory=folders.run,
                        status_file=folders.status,
                        logs=logs,
                        watcher=display,
                        web_socket=web_socket,
                    ).run()
                )
                display.say("Stopped. All processes have ended; the data is kept.")
        finally:
            logs.close()
            env_file(folders.state).unlink(missing_ok=True)
            folders.status.unlink(missing_ok=True)
    return os.EX_OK


def _why_no_demo(folders: Folders) -> str:
    if not places.fits(folders.state):
        return "the paths of its sockets would be too long."
    if not all(map(importlib.util.find_spec, NEEDED_BY_BRAINS)):
        return "its brain needs the extra “brain” of the package."
    return ""


def _curl(folders: Folders, brain: str) -> str:
    """How to ask the model of the real engine."""
    key = places.caller_token(folders.state.absolute(), ASKING_ORG)
    with contextlib.suppress(ValueError):  # it is somewhere else
        key = key.relative_to(Path.cwd())
    told = {
        "model": places.VLLM_MODEL,
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 12,
    }
    return (
        f'curl http://{brain}/v1/chat/completions -H "Content-Type: application/json" '
        f'-H "Authorization: Bearer $(cat {shlex.quote(str(key))})" -d {shlex.quote(json.dumps(told))}'
    )


@dataclass(frozen=True)
class _Servers:
    started: list[Service]
    urls: dict[str, str]  # as the settings of the stack, and of who works beside it
    by_service: dict[str, dict[str, str]]  # as settings of one process: with the user of its role
    notes: list[str]

    def with_urls(self, service: Service) -> Service:
        """The process with the addresses that are for it, and with no others."""
        its = self.by_service.get(service.name, self.by_service.get(ANY_OTHER, {}))
        return replace(service, environment={**its, **service.environment})

    def without_urls(self, environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
        """What all processes are given."""
        ours = {name for its in self.by_service.values() for name in its} - given.keys()
        return {name: value for name, value in environment.items() if name not in ours}


def _servers(given: Mapping[str, str], folders: Folders) -> _Servers:
    """The servers to start, or those that the settings name, looked up."""
    found = _Servers([], {}, {}, [])
    if "DATABASE_URL" in given:
        found.notes.append(elsewhere.check_postgres(given["DATABASE_URL"]))
    else:
        run = postgres.prepare(folders.state / "postgres")
        found.started.append(server("postgres", run, f"PostgreSQL {run.version}"))
        found.urls["DATABASE_URL"] = run.url
    if "REDIS_URL" in given:
        found.notes.append(elsewhere.check_redis(given["REDIS_URL"]))
    else:
        broker = redis.prepare(folders.state / "redis", users=redis_users.BROKER)
        found.started.append(server("redis", broker, f"Redis {broker.version}"))
        found.urls["REDIS_URL"] = broker.url_of("broker")
        for name in (*ASKING, *READING):
            user = "observer" if name in READING else "broker"
            found.by_service[name] = {"REDIS_URL": broker.url_of(user)}
    if not given.keys() & {"REDIS_URL", "TIDEGATE_TELEMETRY_URL"}:
        _add_telemetry(found, folders)
    return found


def _add_telemetry(found: _Servers, folders: Folders) -> None:
    """A server that work is not on: agents and drivers connect to it."""
    run = redis.prepare(folders.state / "telemetry", users=redis_users.TELEMETRY, strict=True)
    found.started.append(server("telemetry", run, f"Redis {run.version}"))
    own = {"TIDEGATE_OWN_TELEMETRY_URL": run.url_of(OWN, "")}
    telling = {"TIDEGATE_TELEMETRY_URL": run.url_of(CONSOLE)}
    observing = {"TIDEGATE_INGEST_URL": run.url_of("observer")}
    found.urls.update({**own, **telling, **observing})
    more: dict[str, dict[str, str]] = {
        "web": {**own, **telling, **observing},
        "worker": {**telling, "TIDEGATE_REGISTRAR_URL": run.url_of("registrar")},
        "beat": telling,
        "orchestrator": {**telling, "TIDEGATE_ENDPOINTS_URL": run.url_of("leader")},
        "ingest": {**telling, "TIDEGATE_INGEST_URL": run.url_of("ingest")},
        "rollup": telling,
        ANY_OTHER: own,
    }
    for name, urls in more.items():
        found.by_service.setdefault(name, {}).update(urls)


def _settings(given: Mapping[str, str]) -> Environment:
    """The settings as far as they are known before anything is made."""
    made_later = {
        "DATABASE_URL": "postgresql://made-later/",
        "REDIS_URL": "redis://made-later/",
        "TIDEGATE_SECRET_KEY": "made-later-" * 10,
        "TIDEGATE_MODE": Mode.EMBEDDED.value,
        "TIDEGATE_DEMO": DEMO,
    }
    return Environment.read({**made_later, **given})
