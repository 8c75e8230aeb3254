"""A console behind PgBouncer in transaction mode, as docs/availability.md says. A real PgBouncer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import psycopg
import pytest

from console.database_address import parse
from console.stack import privileges
from console.stack.endpoint import LOOPBACK, free_port
from console.stack.postgres import PostgresServer
from tests.embedded import stop
from tests.live import SOCKET, START_SECONDS_MAX, LiveConsole, listening, wait_until
from tests.prepared import database, prepared
from tests.processes import Process, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stack,
    pytest.mark.skipif(not shutil.which("pgbouncer"), reason="pgbouncer is not installed"),
]

SERVERS: Final = 3  # connections that the pooler has to PostgreSQL
CLIENTS: Final = 12


@pytest.fixture(scope="module")
def direct() -> Iterator[str]:
    """PostgreSQL itself, with a prepared database."""
    with database(like=prepared().database) as url:
        yield url


@pytest.fixture(scope="module")
def pooler(direct: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, port, to = tmp_path_factory.mktemp("pooler"), free_port(), parse(direct)
    server = f"host={to['host']} port={to['port']} dbname={to['dbname']}"
    (home / "pgbouncer.ini").write_text(
        f"[databases]\n{to['dbname']} = {server} user={to['user']} password={to['password']}\n"
        f"[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {SERVERS}\n"
    )
    home.chmod(0o755)
    identity = privileges.for_postgres(home, [])
    launch = privileges.launcher(identity=identity, dies_with_us=PostgresServer.stop_signal)
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*launch, str(shutil.which("pgbouncer")), str(home / "pgbouncer.ini")],
            stdout=log,
            stderr=log,
        )
    url = f"postgresql://{to['user']}:x@{LOOPBACK}:{port}/{to['dbname']}"

    def answers() -> bool:
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    try:
        wait_until(f"PgBouncer answers: {(home / 'log').read_text()}", answers)
        yield url
    finally:
        stop(process, PostgresServer.stop_signal)


@pytest.fixture(scope="module")
def console(direct: str, pooler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    environment = {
        **os.environ,
        "DATABASE_URL": pooler,
        "TIDEGATE_DATABASE_POOLER": "transaction",
        "TIDEGATE_LISTEN_URL": direct,
    }
    log: Path = tmp_path_factory.mktemp("web") / "log"
    with listening() as listener, log.open("wb") as output:

        def serve() -> Process:
            return start(
                *("console.serve", "--fd", str(SOCKET)),
                environment=environment,
                descriptors={1: output.fileno(), 2: output.fileno(), SOCKET: listener.fileno()},
            )

        before = prepared()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = LiveConsole(address, before.username, before.password, environment, serve, serve())
        try:
            httpx.get(f"{address}/-/health", timeout=START_SECONDS_MAX).raise_for_status()
            yield made
        finally:
            made.stop()


def test_many_requests_share_a_few_connections(console: LiveConsole, direct: str) -> None:
    token = console.token()
    with httpx.Client(
        base_url=console.address,
        headers={"Authorization": f"Bearer {token}"},
        timeout=START_SECONDS_MAX,
    ) as client:

        def make(number: int) -> int:
            slug = f"org-{number}"
            answer = client.post(
                "/api/v1/orgs",
                json={"slug": slug, "name": slug, "reason": "a test"},
                headers={"Idempotency-Key": f"make-{slug}-of-the-test"},
            )
            client.get("/api/v1/orgs").raise_for_status()
            return answer.status_code

        with ThreadPoolExecutor(CLIENTS) as pool:
            made = list(pool.map(make, range(4 * CLIENTS)))
        assert set(made) == {httpx.codes.CREATED}
        assert make(0) == httpx.codes.CREATED, "the answer that was stored is given again"
    with psycopg.connect(direct) as asking:
        # Not PostgreSQL's own, such as one that vacuums.
        [count] = asking.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND query NOT LIKE 'LISTEN%' "
            "AND backend_type = 'client backend'"
        ).fetchone() or [0]
        [orgs] = asking.execute("SELECT count(*) FROM orgs_org").fetchone() or [0]
    assert 0 < count <= SERVERS
    assert orgs == 4 * CLIENTS
