"""PostgreSQL and Redis under one directory, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from console.stack import lock, postgres, redis
from console.stack.errors import StackError, sentences

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
PAUSE_SECONDS = 0.02


class Server(Protocol):
    """What both have in common, and all that is needed to run one."""

    stop_signal: signal.Signals

    @property
    def command(self) -> list[str]: ...

    def answers(self, timeout_seconds: int = 2) -> bool: ...

    def stop_leftover(self) -> bool: ...


@dataclass(frozen=True)
class Embedded:
    """A running pair."""

    postgres: postgres.PostgresServer
    redis: redis.RedisServer

    @property
    def database_url(self) -> str:
        return self.postgres.url

    @property
    def redis_url(self) -> str:
        return self.redis.url


@contextlib.contextmanager
def embedded_servers(directory: Path, *, durable: bool = False) -> Iterator[Embedded]:
    """Both servers, ready, with their data under `directory`; stopped at the end.

    Their names are their own, so any number of pairs run beside each other; a second pair over the
    same directory raises lock.HeldError. Without `durable` they are faster and survive no crash.
    """
    with sentences("make a directory", directory):
        directory.mkdir(parents=True, exist_ok=True)
    with lock.held(directory):
        servers = Embedded(
            postgres.prepare(directory / "postgres", durable=durable),
            redis.prepare(directory / "redis", durable=durable),
        )
        with (
            running(servers.postgres, directory / "postgres.log"),
            running(servers.redis, directory / "redis.log"),
        ):
            yield servers


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of one server, from when it answers until it has stopped."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            server.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not server.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-5:])
                sentence = f"`{' '.join(server.command)}` did not start. The end of {log}:\n{last}"
                raise StackError(sentence)
            time.sleep(PAUSE_SECONDS)
        yield process
    finally:
        stop(process, server.stop_signal)


def stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(how)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
