"""What takes long to prepare, once a run: a migrated database, of which each worker has a copy, and
what a console needs before it starts, of which each live console has one.

Migrations take some five seconds, and a run has several workers and a dozen live consoles. Whole stacks
begin with a copy of one that was up (`tests/stack/whole.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from console.environment import PROJECT

DIRECTORY = "PREPARED_BY_THE_TESTS"  # of the run, whose workers share it
SECONDS_MAX = 600.0  # on a machine that does much else
# The partitions that a roll-up makes first, of each level: else each test with telemetry makes its own.
# Those of other days are made as ever.
MAKE_DAYS = """
    SELECT telemetry_make_day(level, (now() AT TIME ZONE 'UTC')::date + ahead)
    FROM telemetry_watermark, generate_series(-1, 2) AS ahead
"""


@dataclass(frozen=True)
class Prepared:
    """`database` is the name of one that nobody connects to."""

    database: str
    username: str
    password: str


def prepared() -> Prepared:
    return Prepared(**json.loads(once("prepared.json", _prepare)))


def migrated() -> str:
    """The name of a migrated database that nobody connects to."""
    return once("migrated", _migrate)


def collect_static_files() -> None:
    """Into the directory that the settings name, which is only read from then on."""
    from console.shell import static_files  # which wants Django's settings

    once("collected", lambda: str(static_files.collect()))


def directory_of_run(name: str) -> Path:
    """One for all workers, which is gone when the run has ended."""
    path = Path(os.environ[DIRECTORY], name)
    path.mkdir(exist_ok=True)
    return path


def once(fact: str, make: Callable[[], str]) -> str:
    """Made by the first that asks, for whom others wait."""
    path = Path(os.environ[DIRECTORY], fact)
    with _time_of_its_own(), path.with_suffix(".lock").open("w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(make())
    return path.read_text()


@contextlib.contextmanager
def _time_of_its_own() -> Iterator[None]:
    """The test that happens to come first, and those that wait with it, are not late for that. A test's
    limit is this timer (pytest-timeout)."""
    is_timed = threading.current_thread() is threading.main_thread() and signal.getitimer(
        signal.ITIMER_REAL
    ) != (0.0, 0.0)
    if not is_timed:
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


def _migrate() -> str:
    name = _new_name()
    _tell_server(f'CREATE DATABASE "{name}"')
    migrate = [sys.executable, "manage.py", "migrate", "-v", "0", "--skip-checks"]
    subprocess.run(migrate, cwd=PROJECT, env={**os.environ, "DATABASE_URL": _url(name)}, check=True)
    with psycopg.connect(_url(name), autocommit=True) as connection:
        connection.execute(MAKE_DAYS)
    return name


def _prepare() -> str:
    name = _new_name()
    _tell_server(f'CREATE DATABASE "{name}" TEMPLATE "{migrated()}"')
    environment = {**os.environ, "DATABASE_URL": _url(name)}
    admin = next(fact["admin"] for fact in prepare(environment) if "admin" in fact)
    return json.dumps(asdict(Prepared(name, admin["username"], admin["password"])))


def prepare(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run `manage.py prepare`. The facts that it prints."""
    done = subprocess.run(
        [sys.executable, "manage.py", "prepare"],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def database(like: str = "template1") -> Iterator[str]:
    """The URL of a database of one's own beside the tests': an empty one, or a copy. It is dropped at
    the end."""
    name = _new_name()
    _tell_server(f'CREATE DATABASE "{name}" TEMPLATE "{like}"')
    try:
        yield _url(name)
    finally:
        _tell_server(f'DROP DATABASE "{name}" WITH (FORCE)')


def _new_name() -> str:
    return f"live_{secrets.token_hex(6)}"


def _url(name: str) -> str:
    return urlunsplit(urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}"))


def _tell_server(statement: str) -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(statement)
