"""What `make up` runs, in one table. A new kind of process is one more row."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from console.stack.core import Spec
from console.stack.embedded import Server
from console.stack.privileges import launcher

PYTHON = sys.executable
WATCHDOG_SECONDS = 10.0
CELERY = (PYTHON, "-m", "celery", "-A", "console.celery")


@dataclass(frozen=True)
class Service:
    """A process to run: its command, and how to tell that it is ready and alive.

    With `answers` it is asked over its own protocol; otherwise it tells by itself (sd_notify).
    """

    spec: Spec
    command: tuple[str, ...]
    stop_signal: signal.Signals = signal.SIGTERM
    answers: Callable[[], bool] | None = None
    listens: bool = False  # gets the web socket
    environment: dict[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def name(self) -> str:
        return self.spec.name


def server(name: str, run: Server, version: str) -> Service:
    """PostgreSQL or Redis."""
    return Service(
        Spec(name, watchdog_seconds=WATCHDOG_SECONDS, stop_seconds_max=30),
        tuple(run.command),
        stop_signal=run.stop_signal,
        answers=run.answers,
        version=version,
    )


def ours(
    name: str, *command: str, after: tuple[str, ...] = ("prepare",), listens: bool = False
) -> Service:
    """A process of Tidegate, which tells by itself when it is ready and that it is alive."""
    dies_with_us = launcher(dies_with_us=signal.SIGTERM)
    return Service(
        Spec(name, after=after, watchdog_seconds=WATCHDOG_SECONDS),
        (*dies_with_us, *command),
        listens=listens,
    )


def console_services(servers: tuple[str, ...], state: Path, worker_processes: int) -> list[Service]:
    """Everything but PostgreSQL and Redis, of which `servers` are started here too."""
    prepare = Service(
        Spec("prepare", after=servers, once=True, ready_seconds_max=300),
        (PYTHON, "manage.py", "prepare"),
    )
    return [
        prepare,
        ours("web", PYTHON, "-m", "console.serve", "--fd", "{web_socket}", listens=True),
        ours(
            "worker",
            *CELERY,
            "worker",
            *("--pool", "prefork", "--concurrency", str(worker_processes)),
            *("--without-gossip", "--without-mingle", "--loglevel", "INFO"),
        ),
        ours("beat", *CELERY, "beat", "--schedule", str(state / "beat-schedule"), "--pidfile="),
        ours("ingest", PYTHON, "manage.py", "ingest"),
    ]
