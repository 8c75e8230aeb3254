"""A PostgreSQL with a standby, for tests and measurements of promotions: real servers, in turns."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

from console.database_address import conninfo
from console.stack import privileges
from console.stack.binaries import find_postgres
from console.stack.endpoint import UnixEndpoint
from console.stack.postgres import PORT, SOCKET_NAME, USER, PostgresServer
from tests.embedded import running
from tests.live import wait_until

STREAMING_SECONDS_MAX: Final = 60.0
# What is acknowledged is on both servers, although no server waits for its disk.
SAFE: Final = ("synchronous_commit=on", "wal_keep_size=64MB", "autovacuum=off", "fsync=off")


@dataclass(frozen=True)
class Server(PostgresServer):
    """One of the two."""

    @property
    def command(self) -> list[str]:
        more = [part for setting in SAFE for part in ("-c", setting)]
        return [*super().command, *more]

    @property
    def socket_folder(self) -> str:
        return str(self.home / "run")


class PostgresPair:
    """Two servers, of which one follows the other and has every commit before it is acknowledged. Begins
    as a copy of a running server; ends with `close`."""

    def __init__(self, directory: Path, source_url: str) -> None:
        self._directory = directory
        self._source = source_url
        self._running: dict[Server, tuple[subprocess.Popen[bytes], contextlib.ExitStack]] = {}
        password = unquote(urlsplit(source_url).password or "")
        self.primary, self.standby = (self._server(name, password) for name in ("one", "two"))

    def start(self) -> None:
        self._copy(conninfo(self._source), self.primary)
        self._start(self.primary)
        self._ask(self.primary, "CHECKPOINT")
        self.follow()

    def close(self) -> None:
        for server in (self.primary, self.standby):
            self._forget(server)

    def url(self, database: str, **options: str) -> str:
        """Both hosts; connections go to the one that takes writes."""
        servers = sorted((self.primary, self.standby), key=lambda one: one.home.name)
        hosts = quote(",".join(one.socket_folder for one in servers), safe="")
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"postgresql://{USER}:{self.primary.password}@/{database}?host={hosts}&port={PORT}{more}"

    def url_of(self, server: Server, database: str) -> str:
        host = quote(server.socket_folder, safe="")
        return f"postgresql://{USER}:{server.password}@:{PORT}/{database}?host={host}"

    def kill(self) -> None:
        """The primary, all of its processes at once."""
        process = psutil.Process(self._running[self.primary][0].pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._forget(self.primary)

    def promote(self) -> None:
        """Make the standby the primary, which waits for no standby until it has one."""
        self._ask(self.standby, "SELECT pg_promote(true, 60)")
        self.primary, self.standby = self.standby, self.primary

    def follow(self) -> None:
        """Let the other server be the standby, as a fresh copy of the primary."""
        self._copy(conninfo(self.url_of(self.primary, "postgres")), self.standby, follows=True)
        self._start(self.standby)
        wait_until("the standby follows", self._is_streaming, STREAMING_SECONDS_MAX)
        self._ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._ask(self.primary, "SELECT pg_reload_conf()")
        wait_until("commits wait for it", self._is_synchronous, STREAMING_SECONDS_MAX)

    # Inside

    def _is_streaming(self) -> bool:
        return self._ask(self.primary, "SELECT count(*) FROM pg_stat_replication") == 1

    def _is_synchronous(self) -> bool:
        state = "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'"
        return self._ask(self.primary, state) == "sync"

    def _ask(self, server: Server, statement: str) -> object:
        address = conninfo(self.url_of(server, "postgres"))
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None

    def _server(self, name: str, password: str) -> Server:
        home = self._directory / name
        installation = find_postgres()
        home.mkdir(parents=True)
        (home / "run").mkdir()
        server = Server(
            home=home,
            installation=installation,
            identity=privileges.for_postgres(home, [installation.directory / "postgres"]),
            endpoint=UnixEndpoint(home / "run" / SOCKET_NAME),
            password=password,
            durable=False,
        )
        for path in (home, home / "run"):
            path.chmod(0o700)
            if server.identity:
                server.identity.own(path)
        return server

    def _copy(self, source: str, server: Server, *, follows: bool = False) -> None:
        shutil.rmtree(server.data, ignore_errors=True)
        # The password is in the file that pg_basebackup writes, for the standby.
        address = make_conninfo(source, dbname="", application_name=server.home.name)
        launch = privileges.launcher(identity=server.identity)
        command = [
            *(*launch, str(server.installation.directory / "pg_basebackup")),
            *("--pgdata", str(server.data), "--checkpoint=fast", "--wal-method=stream", "--no-sync"),
            *(("--write-recovery-conf",) if follows else ()),
            *("--dbname", address),
        ]
        subprocess.run(command, check=True, capture_output=True, cwd="/", timeout=300)
        alone = "synchronous_standby_names = ''\n"
        with (server.data / "postgresql.auto.conf").open("a") as settings:
            settings.write(alone)  # of the copied server

    def _start(self, server: Server) -> None:
        kept = contextlib.ExitStack()
        process = kept.enter_context(running(server, server.home.with_suffix(".log")))
        self._running[server] = process, kept

    def _forget(self, server: Server) -> None:
        found = self._running.pop(server, None)
        if found:
            found[1].close()


@contextlib.contextmanager
def postgres_pair(directory: Path, source_url: str) -> Iterator[PostgresPair]:
    made = PostgresPair(directory, source_url)
    try:
        made.start()
        yield made
    finally:
        made.close()
