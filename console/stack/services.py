"""What `make up` runs, in one table. A new kind of process is one more row."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from console.demo import places
from console.stack import cluster
from console.stack.core import Spec
from console.stack.postgres import PostgresServer
from console.stack.privileges import launcher
from console.stack.redis import RedisServer

WATCHDOG_SECONDS = 30.0  # on an overloaded machine, who is slow is not killed for it
PREPARE_SECONDS_MAX = 300.0
SERVER_ATTEMPTS_MAX = 3
SERVER_STOP_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 15.0
WEB_SOCKET = "{web socket}"  # in a command, stands for the number of the descriptor

PYTHON = sys.executable
MANAGE = (PYTHON, "-m", "console.manage")
CELERY = (PYTHON, "-m", "celery", "--quiet", "-A", "console.celery")
ALONE = (PYTHON, "-m", "console.stack.alone")
LEAN = {"DJANGO_SETTINGS_MODULE": "console.settings_lean"}
# One machine, one user, JSON only: Celery's warning about root has nothing to warn of here.
NO_WARNING_ABOUT_ROOT = {"PYTHONWARNINGS": "ignore:You're running the worker with superuser privileges"}


@dataclass(frozen=True)
class Service:
    """A process to run: its command, and how to tell that it is ready and alive.

    With `answers` it is asked over its own protocol; otherwise it tells by itself (sd_notify).
    """

    spec: Spec
    command: tuple[str, ...]
    stop_signal: signal.Signals = signal.SIGTERM
    answers: Callable[[], bool] | None = None
    tidy: Callable[[], object] | None = None  # done before each start
    listens: bool = False  # gets the web socket
    environment: dict[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def name(self) -> str:
        return self.spec.name


def server(name: str, run: PostgresServer | RedisServer, version: str) -> Service:
    return Service(
        Spec(
            name,
            attempts_max=SERVER_ATTEMPTS_MAX,
            keeps_data=True,
            watchdog_seconds=WATCHDOG_SECONDS,
            stop_seconds_max=SERVER_STOP_SECONDS_MAX,
        ),
        tuple(run.command),
        stop_signal=run.stop_signal,
        answers=run.answers,
        tidy=run.stop_leftover,
        version=version,
    )


def step(name: str, *command: str, after: tuple[str, ...]) -> Service:
    """Something that has to succeed once. It tells how it goes in JSON lines; see `supervisor`."""
    return Service(
        Spec(name, after=after, once=True, ready_seconds_max=PREPARE_SECONDS_MAX),
        (*launcher(dies_with_us=signal.SIGTERM), *command),
    )


def ours(
    name: str,
    *command: str,
    after: tuple[str, ...] = ("prepare",),
    listens: bool = False,
    environment: dict[str, str] | None = None,
    stop_seconds_max: float = STOP_SECONDS_MAX,
) -> Service:
    """A process of Tidegate, which tells by itself when it is ready and that it is alive."""
    return Service(
        Spec(
            name,
            after=after,
            watchdog_seconds=WATCHDOG_SECONDS,
            stop_seconds_max=stop_seconds_max,
        ),
        (*launcher(dies_with_us=signal.SIGTERM), *command),
        listens=listens,
        environment=environment or {},
    )


def console_services(servers: tuple[str, ...], worker_processes: int) -> list[Service]:
    """Everything but PostgreSQL and Redis, of which `servers` are started here too."""
    return [
        step("prepare", *MANAGE, "prepare", after=servers),
        ours("web", PYTHON, "-m", "console.serve", "--fd", WEB_SOCKET, listens=True),
        ours(
            "worker",
            *CELERY,
            "worker",
            *("--pool", "prefork", "--concurrency", str(worker_processes)),
            *("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "INFO"),
            environment=NO_WARNING_ABOUT_ROOT,
        ),
        ours("beat", *CELERY, "beat", "--pidfile=", environment=LEAN),
        ours("ingest", *MANAGE, "ingest"),
        ours("rollup", *MANAGE, "rollup"),
    ]


def workload_services(state: Path, environment: dict[str, str]) -> list[Service]:
    """Who runs workloads on this machine: the Cluster Server, whose instances end with it and begin with
    the next one, and the orchestrator, which tells it what to run. `environment`: of managers too."""
    return [
        ours(
            "cluster",
            *(*ALONE, "cluster_server", "--state", str(cluster.folder(state))),
            *("--listen", f"unix:{cluster.socket(state)}"),
            *("--end-instances", "--end-time", f"{cluster.END_SECONDS}s"),
            environment=environment,
            stop_seconds_max=cluster.END_SECONDS + STOP_SECONDS_MAX,
        ),
        orchestrator_service(after=("cluster",)),
    ]


def orchestrator_service(after: tuple[str, ...] = ("prepare",)) -> Service:
    return ours("orchestrator", *MANAGE, "orchestrate", after=after)


def demo_services(address: str, listen: str, engine: str) -> list[Service]:
    """A fleet that joins the console at `address`, and whoever makes it, with its workloads, and is its
    clients. `listen`: where its brain serves them. `engine`: that one workload more has."""
    return [
        ours("demo", *MANAGE, "demo", *(("--engine", engine) if engine else ())),
        *(
            ours(name, PYTHON, "-m", "console.demo.launch", name, address, after=("demo",))
            for name in places.NODES
        ),
        ours(
            places.BRAIN,
            *(PYTHON, "-m", "console.demo.launch", places.BRAIN, address, listen),
            after=("demo",),
        ),
    ]
