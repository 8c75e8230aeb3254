"""A PostgreSQL of our own: its files, its command line, and whether it answers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

from console.stack import endpoint, keys, leftovers, privileges
from console.stack.binaries import Postgres, find_postgres
from console.stack.endpoint import Endpoint, UnixEndpoint
from console.stack.errors import StackError, sentences

USER = DATABASE = "tidegate"
PORT = 5432  # it names the socket file; nothing listens on TCP unless the path is too long
SOCKET_NAME = f".s.PGSQL.{PORT}"
STATUS_LINE, STATUS_READY = 7, b"ready   "  # of postmaster.pid, by pg_ctl's own rule
INIT_SECONDS_MAX = 120
BUILTIN_LOCALE_MAJOR_MIN = 17
# For tests: nothing of it has to outlive the run, so nothing waits for the disk.
FLEETING = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off")


@dataclass(frozen=True)
class PostgresServer:
    """One server with everything it owns under `home`. Made by `prepare`, run by whoever asks."""

    home: Path
    installation: Postgres
    identity: privileges.Identity | None
    endpoint: Endpoint
    password: str
    durable: bool

    stop_signal = signal.SIGINT  # "fast": ends sessions, then writes everything down

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def sockets(self) -> Path:
        return self.home / "run"

    @property
    def pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    @property
    def version(self) -> str:
        return ".".join(map(str, self.installation.version))

    @property
    def url(self) -> str:
        """With everything in it that libpq would else take from somebody's PGPORT or PGSSLMODE."""
        if isinstance(self.endpoint, UnixEndpoint):
            directory = quote(str(self.endpoint.path.parent), safe="")
            return f"postgresql://{USER}:{self.password}@:{PORT}/{DATABASE}?host={directory}"
        return f"postgresql://{USER}:{self.password}@{self.endpoint}/{DATABASE}?sslmode=disable"

    @property
    def command(self) -> list[str]:
        settings = ["log_timezone=UTC", "timezone=UTC", "log_checkpoints=off"]
        if isinstance(self.endpoint, UnixEndpoint):
            settings += [
                "listen_addresses=",
                f"unix_socket_directories={_as_list_item(self.endpoint.path.parent)}",
                "unix_socket_permissions=0700",
            ]
        else:
            settings += [f"listen_addresses={endpoint.LOOPBACK}", "unix_socket_directories="]
        settings += [] if self.durable else FLEETING
        port = PORT if isinstance(self.endpoint, UnixEndpoint) else self.endpoint.port
        options = [part for setting in settings for part in ("-c", setting)]
        binary = str(self.installation.directory / "postgres")
        launch = privileges.launcher(identity=self.identity, dies_with_us=self.stop_signal)
        return [*launch, binary, "-D", str(self.data), "-p", str(port), *options]

    def answers(self, timeout_seconds: int = 2) -> bool:
        """Whether it takes connections and runs statements. It is not asked while its own file says that
        it starts or stops: each refusal would be a line in its log."""
        with contextlib.suppress(OSError):  # there is none, or it is another user's
            lines = self.pid_file.read_bytes().split(b"\n")  # and at no other sign: one is a path
            if b"".join(lines[STATUS_LINE:]) not in (b"", STATUS_READY):
                return False
        try:
            with psycopg.connect(self.url, connect_timeout=timeout_seconds) as connection:
                connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def stop_leftover(self) -> bool:
        """Stop a server that a killed supervisor left behind on these files."""
        return leftovers.stop_server(
            self.pid_file,
            self.data,
            names=frozenset({"postgres"}),
            how=self.stop_signal,
            traces=[self.sockets / name for name in (SOCKET_NAME, f"{SOCKET_NAME}.lock")],
        )


def prepare(home: Path, *, durable: bool = True) -> PostgresServer:
    """The server over `home`, its data made if there is none. Nothing is running afterwards."""
    with sentences("make a directory for PostgreSQL", home):
        home.mkdir(parents=True, exist_ok=True)
    version_file = home / "data" / "PG_VERSION"
    if os.geteuid() == 0 and not version_file.exists():
        with sentences("hand over the directory of PostgreSQL", home):
            os.chown(home, 0, 0)  # a start that broke off may have left it to somebody gone
    made_by = int(version_file.read_text().split(".")[0]) if version_file.exists() else None
    installation = find_postgres(made_by)
    server = PostgresServer(
        home=home,
        installation=installation,
        identity=privileges.for_postgres(home, [installation.directory / "postgres"]),
        endpoint=endpoint.choose(home / "run" / SOCKET_NAME),
        # Beside the home and not in it: the home belongs to another user when we are root.
        password=keys.kept(home.with_name(f"{home.name}.password")),
        durable=durable,
    )
    with sentences("make a directory for PostgreSQL", server.sockets):
        server.sockets.mkdir(exist_ok=True)
        for path in (home, server.sockets):
            path.chmod(0o700)
            if server.identity:
                server.identity.own(path)
    if made_by is None:
        _make_data(server)
    server.stop_leftover()
    return server


def _make_data(server: PostgresServer) -> None:
    """initdb beside the final place, then one rename: half-made data is never taken for whole."""
    draft, password_file = server.home / "data.new", server.home / "password"
    with sentences("make the data of PostgreSQL", draft):
        shutil.rmtree(draft, ignore_errors=True)
        keys.write_private(password_file, server.password)
        if server.identity:
            server.identity.own(password_file)
    binaries = server.installation.directory
    launch = privileges.launcher(identity=server.identity, dies_with_us=signal.SIGKILL)
    try:
        _run(
            [
                *launch,
                str(binaries / "initdb"),
                *("-D", str(draft), "-U", USER, "-E", "UTF8"),
                *_locale(server.installation),
                *("--auth=scram-sha-256", f"--pwfile={password_file}", "--data-checksums"),
                *("--no-instructions", *(() if server.durable else ("--no-sync",))),
            ]
        )
        single = [*launch, str(binaries / "postgres"), "--single", "-D", str(draft), "postgres"]
        _run(single, given=f'CREATE DATABASE "{DATABASE}"\n')
    finally:
        password_file.unlink(missing_ok=True)
    with sentences("make the data of PostgreSQL", draft):
        draft.rename(server.data)


def _locale(installation: Postgres) -> tuple[str, ...]:
    """Order by code point, know letters beyond ASCII, and be the same on every machine.

    The newer versions bring that along; the older ones need a C library that has C.UTF-8.
    """
    if installation.major >= BUILTIN_LOCALE_MAJOR_MIN:
        return ("--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
    return ("--locale=C.UTF-8",)


def _as_list_item(path: Path) -> str:
    """A path in a setting that is a list: quoted, so that a comma in it does not split it."""
    return '"' + str(path).replace('"', '""') + '"'


def _run(command: list[str], given: str = "") -> None:
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=INIT_SECONDS_MAX,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError(f"PostgreSQL can't create its data: {error}.") from error
    if done.returncode:
        sentence = f"PostgreSQL can't create its data: {_reason(done.stderr or done.stdout)}"
        raise StackError(sentence, exit_code=os.EX_IOERR)


def _reason(said: str) -> str:
    """The line that matters of what a failing initdb says; the others tell how it tidies up."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:
        if found := re.search(r"(?:PANIC|FATAL|ERROR|initdb: error): +(.*)", line):
            return found[1]
    return lines[-1] if lines else "it does not say why"
